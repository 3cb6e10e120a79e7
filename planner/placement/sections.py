"""Sections: a problem of offset search in the form that the compiled loops read.

A section is the time between two neighbouring births or deaths: within it the live set stays the same, so a placement
is a pile of buffers for each section.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Sections(NamedTuple):
    """Buffers by section, int64 arrays.

    Attributes:
        lower: the first section in which each buffer lives.
        upper: the section after the last.
        size: bytes, rounded up to the smallest alignment of all; buffers above it see this size.
        need: bytes as given, which the topmost buffer needs below the capacity.
        alignment: powers of two.
        fixed: offset that is given, or -1.
        twin: the next buffer with the same life, size and alignment, or -1: twins may be exchanged, so the search only
            looks at placements where each lies above the one before.
        cover_first: where in `cover` the buffers of each section begin, and where the last one's end.
        cover: buffers alive in a section, section after section.
        near_first: likewise for `near`.
        near: buffers alive at the same time as a buffer, buffer after buffer.
    """

    lower: np.ndarray
    upper: np.ndarray
    size: np.ndarray
    need: np.ndarray
    alignment: np.ndarray
    fixed: np.ndarray
    twin: np.ndarray
    cover_first: np.ndarray
    cover: np.ndarray
    near_first: np.ndarray
    near: np.ndarray

    def totals(self) -> np.ndarray:
        """The live set of each section in bytes, sizes rounded."""
        change = np.zeros(len(self.cover_first), np.int64)
        np.add.at(change, self.lower, self.size)
        np.add.at(change, self.upper, -self.size)
        return np.cumsum(change)[:-1]


def sections_of(
    lower: np.ndarray, upper: np.ndarray, size: np.ndarray, alignment: np.ndarray, fixed: np.ndarray
) -> Sections:
    """Sections of buffers, all of them with bytes; int64 arrays, as the arguments of `place`."""
    times, where = np.unique(np.concatenate([lower, upper]), return_inverse=True)
    n = len(size)
    low, up = where[:n], where[n:]
    grain = int(alignment.min())
    rounded = -(-size // grain) * grain
    time = np.arange(len(times) - 1)[:, None]
    cover_first, cover = _rows((low <= time) & (time < up))
    near_first, near = together(low, up)
    twin = _twins(np.stack([low, up, rounded, size, alignment, np.where(fixed < 0, -1, np.arange(n))]))
    arrays = (low, up, rounded, size, alignment, fixed, twin, cover_first, cover, near_first, near)
    return Sections(*[np.ascontiguousarray(array, np.int64) for array in arrays])


def together(lower: np.ndarray, upper: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each buffer those that live at the same time, as `Sections.near_first` and `Sections.near`."""
    meets = (lower[:, None] < upper) & (lower < upper[:, None])
    np.fill_diagonal(meets, False)
    return _rows(meets)


def _rows(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where each row's true columns begin in the list of all of them, and that list."""
    rows, columns = np.nonzero(matrix)
    return np.searchsorted(rows, np.arange(matrix.shape[0] + 1)), columns


def _twins(columns: np.ndarray) -> np.ndarray:
    """For each column the next equal one, or -1."""
    order = np.lexsort(columns[::-1])
    same = (columns[:, order[:-1]] == columns[:, order[1:]]).all(axis=0)
    twin = np.full(columns.shape[1], -1)
    twin[order[:-1][same]] = order[1:][same]
    return twin

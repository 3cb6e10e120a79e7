"""A problem of offset search: buffers with their lives, sizes and alignments, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from foreplan.base.errors import PlanError

MOST = 2**56  # bytes of all buffers, times and costs: sums of them stay far within int64
Integers = Sequence[int] | np.ndarray


@dataclass(frozen=True)
class PlacementProblem:
    """Checked int64 arrays, one entry a buffer, as the arguments of `place`."""

    lower: np.ndarray
    upper: np.ndarray
    size: np.ndarray
    alignment: np.ndarray
    fixed: np.ndarray

    def some(self, which: np.ndarray) -> PlacementProblem:
        """The problem of these buffers alone."""
        columns = (self.lower, self.upper, self.size, self.alignment, self.fixed)
        return PlacementProblem(*(column[which] for column in columns))

    def live(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Each time at which a life begins or ends, the bytes that live from then on, and where lives begin and end in
        these.
        """
        times, where = np.unique(np.concatenate([self.lower, self.upper]), return_inverse=True)
        change = np.zeros(len(times), np.int64)
        np.add.at(change, where, np.concatenate([self.size, -self.size]))
        lower, upper = np.split(where, 2)
        return times, np.cumsum(change), lower, upper


def checked(
    lower: Integers, upper: Integers, size: Integers, alignment: Integers | int, fixed: Integers | None
) -> PlacementProblem:
    """The arguments of `place` as int64 arrays.

    Raises:
        PlanError: as `place`.
    """
    arrays = [_integers(name, array) for name, array in (("lower", lower), ("upper", upper), ("size", size))]
    n = len(arrays[2])
    arrays.append(_integers("alignment", [alignment] * n if np.isscalar(alignment) else alignment))
    arrays.append(np.full(n, -1, np.int64) if fixed is None else _integers("fixed", fixed))
    if any(len(a) != n for a in arrays):
        raise PlanError(f"buffers to place: arrays of lengths {[len(a) for a in arrays]}, one entry a buffer is needed")
    low, up, sizes, aligns, at = arrays
    bad = (low >= up) | (sizes < 0) | (aligns < 1) | (aligns & (aligns - 1) != 0) | ((at >= 0) & (at % aligns != 0))
    if bad.any():
        i = int(bad.argmax())
        raise PlanError(
            f"buffer {i}: life [{low[i]}, {up[i]}) must not be empty, size {sizes[i]} not negative, alignment "
            f"{aligns[i]} a power of two, and a fixed offset ({at[i]}) a multiple of it"
        )
    if float(sizes.sum(dtype=float) + aligns.sum(dtype=float) + np.maximum(at, 0).max(initial=0)) > MOST:
        raise PlanError(f"buffers to place: sizes, alignments and offsets come to more than {MOST} bytes")
    _check_fixed(PlacementProblem(low, up, sizes, aligns, at))
    return PlacementProblem(low, up, sizes, aligns, at)


def _integers(name: str, given: Any) -> np.ndarray:
    """A sequence of whole numbers as int64[n]; times are limited so that their differences cannot overflow."""
    try:
        array = np.asarray(given)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise PlanError(f"buffers to place: {name} must be a sequence of whole numbers, got {given!r:.80}")
        if array.size and not -MOST <= int(array.min()) <= int(array.max()) <= MOST:
            raise PlanError(f"buffers to place: {name} must lie between -{MOST} and {MOST}, got {given!r:.80}")
    except (TypeError, ValueError, OverflowError):
        raise PlanError(f"buffers to place: {name} must be a sequence of whole numbers, got {given!r:.80}") from None
    return array.astype(np.int64)


def _check_fixed(problem: PlacementProblem) -> None:
    held = [int(i) for i in np.flatnonzero((problem.fixed >= 0) & (problem.size > 0))]
    alive: list[int] = []
    for i in sorted(held, key=lambda i: (problem.lower[i], i)):
        alive = [j for j in alive if problem.upper[j] > problem.lower[i]]
        for j in alive:
            low = max(problem.fixed[i], problem.fixed[j])
            if low < min(problem.fixed[i] + problem.size[i], problem.fixed[j] + problem.size[j]):
                raise PlanError(f"buffers {j} and {i} are alive together and fixed to bytes that overlap, at {low}")
        alive.append(i)

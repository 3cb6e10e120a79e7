"""Tensors as compiled loops see them: one-dimensional memory, and where rows begin in it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from foreplan.cpu.kernel import Refused
from foreplan.graph import Window


@dataclass(frozen=True)
class Rows:
    """Rows at equal distances, the elements of each side by side.

    Attributes:
        count: of rows.
        width: elements of a row.
        step: elements from one row to the next.
    """

    count: int
    width: int
    step: int


def image_rows(window: Window) -> Rows:
    """The positions of float32 images [N, C] or [N, C, H, W] as rows of channels.

    Raises:
        Refused: it is something else, or lies otherwise.
    """
    rows = channel_rows(window)
    if rows is None or window.type.dtype.name != "float32":
        raise Refused(f"{window.type} with the strides {window.strides}")
    return rows


def channel_rows(window: Window) -> Rows | None:
    """The positions of [N, C] or [N, C, H, W] as rows of channels, where they lie so."""
    if len(window.shape) not in (2, 4) or not window.type.size:
        return None
    item, channels = window.type.dtype.itemsize, window.shape[1]
    axes = [0, *range(2, len(window.shape))]
    count, step = 1, 0
    for extent, stride in zip(*([part[i] for i in reversed(axes)] for part in (window.shape, window.strides))):
        if extent == 1:
            continue
        if count > 1 and stride != step * count:
            return None
        step = step or stride
        count *= extent
    step = step if count > 1 else channels * item
    if (channels > 1 and window.strides[1] != item) or step < channels * item or step % item:
        return None
    return Rows(count, channels, step // item)


def flat(array: np.ndarray) -> np.ndarray:
    """The memory from an array's first element to its last, gaps included; strides are not negative."""
    span = 1 + sum((extent - 1) * step for extent, step in zip(array.shape, array.strides)) // array.itemsize
    span = span if math.prod(array.shape) else 0
    return np.lib.stride_tricks.as_strided(array, (span,), (array.itemsize,), writeable=array.flags.writeable)


def flat_input(array: np.ndarray) -> np.ndarray:
    """Likewise, and read-only: a compiled loop sees inputs as such, and so is compiled once."""
    found = flat(array)
    found.flags.writeable = False
    return found


def same_place(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays begin with the same byte."""
    return bool(a.ctypes.data == b.ctypes.data)

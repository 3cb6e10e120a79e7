"""Tensors as compiled loops take them: one-dimensional memory, and the beginnings of rows in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foreplan.graph import Window
from foreplan.runtime.cpu.codegen.elements import bits, check_elements
from foreplan.runtime.kernel import Refused


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
    """The positions of images [N, C, …], of float32 or bfloat16, as rows of channels.

    Raises:
        Refused: other tensors, or other layouts.
    """
    check_elements(window)
    rows = channel_rows(window)
    if rows is None:
        raise Refused(f"{window.type} with the strides {window.strides}")
    return rows


def channel_rows(window: Window) -> Rows | None:
    """The positions of [N, C, …] as rows of channels, if they have this layout."""
    return rows_along(window, 1) if len(window.shape) >= 2 else None


def rows_along(window: Window, axis: int) -> Rows | None:
    """A tensor as rows along one axis, if it has this layout; rows follow one another in C order of the other axes."""
    order = [*(i for i in range(len(window.shape)) if i != axis), axis]
    turned = window.viewed([window.shape[i] for i in order], [window.strides[i] for i in order])
    return rows_from(turned, len(order) - 1)


def rows_from(window: Window, axis: int) -> Rows | None:
    """A tensor as rows of all elements from an axis on, if these lie side by side and rows evenly apart."""
    if not window.type.size:
        return None
    item = window.type.dtype.itemsize
    width, inner = merged(window.shape[axis:], window.strides[axis:], item)
    count, step = merged(window.shape[:axis], window.strides[:axis], width * item)
    if inner != item or step < width * item or step % item:
        return None
    return Rows(count, width, step // item)


def even_step(window: Window) -> int | None:
    """Elements between neighbours in C order; 0 where all are one element; None if distances differ."""
    item = window.type.dtype.itemsize
    _, step = merged(window.shape, window.strides, item)
    return step // item if step >= 0 and step % item == 0 else None


def merged(shape: Sequence[int], strides: Sequence[int], single: int) -> tuple[int, int]:
    """(extent, stride) of axes merged into one. The stride is -1 if they cannot be merged, `single` for one place."""
    count, step = 1, single
    for extent, stride in zip(reversed(shape), reversed(strides)):
        if extent == 1:
            continue
        if count > 1 and stride != step * count:
            return math.prod(shape), -1
        step = stride if count == 1 else step
        count *= extent
    return count, step


def flat(array: np.ndarray) -> np.ndarray:
    """The memory from an array's first element to its last, gaps included, of bfloat16 as bits; strides are not
    negative.
    """
    array = bits(array)
    span = 1 + sum((extent - 1) * step for extent, step in zip(array.shape, array.strides)) // array.itemsize
    span = span if math.prod(array.shape) else 0
    return np.lib.stride_tricks.as_strided(array, (span,), (array.itemsize,), writeable=array.flags.writeable)


def flat_input(array: np.ndarray) -> np.ndarray:
    """Likewise, and read-only: all inputs are of this type, so a loop is compiled once."""
    found = flat(array)
    found.flags.writeable = False
    return found


def same_place(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays begin with the same byte."""
    return bool(a.ctypes.data == b.ctypes.data)

"""Elements at taps of windows that were saved by number, as max pooling saves them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from foreplan.graph import Array, Builder, Kind, TensorType, Value
from foreplan.graph.types import INT64
from foreplan.ops.expr import Expr, call, cast, where
from foreplan.ops.index import Gather
from foreplan.ops.map import elementwise
from foreplan.ops.shape import reshape
from foreplan.ops.window import Windows


def tap_places(b: Builder, windows: Windows, index: Value, columns: bool = False) -> Value:
    """Places, int64, in images [N, C, *S] as one vector, from the saved numbers of taps [N, C, *O].

    Args:
        columns: count places in each channel with its first axis innermost.
    """
    axes = len(windows.kernel)
    strides, step = [0] * axes, 1
    for axis in range(axes) if columns else reversed(range(axes)):
        strides[axis] = step
        step *= windows.extent[axis]
    planes = np.arange(index.shape[0] * index.shape[1], dtype=np.int64) * step
    start = _stored(b, planes.reshape(*index.shape[:2], *(1,) * axes))

    def place(tap: Expr, start: Expr, *firsts: Expr) -> Expr:
        return sum((at * stride for at, stride in zip(_tap_at(windows, tap, firsts), strides)), start)

    return elementwise(b, place, index, start, *_first_taps(b, windows))


def read_at_taps(b: Builder, x: Value, windows: Windows, index: Value) -> Value:
    """The element of x [N, C, *S] at each saved tap; zero where that lies outside."""
    read = b.apply(Gather(0), reshape(b, x, (x.type.size,)), tap_places(b, windows, index))

    def inside(read: Expr, tap: Expr, *firsts: Expr) -> Expr:
        for at, extent in zip(_tap_at(windows, tap, firsts), windows.extent):
            read = where(call("and", at >= 0, at < extent), read, 0.0)
        return read

    return elementwise(b, inside, read, index, *_first_taps(b, windows))


def _first_taps(b: Builder, windows: Windows) -> list[Value]:
    """Along each axis, where the first tap of each window lies."""
    found = []
    for axis, (low, _) in enumerate(windows.pads):
        first = np.arange(windows.positions[axis], dtype=np.int64) * windows.strides[axis] - low
        found.append(_stored(b, first.reshape(-1, *(1 for _ in windows.kernel[axis + 1 :]))))
    return found


def _tap_at(windows: Windows, tap: Expr, firsts: Sequence[Expr]) -> list[Expr]:
    """Along each axis, where the tap of a number lies."""
    tap, found = cast(tap, "int64"), []
    for first, taps, gap in reversed(list(zip(firsts, windows.kernel, windows.dilations))):
        found.append(first + call("mod", tap, taps) * gap)
        tap = call("truncdiv", tap, taps)
    return found[::-1]


def _stored(b: Builder, array: np.ndarray) -> Value:
    return b.store(b.scope + "places", TensorType(INT64, array.shape), Kind.CONSTANT, Array(array))

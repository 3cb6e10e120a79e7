"""The way back from windows to images: elements put where they were taken from."""

from __future__ import annotations

import math
from typing import Unpack

import numpy as np

from foreplan.base.errors import ShapeError
from foreplan.graph import Array, Builder, Kind, TensorType, Value
from foreplan.graph.types import INT64, Shape
from foreplan.ops.expr import maximum
from foreplan.ops.index import ScatterAdd
from foreplan.ops.map import elementwise
from foreplan.ops.shape import broadcast_to, reshape, slice_axis
from foreplan.ops.window import Geometry, count_positions, per_axis, symmetric


def placed(b: Builder, x: Value, places: Value, shape: Shape, shared: bool = False) -> Value:
    """Zeros of a shape with x's elements at their places in it as one vector.

    Args:
        places: integers of x's shape.
        shared: whether a place may be named again, for the same element; else it would be added.
    """
    count, total = x.type.size, math.prod(shape)
    at = reshape(b, places, (count,))
    found = b.apply(ScatterAdd(0, (total,)), at, reshape(b, x, (count,)))
    if shared:
        one = b.store(b.scope + "one", TensorType(x.dtype, ()), Kind.CONSTANT, Array(np.ones((), x.dtype.numpy)))
        hits = b.apply(ScatterAdd(0, (total,)), at, broadcast_to(b, one, (count,)))
        found = elementwise(b, lambda sum, n: sum / maximum(n, 1.0), found, hits, dtype=x.dtype)
    return reshape(b, found, shape)


def col2im(b: Builder, x: Value, image: Shape, kernel: Shape, **geometry: Unpack[Geometry]) -> Value:
    """Windows x [N, C·|R|, |O|] added up into images [N, C, *image], as ONNX Col2Im: the adjoint of taking windows.

    Raises:
        ShapeError: x does not hold the windows of such images.
    """
    axes, taps = len(image), math.prod(kernel)
    strides, dilations = (per_axis(geometry.get(name), axes) for name in ("strides", "dilations"))  # type: ignore[arg-type]
    pads = symmetric(geometry.get("pads"), axes)
    positions = count_positions(image, kernel, strides, pads, dilations)
    if len(x.shape) != 3 or x.shape[1] % taps or x.shape[2] != math.prod(positions):
        raise ShapeError(f"{x!r} does not hold {math.prod(positions)} windows of {taps} elements")
    whole = tuple(extent + low + high for extent, (low, high) in zip(image, pads))
    at = np.zeros((*kernel, *positions), np.int64)
    for axis, (taken, count) in enumerate(zip(kernel, positions)):
        along = np.arange(taken)[:, None] * dilations[axis] + np.arange(count) * strides[axis]
        around = [taken if i == axis else count if i == axes + axis else 1 for i in range(2 * axes)]
        at = at * whole[axis] + along.reshape(around)
    places = b.store(b.scope + "places", TensorType(INT64, (at.size,)), Kind.CONSTANT, Array(at.reshape(-1)))
    n, channels = x.shape[0], x.shape[1] // taps
    windows = reshape(b, x, (n, channels, at.size))
    y = b.apply(ScatterAdd(2, (n, channels, math.prod(whole))), places, windows)
    y = reshape(b, y, (n, channels, *whole))
    for axis, (extent, (low, _)) in enumerate(zip(image, pads)):
        y = slice_axis(b, y, 2 + axis, low, extent)
    return y

"""Reading images between their elements: weighted sums of rows, at places that are computed from other tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from foreplan.base.errors import UnsupportedError
from foreplan.graph import Array, Builder, Kind, TensorType, Value, as_dtype
from foreplan.graph.types import Shape
from foreplan.ops.expr import Expr, Scalar, call, cast, clip, minimum, where
from foreplan.ops.index import Gather
from foreplan.ops.map import convert, elementwise
from foreplan.ops.shape import reshape, transpose

MOST_ROWS = (1 << 31) - 1  # places are int32


@dataclass(frozen=True)
class Tap:
    """One element that a sample reads along one axis.

    Attributes:
        place: expression of the coordinate: the element, of integer value, within the axis.
        weight: expression of the coordinate.
    """

    place: Expr
    weight: Expr | Scalar


def inside(place: Expr, extent: int) -> Expr:
    """Whether a place is on the axis."""
    return call("and", place >= 0.0, place <= extent - 1.0)


def linear_taps(at: Expr, extent: int, padding: Callable[[Expr, Expr], Tap]) -> tuple[Tap, Tap]:
    """The elements on both sides of a coordinate, weighted by how near they are.

    Args:
        at: the coordinate.
        extent: of the axis.
        padding: from a place, which may be outside, and a weight to what is read.
    """
    low = call("floor", at)
    share = at - low
    return padding(low, 1.0 - share), padding(low + 1.0, share)


def zeros_outside(extent: int) -> Callable[[Expr, Expr], Tap]:
    """Padding of zeros: what is outside has no weight."""
    return lambda place, weight: Tap(nearest_inside(place, extent), where(inside(place, extent), weight, 0.0))


def nearest_inside(place: Expr, extent: int) -> Expr:
    """The place, or the nearest one on the axis."""
    return clip(place, 0.0, extent - 1.0)


def mirrored(at: Expr, low: float, high: float) -> Expr:
    """A coordinate reflected at both borders until it is between them."""
    span = high - low
    if not span:
        return at * 0.0 + low
    beyond = at - low
    rest = beyond - call("floor", beyond * (0.5 / span)) * (2.0 * span)
    return minimum(rest, 2.0 * span - rest) + low


def rows_of(b: Builder, x: Value, groups: int = 1) -> Value:
    """Images [N, groups·C, *S] as rows [N·groups·|S|, C], one an element of an image."""
    n, channels, *extents = x.shape
    if n * groups * math.prod(extents) > MOST_ROWS:
        raise UnsupportedError(f"{x!r} has too many elements to be read at computed places; {MOST_ROWS:,} are the most")
    parts = reshape(b, x, (n * groups, channels // groups, math.prod(extents)))
    return reshape(b, transpose(b, parts, (0, 2, 1)), (n * groups * math.prod(extents), channels // groups))


def images_of(b: Builder, rows: Value, x: TensorType, extents: Sequence[int]) -> Value:
    """Rows [N·|O|, C] as images [N, C, *O] of x's type."""
    n, channels = x.shape[:2]
    narrow = reshape(b, convert(b, rows, x.dtype), (n, math.prod(extents), channels))
    return reshape(b, transpose(b, narrow, (0, 2, 1)), (n, channels, *extents))


def starts(b: Builder, count: int, step: int, rank: int) -> Value:
    """0, step, 2·step, …: where the rows of each image begin, along the first of `rank` axes."""
    array = (np.arange(count, dtype=np.int64) * step).astype(np.int32).reshape(count, *(1,) * (rank - 1))
    return constant(b, array)


def constant(b: Builder, array: np.ndarray) -> Value:
    """A constant of the graph."""
    return b.store(b.scope + "places", TensorType(as_dtype(array.dtype), array.shape), Kind.CONSTANT, Array(array))


def samples(
    b: Builder,
    rows: Value,
    extents: Shape,
    taps: Iterable[Sequence[Tap]],
    start: Value,
    coordinates: Sequence[Value],
    factors: Sequence[Value] = (),
    total: Value | None = None,
) -> Value:
    """Σ weight · row over taps: wide rows [M, C], one a coordinate.

    Args:
        rows: [R, C].
        extents: of an image, in C order.
        taps: for each element that is read, one `Tap` an axis, as expressions of the coordinates a0, a1, ….
        start: int32, the first row of the image of each coordinate; broadcasts to the coordinates.
        coordinates: values that broadcast together, to M elements.
        factors: further values by which every weight is multiplied.
        total: rows that the sum is added to.
    """
    count, wide = len(coordinates), rows.dtype.wide
    strides = [math.prod(extents[i + 1 :]) for i in range(len(extents))]
    for each in taps:

        def place(*args: Expr, each: Sequence[Tap] = each) -> Expr:
            terms = [cast(tap.place, "int32") * stride for tap, stride in zip(each, strides)]
            return sum(terms, args[count])

        def weight(*args: Expr, each: Sequence[Tap] = each) -> Any:
            product: Expr | Scalar = 1.0
            for factor in (*(tap.weight for tap in each), *args[count:]):
                product = factor if isinstance(product, float) else product * factor
            return product

        at = elementwise(b, place, *coordinates, start)
        part = b.apply(Gather(0), rows, reshape(b, at, (at.type.size,)))
        plain = not factors and all(not isinstance(tap.weight, Expr) for tap in each)
        if not plain:
            weights = reshape(b, elementwise(b, weight, *coordinates, *factors, dtype=wide), (at.type.size, 1))
            if total is None:
                total = elementwise(b, lambda row, w: row * w, convert(b, part, wide), weights)
            else:
                total = elementwise(b, lambda row, w, sum: row * w + sum, convert(b, part, wide), weights, total)
        else:
            part = convert(b, part, wide)
            total = part if total is None else elementwise(b, lambda row, sum: row + sum, part, total)
    assert total is not None
    return total

"""Regions of images averaged without rounding their borders (He et al. 2017, arXiv:1703.06870), as ONNX RoiAlign."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from foreplan.base.errors import ShapeError, UnsupportedError
from foreplan.graph import Builder, Op, TensorType, Value, register
from foreplan.graph.axes import ONE, Axes, Factors, named
from foreplan.graph.op import Cotangents, Types, Values
from foreplan.graph.types import Shape
from foreplan.ops.expr import Arg, Expr, call, cast, maximum, where
from foreplan.ops.index import check_indices
from foreplan.ops.map import convert, elementwise
from foreplan.ops.pullback import by_parts
from foreplan.ops.sampling import Tap, constant, images_of, linear_taps, nearest_inside, rows_of, samples
from foreplan.ops.shape import reshape, slice_axis

MOST_POINTS = 32  # along an axis of a bin; each point of both axes makes nodes of its own


@register
@dataclass(frozen=True)
class RoiAlign(Op):
    """y[r, c, i, j] = the mean, or the largest, of points of x in bin (i, j) of region r.

    Inputs: x [N, C, H, W]; regions [R, 4] as x₁, y₁, x₂, y₂; the image of each region, integers [R]. Output:
    [R, C, *shape]. A point is interpolated from the four elements around it; the largest one is that of the weighted
    elements themselves, as ONNX has it. It is made of gathers of rows, and keeps its inputs alone for backward.

    Attributes:
        shape: bins of a region along both axes.
        points: of a bin, along each axis.
        how: mean or max.
        scale: of the regions' coordinates to those of x.
        half_pixel: coordinates are less by a half, and regions may be smaller than an element.
    """

    name: ClassVar[str] = "roi_align"
    shape: Shape
    points: int
    how: str = "mean"
    scale: float = 1.0
    half_pixel: bool = True

    def __post_init__(self) -> None:
        if self.how not in ("mean", "max") or len(self.shape) != 2 or min(*self.shape, self.points) < 1:
            raise ValueError(f"there is no {self.how!r} of {self.points} x {self.points} points in {self.shape} bins")

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """[R, C, *shape] of x's elements."""
        self.check_count(inputs, 3)
        x, regions, images = inputs
        check_indices(images)
        floats = x.dtype.is_float and regions.dtype.is_float
        if x.rank != 4 or not floats or images.rank != 1 or regions.shape != (*images.shape, 4):
            raise ShapeError(
                f"needs floats x [N, C, H, W] and regions [R, 4], images [R], and got {x}, {regions}, {images}"
            )
        if not x.size:
            raise ShapeError(f"there is nothing to read in {x}")
        return (x.with_shape((*images.shape, x.shape[1], *self.shape)),)

    def indexing(self, inputs: Types, outputs: Types) -> Axes:
        """Channels and regions."""
        f, (x, regions, _) = Factors(), inputs
        n, c, *images = f.row("x", x.shape)
        region, bins = f.dim(("r", regions.shape[0])), f.row("o", outputs[0].shape[2:])
        return f.axes([(n, c, *images), (region, ONE), (region,)], [(region, c, *bins)], named([n, *images, *bins]))

    def vjp(self, b: Builder, inputs: Values, outputs: Values, cotangents: Cotangents) -> Cotangents:
        """Of the parts, made again."""
        return by_parts(self, b, inputs, cotangents)

    def valid_range(self, index: int, inputs: Types) -> tuple[int, int] | None:
        """The images that there are."""
        return (0, inputs[0].shape[0] - 1) if index == 2 else None

    def flops(self, inputs: Types, outputs: Types) -> int:
        """A product and an addition an element that is read, four a point."""
        return 8 * self.points**2 * outputs[0].size

    def decompose(self, b: Builder, inputs: Values) -> Values:
        """Gathers of rows, weighted and added up one after the other."""
        x, regions, images = inputs
        extents, count = x.shape[2:], regions.shape[0]
        regions = convert(b, regions, regions.dtype.wide)
        corners = [reshape(b, slice_axis(b, regions, 1, i, 1), (count, 1, 1)) for i in range(4)]
        plane = math.prod(extents)
        first = reshape(b, elementwise(b, cast(Arg(0), "int32") * plane, images), (count, 1, 1))
        rows = rows_of(b, x)
        taps = list(itertools.product(*(self._taps(Arg(i), extent) for i, extent in enumerate(extents))))
        found = [self._coordinates(b, corners[1 - i :: 2], i) for i in range(2)]
        total: Value | None = None
        for coordinates in itertools.product(*found):
            if self.how == "mean":
                total = samples(b, rows, extents, taps, first, coordinates, total=total)
                continue
            for tap in taps:
                one = samples(b, rows, extents, [tap], first, coordinates)
                total = one if total is None else elementwise(b, maximum, total, one)
        assert total is not None
        if self.how == "mean":
            total = elementwise(b, lambda sum: sum * (1.0 / self.points**2), total)
        return [images_of(b, total, x.type.with_shape((count, *x.shape[1:])), self.shape)]

    def _coordinates(self, b: Builder, borders: Sequence[Value], axis: int) -> list[Value]:
        """Along an axis of x, those of the first points of all bins, of the second points, …"""
        bins, around = self.shape[axis], (1, -1, 1) if axis == 0 else (1, 1, -1)
        numbers = constant(b, np.arange(bins, dtype=borders[0].dtype.numpy).reshape(around))

        def at(low: Expr, high: Expr, number: Expr, point: int) -> Expr:
            extent = (high - low) * self.scale
            if not self.half_pixel:
                extent = maximum(extent, 1.0)
            share = (point + 0.5) / self.points
            return low * self.scale - 0.5 * self.half_pixel + (number + share) * (extent / float(bins))

        return [elementwise(b, at(Arg(0), Arg(1), Arg(2), point), *borders, numbers) for point in range(self.points)]

    def _taps(self, at: Expr, extent: int) -> Sequence[Tap]:
        """Points up to one element outside read the border; those beyond read nothing."""
        near = call("and", at >= -1.0, at <= float(extent))

        def padded(place: Expr, weight: Expr) -> Tap:
            return Tap(nearest_inside(place, extent), where(near, weight, 0.0))

        return linear_taps(nearest_inside(at, extent), extent, padded)


def roi_align(
    b: Builder,
    x: Value,
    regions: Value,
    images: Value,
    shape: Sequence[int],
    points: int,
    *,
    how: str = "mean",
    scale: float = 1.0,
    half_pixel: bool = True,
) -> Value:
    """Bins of regions of x; see `RoiAlign`.

    Raises:
        ShapeError: an attribute has no such value.
        UnsupportedError: a bin has more points than nodes are written out for.
    """
    if points > MOST_POINTS:
        raise UnsupportedError(
            f"roi_align: {points:,} points along each axis of a bin; foreplan takes {MOST_POINTS} at most"
        )
    try:
        op = RoiAlign(tuple(shape), points, how, scale, half_pixel)
    except ValueError as error:
        raise ShapeError(f"roi_align: {error}") from None
    return b.apply(op, x, regions, images)

"""Images read at the places of a grid (Jaderberg et al. 2015, arXiv:1506.02025), as ONNX GridSample."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from foreplan.base.errors import ShapeError
from foreplan.graph import Builder, Op, TensorType, Value, register
from foreplan.graph.axes import ONE, Axes, Factors, named
from foreplan.graph.op import Cotangents, Types, Values
from foreplan.ops.expr import Arg, Expr, call, where
from foreplan.ops.map import convert
from foreplan.ops.pullback import by_parts
from foreplan.ops.sampling import (
    Tap,
    images_of,
    linear_taps,
    mirrored,
    nearest_inside,
    rows_of,
    samples,
    starts,
    zeros_outside,
)
from foreplan.ops.shape import reshape, slice_axis

TERMS = {"nearest": 1, "linear": 2, "cubic": 4}
PADDINGS = ("zeros", "border", "reflection")
CUBIC = -0.75  # the parameter of the cubic kernel


@register
@dataclass(frozen=True)
class GridSample(Op):
    """y[n, c, o] = x[n, c, ·] interpolated at grid[n, o].

    Inputs: x [N, C, *S]; grid [N, *O, d] for the d axes S, the last axis first, where −1 and 1 are the borders of x.
    Output: y [N, C, *O]. It is made of gathers of rows, and keeps x and the grid alone for backward.

    Attributes:
        mode: nearest, linear or cubic (Keys 1981, with a = −3/4). Each element that a cubic reads beyond a border is
            padded by itself, as PyTorch and ONNX Runtime do.
        padding: outside of x there are zeros, its border, or its reflection.
        align_corners: −1 and 1 mean the centres of the first and last element, not their outer borders.
    """

    name: ClassVar[str] = "grid_sample"
    mode: str = "linear"
    padding: str = "zeros"
    align_corners: bool = False

    def __post_init__(self) -> None:
        if self.mode not in TERMS or self.padding not in PADDINGS:
            raise ValueError(f"there is no mode {self.mode!r} with the padding {self.padding!r}")

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """The images' element type and channels, at the grid's places."""
        self.check_count(inputs, 2)
        x, grid = inputs
        axes = x.rank - 2
        fits = axes >= 1 and grid.rank == x.rank and grid.shape[0] == x.shape[0] and grid.shape[-1] == axes
        if not fits or not x.dtype.is_float or not grid.dtype.is_float:
            raise ShapeError(f"needs floats x [N, C, *S] and grid [N, *O, axes of S], and got {x} and {grid}")
        if not all(x.shape[2:]):
            raise ShapeError(f"there is nothing to read in {x}")
        return (x.with_shape((*x.shape[:2], *grid.shape[1:-1])),)

    def indexing(self, inputs: Types, outputs: Types) -> Axes:
        """All of each image, at any positions."""
        f, (x, grid) = Factors(), inputs
        items = f.row("n", x.shape[:2])
        images, positions = f.row("s", x.shape[2:]), f.row("o", grid.shape[1:-1])
        return f.axes([(*items, *images), (items[0], *positions, ONE)], [(*items, *positions)], named(images))

    def reached(self, inputs: Values) -> Values:
        """The nearest element is the same all around a point."""
        return inputs[:1] if self.mode == "nearest" else inputs

    def vjp(self, b: Builder, inputs: Values, outputs: Values, cotangents: Cotangents) -> Cotangents:
        """Of the parts, made again."""
        return by_parts(self, b, inputs, cotangents)

    def flops(self, inputs: Types, outputs: Types) -> int:
        """A product and an addition an element that is read."""
        return 2 * TERMS[self.mode] ** (inputs[0].rank - 2) * outputs[0].size

    def decompose(self, b: Builder, inputs: Values) -> Values:
        """Gathers of rows, weighted and added up one after the other."""
        x, grid = inputs
        n, extents, axes = x.shape[0], x.shape[2:], len(x.shape) - 2
        count = math.prod(grid.shape[1:-1])
        grid = convert(b, grid, grid.dtype.wide)
        coordinates = [reshape(b, slice_axis(b, grid, -1, axes - 1 - i, 1), (n, count)) for i in range(axes)]
        per_axis = [self._taps(Arg(i), extent) for i, extent in enumerate(extents)]
        first = starts(b, n, math.prod(extents), 2)
        rows = samples(b, rows_of(b, x), extents, itertools.product(*per_axis), first, coordinates)
        return [images_of(b, rows, x.type, grid.shape[1:-1])]

    def _taps(self, at: Expr, extent: int) -> Sequence[Tap]:
        """What a coordinate of the grid reads along an axis."""
        low, high = (0.0, extent - 1.0) if self.align_corners else (-0.5, extent - 0.5)
        at = (at + 1.0) * ((high - low) / 2.0) + low
        if self.mode == "nearest":
            at = call("round", at)
        if self.padding == "border" and self.mode != "cubic":
            at = nearest_inside(at, extent)
        elif self.padding == "reflection":
            at = mirrored(at, low, high)

        def within(place: Expr, weight: Expr) -> Tap:
            if self.padding == "reflection" and self.mode == "cubic":
                place = mirrored(place, low, high)
            return Tap(nearest_inside(place, extent), weight)

        padded = zeros_outside(extent) if self.padding == "zeros" else within
        if self.mode == "linear":
            return linear_taps(at, extent, padded)
        if self.mode == "nearest":
            if self.padding == "zeros":
                return [padded(at, at * 0.0 + 1.0)]
            return [Tap(nearest_inside(at if self.align_corners else call("round", at), extent), 1.0)]
        base = call("floor", at)
        share = at - base
        return [padded(base + float(i), _cubic(share - float(i))) for i in range(-1, 3)]


def _cubic(distance: Expr) -> Expr:
    """The cubic convolution kernel (Keys 1981) at a distance less than 2."""
    d = call("abs", distance)
    near = ((CUBIC + 2) * d - (CUBIC + 3)) * d * d + 1.0
    far = ((d - 5.0) * d + 8.0) * d * CUBIC - 4 * CUBIC
    return where(d <= 1.0, near, far)


def grid_sample(
    b: Builder, x: Value, grid: Value, mode: str = "linear", padding: str = "zeros", align_corners: bool = False
) -> Value:
    """x [N, C, *S] read at the places of a grid [N, *O, axes of S]; see `GridSample`."""
    try:
        op = GridSample(mode, padding, bool(align_corners))
    except ValueError as error:
        raise ShapeError(f"grid_sample: {error}") from None
    return b.apply(op, x, grid)

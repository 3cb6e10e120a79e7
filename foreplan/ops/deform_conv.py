"""Convolution whose taps are moved by offsets (Zhu et al. 2019, arXiv:1811.11168), as ONNX DeformConv."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import ClassVar, Unpack

import numpy as np

from foreplan.base.errors import ShapeError
from foreplan.graph import Builder, Op, TensorType, Value, register
from foreplan.graph.op import Cotangents, Types, Values
from foreplan.graph.types import Shape
from foreplan.ops.expr import Arg
from foreplan.ops.map import convert, elementwise
from foreplan.ops.matmul import MatMul
from foreplan.ops.pullback import by_parts
from foreplan.ops.sampling import constant, linear_taps, rows_of, samples, starts, zeros_outside
from foreplan.ops.shape import reshape, slice_axis, transpose
from foreplan.ops.window import Geometry, Pads, count_positions, per_axis, symmetric


@register
@dataclass(frozen=True)
class DeformConv(Op):
    """y[n, k, o] = Σ w[k, c, r] · m[n, r, o] · x[n, c, o·stride − low + r·dilation + offset[n, r, ·, o]].

    Inputs: x [N, C, *S]; w [K, C/groups, *R]; offset [N, G·|R|·d, *O], the d axes innermost, in elements; and, if
    `masked`, m [N, G·|R|, *O]. Output: y [N, K, *O]. x is interpolated linearly; outside there are zeros. It is made of
    gathers of rows and a product for each tap, and keeps its inputs alone for backward.

    Attributes:
        strides: elements from one window to the next.
        pads: (low, high) zeros of each axis.
        dilations: elements from one tap to the next.
        groups: channels fall into this many groups, convolved apart.
        offset_groups: G, groups of channels with offsets of their own.
        masked: whether there is m.
    """

    name: ClassVar[str] = "deform_conv"
    strides: Shape
    pads: Pads
    dilations: Shape
    groups: int = 1
    offset_groups: int = 1
    masked: bool = False

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """Positions along each axis as `count_positions` gives them."""
        self.check_count(inputs, 3 + self.masked)
        x, w, offset, *mask = inputs
        axes = x.rank - 2
        if axes < 1 or w.rank != x.rank or not x.dtype.is_float or w.dtype != x.dtype:
            raise ShapeError(f"needs floats x [N, C, *S] and weights [K, C/groups, *R], and got {x} and {w}")
        channels, count = x.shape[1], self.groups
        if min(count, self.offset_groups) < 1 or channels % self.offset_groups or w.shape[0] % count:
            raise ShapeError(f"{x} and {w} do not fall into {count} groups, with {self.offset_groups} of offsets")
        if w.shape[1] * count != channels:
            raise ShapeError(f"weights {w} in {count} groups do not fit {x}")
        if not x.size or not w.size:
            raise ShapeError(f"there is nothing to read in {x} and {w}")
        positions = count_positions(x.shape[2:], w.shape[2:], self.strides, self.pads, self.dilations)
        taps = self.offset_groups * math.prod(w.shape[2:])
        shapes = [(x.shape[0], taps * each, *positions) for each in (axes, 1)]
        if any(each.shape != shape or not each.dtype.is_float for each, shape in zip((offset, *mask), shapes)):
            raise ShapeError(f"offsets must be {list(shapes[0])}, and masks {list(shapes[1])}, and are {inputs[2:]}")
        return (x.with_shape((x.shape[0], w.shape[0], *positions)),)

    def vjp(self, b: Builder, inputs: Values, outputs: Values, cotangents: Cotangents) -> Cotangents:
        """Of the parts, made again."""
        return by_parts(self, b, inputs, cotangents)

    def flops(self, inputs: Types, outputs: Types) -> int:
        """Those of the convolution, and of 2ᵈ elements that each of its factors is made of."""
        taps = math.prod(inputs[1].shape[1:])
        read = outputs[0].size // max(1, outputs[0].shape[1]) * inputs[0].shape[1] * math.prod(inputs[1].shape[2:])
        return 2 * taps * outputs[0].size + (2 << inputs[0].rank - 2) * read

    def decompose(self, b: Builder, inputs: Values) -> Values:
        """For each tap, x at its places, times the tap's weights; added up one after the other."""
        x, w, offset, *mask = inputs
        n, extents, kernel = x.shape[0], x.shape[2:], w.shape[2:]
        positions, split = offset.shape[2:], self.offset_groups
        count, axes, taps = math.prod(positions), len(extents), math.prod(kernel)
        first = starts(b, n * split, math.prod(extents), 2)
        rows = rows_of(b, x, split)
        moved = reshape(b, offset, (n * split, taps, axes, count))
        weights = reshape(b, w, (self.groups, w.shape[0] // self.groups, w.shape[1], taps))
        places = self._positions(b, positions, offset)
        read = list(itertools.product(*(linear_taps(Arg(i), m, zeros_outside(m)) for i, m in enumerate(extents))))
        total: Value | None = None
        for k, tap in enumerate(np.ndindex(*kernel)):
            here = slice_axis(b, moved, 1, k, 1)
            coordinates = [
                elementwise(
                    b,
                    lambda o, p, shift=float(r * gap): o + (p + shift),
                    reshape(b, slice_axis(b, here, 2, i, 1), (n * split, count)),
                    places[i],
                    dtype=offset.dtype.wide,
                )
                for i, (r, gap) in enumerate(zip(tap, self.dilations))
            ]
            masks = [
                reshape(b, slice_axis(b, reshape(b, m, (n * split, taps, count)), 1, k, 1), (n * split, count))
                for m in mask
            ]
            part = convert(b, samples(b, rows, extents, read, first, coordinates, masks), x.dtype)
            factor = reshape(b, slice_axis(b, weights, 3, k, 1), weights.shape[:3])
            factors = (self._grouped(b, part, n), factor)
            total = b.apply(MatMul(transpose_b=True), *factors, *([] if total is None else [total]))
        assert total is not None
        parts = reshape(b, total, (self.groups, n, count, w.shape[0] // self.groups))
        return [reshape(b, transpose(b, parts, (1, 0, 3, 2)), (n, w.shape[0], *positions))]

    def _positions(self, b: Builder, positions: Shape, offset: Value) -> list[Value]:
        """Along each axis, where the first tap of each window lies: [1, |O|]."""
        found = []
        for grid, stride, (low, _) in zip(np.indices(positions), self.strides, self.pads):
            found.append(constant(b, (grid * stride - low).reshape(1, -1).astype(offset.dtype.wide.numpy)))
        return found

    def _grouped(self, b: Builder, part: Value, n: int) -> Value:
        """Rows [N·G·|O|, C/G] as factors [groups, N·|O|, C/groups]."""
        split, channels = self.offset_groups, part.shape[1] * self.offset_groups
        count = part.shape[0] // (n * split)
        items = transpose(b, reshape(b, part, (n, split, count, part.shape[1])), (0, 2, 1, 3))
        grouped = reshape(b, items, (n * count, self.groups, channels // self.groups))
        return transpose(b, grouped, (1, 0, 2))


def deform_conv(
    b: Builder,
    x: Value,
    w: Value,
    offset: Value,
    bias: Value | None = None,
    mask: Value | None = None,
    *,
    groups: int = 1,
    offset_groups: int = 1,
    **geometry: Unpack[Geometry],
) -> Value:
    """Convolution whose taps are moved by offsets; see `DeformConv`. One number stands for all axes."""
    axes = len(x.shape) - 2
    strides, dilations = (per_axis(geometry.get(name), axes) for name in ("strides", "dilations"))  # type: ignore[arg-type]
    pads = symmetric(geometry.get("pads"), axes)
    op = DeformConv(strides, pads, dilations, groups, offset_groups, mask is not None)
    y = b.apply(op, x, w, offset, *([] if mask is None else [mask]))
    if bias is None:
        return y
    return elementwise(b, lambda y, c: y + c, y, reshape(b, bias, (-1, *(1 for _ in range(axes)))))

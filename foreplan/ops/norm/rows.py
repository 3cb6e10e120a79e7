"""Normalisation of rows: layer normalisation (Ba, Kiros and Hinton 2016), its form without centring (Zhang and
Sennrich 2019), group and instance normalisation built on them, and gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from foreplan.base.errors import ShapeError
from foreplan.graph import Builder, Op, TensorType, Value, register
from foreplan.graph.axes import Axes, Factors, named
from foreplan.graph.op import Arrays, Cotangents, Types, Values
from foreplan.graph.types import types_of
from foreplan.ops.blocks import Piece, carve_bytes
from foreplan.ops.expr import rsqrt
from foreplan.ops.map import convert, elementwise
from foreplan.ops.pullback import by_parts
from foreplan.ops.reduce import reduce
from foreplan.ops.shape import broadcast_to, reshape

ROW_BLOCK = 1 << 16  # elements of the rows that are worked on together


@dataclass(frozen=True)
class _RowNorm(Op):
    """Attributes of normalisation over the axes from `axis` on.

    Attributes:
        axis: the first normalised axis; not negative.
        epsilon: added to the variance or mean square.
    """

    axis: int
    epsilon: float

    centred: ClassVar[bool]  # whether the mean is subtracted first

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """The type of x, and statistics a row: the mean if it is taken away, and 1 / deviation."""
        x, *parameters = inputs
        _check(self.axis, x, parameters, 2 if self.centred else 1)
        statistic = TensorType(x.dtype.wide, x.shape[: self.axis])
        return (x, statistic, statistic) if self.centred else (x, statistic)

    def indexing(self, inputs: Types, outputs: Types) -> Axes:
        """Rows, each of them whole."""
        f = Factors()
        x = f.row("a", inputs[0].shape)
        width, row = x[self.axis :], x[: self.axis]
        given, made = [x, *[width] * (len(inputs) - 1)], [x, *[row] * (len(outputs) - 1)]
        return f.axes(given, made, whole=named(width))

    def vjp(self, b: Builder, inputs: Values, outputs: Values, cotangents: Cotangents) -> Cotangents:
        """From x and the statistics of its rows; of the parts, where the statistics are differentiated, too."""
        x, *parameters = inputs
        g = cotangents[0]
        if g is None or any(flow is not None for flow in cotangents[1:]):
            return by_parts(self, b, inputs, cotangents)
        op = (LayerNormGrad if self.centred else RMSNormGrad)(self.axis, scaled=bool(parameters))
        gradients = b.node(op, x, *parameters[:1], *outputs[1:], g)
        return gradients[: len(inputs)]

    def overwrites(self, inputs: Types, outputs: Types) -> tuple[tuple[int, int], ...]:
        """y may take the bytes of x: a row's statistics are done before its first element is written."""
        return ((0, 0),)

    def flops(self, inputs: Types, outputs: Types) -> int:
        """Mean and centring 2, mean square 2, product 1, scale and bias 1 each, an element."""
        each = (5 if self.centred else 3) + len(inputs) - 1
        return each * inputs[0].size

    def workspace(self, inputs: Types, outputs: Types) -> int:
        """A block of rows that is rounded at the end, if x is narrow."""
        return carve_bytes(_block_of(inputs[0], self.axis)) if inputs[0].dtype.is_narrow else 0

    def compute(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray) -> None:
        """A few rows at a time."""
        x, *parameters = inputs
        width = math.prod(x.shape[self.axis :])
        rows, normal = x.reshape(-1, width), outputs[0].reshape(-1, width)
        means, deviations = outputs[1].reshape(-1), outputs[-1].reshape(-1)
        scale, bias = [*(vector.reshape(-1) for vector in parameters), None, None][:2]
        for part in _row_blocks(len(rows), width):
            target, r = normal[part], deviations[part]
            block = workspace.view(r.dtype)[: target.size].reshape(target.shape) if workspace.size else target
            source = rows[part]
            if self.centred:
                mean = means[part]
                np.add.reduce(source, axis=1, out=mean, dtype=mean.dtype)
                mean /= width
                np.subtract(source, mean[:, None], out=block)
                source = block
            elif block is not target:
                np.copyto(block, source)
                source = block
            np.vecdot(source, source, out=r)
            r /= width
            r += r.dtype.type(self.epsilon)
            np.sqrt(r, out=r)
            np.reciprocal(r, out=r)
            np.multiply(source, r[:, None], out=block)
            if scale is not None:
                block *= scale
            if bias is not None:
                block += bias
            if block is not target:
                np.copyto(target, block, casting="unsafe")

    def decompose(self, b: Builder, inputs: Values) -> Values:
        """Reductions and maps."""
        x, *parameters = inputs
        axes = range(self.axis, len(x.shape))
        statistics, centred = [], convert(b, x, x.dtype.wide)
        if self.centred:
            mean = reduce(b, "mean", x, axes, keepdims=True, wide=True)
            statistics.append(reshape(b, mean, x.shape[: self.axis]))
            centred = elementwise(b, lambda x, m: x - m, x, mean)
        square = reduce(b, "mean", elementwise(b, lambda x: x * x, centred), axes, keepdims=True)
        r = elementwise(b, lambda v: rsqrt(v + self.epsilon), square)
        statistics.append(reshape(b, r, x.shape[: self.axis]))
        y = elementwise(b, lambda x, r: x * r, centred, r)
        for fn, vector in zip((lambda y, s: y * s, lambda y, c: y + c), parameters):
            y = elementwise(b, fn, y, vector)
        return [convert(b, y, x.dtype), *statistics]


@register
@dataclass(frozen=True)
class LayerNorm(_RowNorm):
    """y = (x − mean) · r · scale + bias, r = 1 / sqrt(variance + epsilon), over the axes from `axis` on.

    Inputs: x, and optionally scale, and optionally bias, both of x's shape from `axis` on and of its type, or wide
    beside narrow x. Outputs: y as x; mean and r, of x's shape before `axis`, at least float32.
    """

    name: ClassVar[str] = "layer_norm"
    narrow: ClassVar[int] = 1
    centred: ClassVar[bool] = True


@register
@dataclass(frozen=True)
class RMSNorm(_RowNorm):
    """y = x · r · scale, r = 1 / sqrt(mean(x²) + epsilon), over the axes from `axis` on.

    Inputs: x, and optionally scale of x's shape from `axis` on and of its type, or wide beside narrow x. Outputs: y as
    x; r of x's shape before `axis`, at least float32.
    """

    name: ClassVar[str] = "rms_norm"
    narrow: ClassVar[int] = 1
    centred: ClassVar[bool] = False


@dataclass(frozen=True)
class _RowNormGrad(Op):
    """Gradients from x, the scale if there was one, the rows' statistics and g.

    With x̂ = (x − mean) · r and h = g · scale: dbias = Σ g and dscale = Σ g · x̂ over rows;
    dx = r · (h − mean(h) − x̂ · mean(h · x̂)) with means over the row, the first of them only if x was centred. A
    further input behind g, of x's type, is added to dx before dx is rounded: the gradient of a residual path.

    Attributes:
        axis: the first normalised axis.
        scaled: whether there is a scale; without one dx is the only output.
    """

    axis: int
    scaled: bool = True

    centred: ClassVar[bool]

    @property
    def accumulates(self) -> int:
        """Behind x, the scale, the statistics and g."""
        return 3 + self.scaled + self.centred

    @property
    def g(self) -> int:
        """The index of g; r stands before it, and the mean before r."""
        return self.accumulates - 1

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """The type of x, and gradients of the parameters."""
        x, *rest = inputs
        statistic = TensorType(x.dtype.wide, x.shape[: self.axis])
        expected = [statistic] * (1 + self.centred) + [x] * (2 if len(inputs) > self.accumulates else 1)
        if len(rest) != self.scaled + len(expected) or rest[self.scaled :] != expected:
            raise ShapeError(
                f"needs x, {'its scale, ' * self.scaled}the statistics of its rows, g and optionally a tensor to "
                f"add, and got {', '.join(map(str, inputs))}"
            )
        _check(self.axis, x, rest[: self.scaled], 1)
        return (x, *rest[: self.scaled] * (1 + self.centred))

    def indexing(self, inputs: Types, outputs: Types) -> Axes:
        """Rows, each of them whole; gradients of vectors are sums over rows."""
        f = Factors()
        x = f.row("a", inputs[0].shape)
        width, row = x[self.axis :], x[: self.axis]
        given = [x, *[width] * self.scaled, *[row] * (1 + self.centred), *[x] * (len(inputs) - self.g)]
        sums = dict.fromkeys(named(row), "sum")
        return f.axes(given, [x, *[width] * (len(outputs) - 1)], named(width), sums)

    def vjp(self, b: Builder, inputs: Values, outputs: Values, cotangents: Cotangents) -> Cotangents:
        """Of the parts."""
        return by_parts(self, b, inputs, cotangents)

    def overwrites(self, inputs: Types, outputs: Types) -> tuple[tuple[int, int], ...]:
        """dx may take the bytes of the summand, of g or of x: rows are read whole before they are written."""
        return (*((0, i) for i in reversed(range(self.g, len(inputs)))), (0, 0))

    def flops(self, inputs: Types, outputs: Types) -> int:
        """x̂ 2, sums over rows 3, product with the scale 1, dx 8, and 1 to add it, an element; less without centring."""
        each = (8 if self.centred else 5) + self.scaled * (4 + self.centred) + len(inputs[self.accumulates :])
        return each * inputs[0].size

    def workspace(self, inputs: Types, outputs: Types) -> int:
        """Two blocks of rows, and one more row; of narrow gradients of parameters, their sums."""
        x = inputs[0]
        row = math.prod(x.shape[self.axis :]) * x.dtype.wide.itemsize
        return 2 * self._block_bytes(x) + row * (1 + sum(type.dtype.is_narrow for type in outputs[1:]))

    def _block_bytes(self, x: TensorType) -> int:
        return carve_bytes(_block_of(x, self.axis))

    def compute(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray) -> None:
        """A few rows at a time."""
        (x, g), deviations = (inputs[0], inputs[self.g]), inputs[self.g - 1].reshape(-1)
        scale = inputs[1].reshape(-1) if self.scaled else None
        width, wide = math.prod(x.shape[self.axis :]), deviations.dtype
        rows, grads, result, *added = (
            array.reshape(-1, width) for array in (x, g, outputs[0], *inputs[self.accumulates :])
        )
        size = self._block_bytes(*types_of(x))
        first, second = workspace[:size].view(wide), workspace[size : 2 * size].view(wide)
        row, *sums = workspace[2 * size :].view(wide).reshape(-1, width)
        parameters = sums or [array.reshape(-1) for array in outputs[1:]]
        for array in parameters:
            array[...] = 0
        for part in _row_blocks(len(rows), width):
            r, block = deviations[part, None], grads[part]
            normal = first[: block.size].reshape(block.shape)
            product = second[: block.size].reshape(block.shape)
            if self.centred:
                np.subtract(rows[part], inputs[self.g - 2].reshape(-1)[part, None], out=normal)
                normal *= r
            else:
                np.multiply(rows[part], r, out=normal)
            if scale is None:
                product[...] = block
                means = np.vecdot(product, normal) / width
            else:
                np.multiply(block, normal, out=product)
                parameters[0] += np.add.reduce(product, axis=0, out=row)
                if self.centred:
                    parameters[1] += np.add.reduce(block, axis=0, out=row, dtype=wide)
                means = np.matmul(product, scale) / width
                np.multiply(block, scale, out=product, dtype=wide)
            normal *= means[:, None]
            if self.centred:
                product -= (np.sum(product, axis=1) / width)[:, None]
            product -= normal
            if added:
                product *= r
                np.add(product, added[0][part], out=result[part], dtype=wide, casting="same_kind")
            else:
                np.multiply(product, r, out=result[part], casting="same_kind")
        for array, total in zip(outputs[1:], sums):
            np.copyto(array.reshape(-1), total, casting="unsafe")

    def decompose(self, b: Builder, inputs: Values) -> Values:
        """Reductions and maps."""
        (x, g), added = (inputs[0], inputs[self.g]), inputs[self.accumulates :]
        kept = (*x.shape[: self.axis], *(1 for _ in x.shape[self.axis :]))
        axes, before = range(self.axis, len(x.shape)), range(self.axis)
        r = reshape(b, inputs[self.g - 1], kept)
        if self.centred:
            normal = elementwise(b, lambda x, m, r: (x - m) * r, x, reshape(b, inputs[self.g - 2], kept), r)
        else:
            normal = elementwise(b, lambda x, r: x * r, x, r)
        parameters = []
        h = g
        if self.scaled:
            sums = [reduce(b, "sum", elementwise(b, lambda g, n: g * n, g, normal), list(before))]
            if self.centred:
                sums.append(reduce(b, "sum", g, list(before), wide=True))
            parameters = [convert(b, total, inputs[1].dtype) for total in sums]
            h = elementwise(b, lambda g, s: g * s, convert(b, g, x.dtype.wide), inputs[1])
        means = reduce(b, "mean", elementwise(b, lambda h, n: h * n, h, normal), axes, keepdims=True)
        if self.centred:
            mean = reduce(b, "mean", h, axes, keepdims=True, wide=True)
            of = (h, mean, normal, means, r, *added)
            dx = elementwise(b, lambda h, a, n, m, r, *c: sum(c, (h - a - n * m) * r), *of, dtype=x.dtype)
        else:
            of = (h, normal, means, r, *added)
            dx = elementwise(b, lambda h, n, m, r, *c: sum(c, (h - n * m) * r), *of, dtype=x.dtype)
        return [dx, *parameters]


@register
@dataclass(frozen=True)
class LayerNormGrad(_RowNormGrad):
    """Inputs: x, scale if `scaled`, mean, r, g (and what is added). Outputs: dx and, if `scaled`, dscale and dbias."""

    name: ClassVar[str] = "layer_norm_grad"
    centred: ClassVar[bool] = True


@register
@dataclass(frozen=True)
class RMSNormGrad(_RowNormGrad):
    """Inputs: x, scale if `scaled`, r, g (and what is added). Outputs: dx and, if `scaled`, dscale."""

    name: ClassVar[str] = "rms_norm_grad"
    centred: ClassVar[bool] = False


def _check(axis: int, x: TensorType, parameters: Sequence[TensorType], most: int) -> None:
    """Raise unless x has the axis and the parameters have its shape from there on."""
    if not 0 <= axis < x.rank or not x.dtype.is_float or not x.size:
        raise ShapeError(f"needs a floating-point tensor with an axis {axis} and at least one element, and got {x}")
    fits = [TensorType(dtype, x.shape[axis:]) for dtype in (x.dtype, x.dtype.wide)]
    wrong = [type for type in parameters if type not in fits]
    if wrong or len(parameters) > most:
        raise ShapeError(
            f"takes at most {most} parameters {x.with_shape(x.shape[axis:])} for {x} from axis {axis} on, and got "
            f"{', '.join(map(str, parameters))}"
        )


def _block_of(x: TensorType, axis: int) -> Piece:
    """Scratch for the rows that are worked on together, wide."""
    width = math.prod(x.shape[axis:])
    return (min(_block_rows(width), x.size // max(1, width)) * width,), x.dtype.wide.numpy


def _block_rows(width: int) -> int:
    return max(1, ROW_BLOCK // max(1, width))


def _row_blocks(rows: int, width: int) -> Iterator[slice]:
    count = _block_rows(width)
    for start in range(0, rows, count):
        yield slice(start, min(start + count, rows))


def layer_norm(
    b: Builder,
    x: Value,
    scale: Value | None = None,
    bias: Value | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
) -> Value:
    """Layer normalisation over the axes from `axis` on; scale and bias broadcast to x's shape there."""
    axis = axis + len(x.shape) if axis < 0 else axis
    op = LayerNorm(axis, epsilon)
    if scale is None:
        y = b.node(op, x)[0]
        return y if bias is None else elementwise(b, lambda y, c: y + c, y, bias)
    parameters = [broadcast_to(b, vector, x.shape[axis:]) for vector in (scale, bias) if vector is not None]
    return b.node(op, x, *parameters)[0]


def rms_norm(b: Builder, x: Value, scale: Value | None = None, *, axis: int = -1, epsilon: float = 1e-5) -> Value:
    """Root-mean-square normalisation over the axes from `axis` on; the scale broadcasts to x's shape there."""
    axis = axis + len(x.shape) if axis < 0 else axis
    parameters = [] if scale is None else [broadcast_to(b, scale, x.shape[axis:])]
    return b.node(RMSNorm(axis, epsilon), x, *parameters)[0]


def group_norm(
    b: Builder, x: Value, groups: int, scale: Value | None = None, bias: Value | None = None, *, epsilon: float = 1e-5
) -> Value:
    """Group normalisation (Wu and He 2018) of x [N, C, *S]: each group of C / groups channels of an item on its own;
    scale and bias have an entry a channel. With a group a channel it is instance normalisation (Ulyanov, Vedaldi and
    Lempitsky 2016).

    Raises:
        ShapeError: the channels do not divide into `groups` equal groups.
    """
    if len(x.shape) < 2 or groups < 1 or x.shape[1] % groups:
        raise ShapeError(f"the channels of {x!r} do not fall into {groups} equal groups")
    y = layer_norm(b, reshape(b, x, (x.shape[0], groups, -1)), axis=2, epsilon=epsilon)
    y, shape = reshape(b, y, x.shape), (-1, *(1 for _ in x.shape[2:]))
    if scale is not None and bias is not None:
        vectors = (reshape(b, scale, shape), reshape(b, bias, shape))
        return elementwise(b, lambda y, s, c: y * s + c, y, *vectors)
    if scale is not None:
        return elementwise(b, lambda y, s: y * s, y, reshape(b, scale, shape))
    return y if bias is None else elementwise(b, lambda y, c: y + c, y, reshape(b, bias, shape))

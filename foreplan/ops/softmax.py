"""Softmax and its logarithm along one axis, with their gradients; rows are done in blocks that stay in cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from foreplan.base.errors import ShapeError
from foreplan.graph import Builder, DType, Op, TensorType, Value, as_dtype, register
from foreplan.graph.axes import Axes, Factors
from foreplan.graph.op import Arrays, Cotangents, Types, Values, only
from foreplan.ops.blocks import Piece, block_extents, blocks, can_fold, carve, carve_bytes, fold, folded_shape
from foreplan.ops.expr import exp, log
from foreplan.ops.map import convert, elementwise
from foreplan.ops.pullback import by_parts
from foreplan.ops.reduce import normalize_axes, reduce


@dataclass(frozen=True)
class RowOp(Op):
    """An op that maps each row along `axis` to a row, all tensors of one type.

    Attributes:
        axis: not negative.
    """

    count: ClassVar[int] = 1  # of inputs
    axis: int

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """The inputs' type, which must be one floating-point type that has the axis."""
        self.check_count(inputs, self.count)
        first = inputs[0]
        if any(type != first for type in inputs) or not first.dtype.is_float:
            raise ShapeError(f"needs inputs of one floating-point type, and got {' and '.join(map(str, inputs))}")
        if not 0 <= self.axis < first.rank:
            raise ShapeError(f"{first} has no axis {self.axis}")
        return (first,)

    def indexing(self, inputs: Types, outputs: Types) -> Axes:
        """All of the axis."""
        f = Factors()
        x = f.row("a", inputs[0].shape)
        return f.axes([x] * len(inputs), [x], whole=[f"a{self.axis}"])

    def overwrites(self, inputs: Types, outputs: Types) -> tuple[tuple[int, int], ...]:
        """The output may take any input's bytes: a block is read whole before it is written."""
        return tuple((0, i) for i in range(len(inputs)))

    def accepts_strides(self, index: int, input: TensorType, strides: tuple[int, ...]) -> bool:
        """Where the axes before and behind the row merge into one each."""
        return can_fold(input, strides, self.axis)

    def flops(self, inputs: Types, outputs: Types) -> int:
        """Five scalar operations an element."""
        return 5 * outputs[0].size

    def workspace(self, inputs: Types, outputs: Types) -> int:
        """A block of elements and a number a row of it; if they are narrow, the block's result as well."""
        return carve_bytes(*_pieces(folded_shape(inputs[0].shape, self.axis), inputs[0].dtype))

    def compute(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray) -> None:
        """Block by block."""
        *folded, y = (fold(array, self.axis) for array in (*inputs, *outputs))
        whole, numbers, results = carve(workspace, *_pieces(y.shape, as_dtype(y.dtype)))
        for rows, columns in blocks(y.shape) if y.size else ():
            target = y[rows, :, columns]
            out = results[: target.size].reshape(target.shape) if results.size else target
            scratch = whole[: out.size].reshape(out.shape)
            number = numbers[: out.shape[0] * out.shape[2]].reshape(out.shape[0], 1, out.shape[2])
            self.block([x[rows, :, columns] for x in folded], out, scratch, number)
            if out is not target:
                np.copyto(target, out, casting="unsafe")

    def block(self, inputs: Arrays, out: np.ndarray, scratch: np.ndarray, number: np.ndarray) -> None:
        """The rows of one block: arrays [outer, n, inner], `number` [outer, 1, inner]; all but inputs are wide."""
        raise NotImplementedError


def _pieces(folded: tuple[int, ...], dtype: DType) -> tuple[Piece, Piece, Piece]:
    outer, n, inner = folded
    rows, columns = block_extents((outer, n, inner))
    size, wide = rows * n * columns, dtype.wide.numpy
    return ((size,), wide), ((rows * columns,), wide), ((size * dtype.is_narrow,), wide)


@register
@dataclass(frozen=True)
class Softmax(RowOp):
    """y = exp(x) / Σ exp(x) along the axis, computed after subtracting the row's maximum."""

    name: ClassVar[str] = "softmax"
    narrow: ClassVar[int] = 1
    wide_at_end: ClassVar[bool] = True

    def vjp(self, b: Builder, inputs: Values, outputs: Values, cotangents: Cotangents) -> Cotangents:
        """From the output alone."""
        return [b.apply(SoftmaxGrad(self.axis), outputs[0], only(cotangents))]

    def block(self, inputs: Arrays, out: np.ndarray, scratch: np.ndarray, number: np.ndarray) -> None:
        """exp(x - max), divided by its sum."""
        np.maximum.reduce(inputs[0], axis=1, keepdims=True, out=number)
        np.subtract(inputs[0], number, out=out)
        np.exp(out, out=out)
        np.add.reduce(out, axis=1, keepdims=True, out=number)
        np.divide(out, number, out=out)

    def decompose(self, b: Builder, inputs: Values) -> Values | None:
        """Two reductions and two maps; nothing of nothing."""
        (x,) = inputs
        if not x.type.size:
            return [x]
        high = reduce(b, "max", x, self.axis, keepdims=True, wide=True)
        e = elementwise(b, lambda x, m: exp(x - m), x, high)
        total = reduce(b, "sum", e, self.axis, keepdims=True)
        return [elementwise(b, lambda e, s: e / s, e, total, dtype=x.dtype)]


@register
@dataclass(frozen=True)
class SoftmaxGrad(RowOp):
    """dx = y · (g - Σ y·g) from softmax's output y and its cotangent g."""

    name: ClassVar[str] = "softmax_grad"
    count: ClassVar[int] = 2

    def vjp(self, b: Builder, inputs: Values, outputs: Values, cotangents: Cotangents) -> Cotangents:
        """Of the parts."""
        return by_parts(self, b, inputs, cotangents)

    def block(self, inputs: Arrays, out: np.ndarray, scratch: np.ndarray, number: np.ndarray) -> None:
        """Products in scratch, so that the output may lie on either input."""
        y, g = inputs
        np.multiply(y, g, out=scratch, dtype=scratch.dtype)
        np.add.reduce(scratch, axis=1, keepdims=True, out=number)
        np.subtract(g, number, out=scratch)
        np.multiply(scratch, y, out=out)

    def decompose(self, b: Builder, inputs: Values) -> Values | None:
        """A product, its sum, and a map."""
        y, g = inputs
        product = elementwise(b, lambda y, g: y * g, convert(b, y, y.dtype.wide), g)
        total = reduce(b, "sum", product, self.axis, keepdims=True)
        return [elementwise(b, lambda y, g, s: y * (g - s), y, g, total, dtype=y.dtype)]


@register
@dataclass(frozen=True)
class LogSoftmax(RowOp):
    """y = x - log Σ exp(x) along the axis, computed after subtracting the row's maximum."""

    name: ClassVar[str] = "log_softmax"
    narrow: ClassVar[int] = 1
    wide_at_end: ClassVar[bool] = True

    def vjp(self, b: Builder, inputs: Values, outputs: Values, cotangents: Cotangents) -> Cotangents:
        """From the output alone."""
        return [b.apply(LogSoftmaxGrad(self.axis), outputs[0], only(cotangents))]

    def block(self, inputs: Arrays, out: np.ndarray, scratch: np.ndarray, number: np.ndarray) -> None:
        """x - max, less the logarithm of the sum of its exponentials."""
        np.maximum.reduce(inputs[0], axis=1, keepdims=True, out=number)
        np.subtract(inputs[0], number, out=out)
        np.exp(out, out=scratch)
        np.add.reduce(scratch, axis=1, keepdims=True, out=number)
        np.log(number, out=number)
        np.subtract(out, number, out=out)

    def decompose(self, b: Builder, inputs: Values) -> Values | None:
        """Two reductions and maps; nothing of nothing."""
        (x,) = inputs
        if not x.type.size:
            return [x]
        high = reduce(b, "max", x, self.axis, keepdims=True, wide=True)
        total = reduce(b, "sum", elementwise(b, lambda x, m: exp(x - m), x, high), self.axis, keepdims=True)
        return [elementwise(b, lambda x, m, s: (x - m) - log(s), x, high, total, dtype=x.dtype)]


@register
@dataclass(frozen=True)
class LogSoftmaxGrad(RowOp):
    """dx = g - exp(y) · Σ g from log-softmax's output y and its cotangent g."""

    name: ClassVar[str] = "log_softmax_grad"
    count: ClassVar[int] = 2

    def vjp(self, b: Builder, inputs: Values, outputs: Values, cotangents: Cotangents) -> Cotangents:
        """Of the parts."""
        return by_parts(self, b, inputs, cotangents)

    def block(self, inputs: Arrays, out: np.ndarray, scratch: np.ndarray, number: np.ndarray) -> None:
        """exp(y) in scratch, so that the output may lie on either input."""
        y, g = inputs
        np.add.reduce(g, axis=1, keepdims=True, out=number, dtype=number.dtype)
        np.exp(y, out=scratch, dtype=scratch.dtype)
        np.multiply(scratch, number, out=scratch)
        np.subtract(g, scratch, out=out)

    def decompose(self, b: Builder, inputs: Values) -> Values | None:
        """A sum and a map."""
        y, g = inputs
        total = reduce(b, "sum", g, self.axis, keepdims=True, wide=True)
        y_wide = convert(b, y, y.dtype.wide)
        return [elementwise(b, lambda y, g, s: g - exp(y) * s, y_wide, g, total, dtype=y.dtype)]


def softmax(b: Builder, x: Value, axis: int = -1) -> Value:
    """Softmax along an axis (negative ones count from the end)."""
    return b.apply(Softmax(*normalize_axes(axis, len(x.shape))), x)


def log_softmax(b: Builder, x: Value, axis: int = -1) -> Value:
    """Logarithm of the softmax along an axis (negative ones count from the end)."""
    return b.apply(LogSoftmax(*normalize_axes(axis, len(x.shape))), x)

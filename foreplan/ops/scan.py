"""Cumulative sums and products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from foreplan.base.errors import ShapeError
from foreplan.graph import Builder, Op, TensorType, Value, register
from foreplan.graph.axes import Axes, Factors
from foreplan.graph.op import Arrays, Cotangents, Types, Values, only
from foreplan.ops.join import pad
from foreplan.ops.map import elementwise
from foreplan.ops.reduce import normalize_axes
from foreplan.ops.shape import slice_axis


@register
@dataclass(frozen=True)
class CumSum(Op):
    """y[i] = x[0] + … + x[i] along one axis, as ONNX CumSum.

    Attributes:
        axis: not negative.
        exclusive: x[i] itself is left out.
        reverse: from the last element to the first.
    """

    name: ClassVar[str] = "cumsum"
    any_strides: ClassVar[bool] = True
    axis: int
    exclusive: bool = False
    reverse: bool = False

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """The input's type."""
        (x,) = inputs
        if not 0 <= self.axis < x.rank or x.dtype.category == "bool":
            raise ShapeError(f"needs numbers with an axis {self.axis}, and got {x}; convert booleans to integers first")
        return (x,)

    def indexing(self, inputs: Types, outputs: Types) -> Axes:
        """All of the axis."""
        f = Factors()
        x = f.row("a", inputs[0].shape)
        return f.axes([x], [x], whole=[f"a{self.axis}"])

    def vjp(self, b: Builder, inputs: Values, outputs: Values, cotangents: Cotangents) -> Cotangents:
        """The sum from the other end."""
        return [b.apply(CumSum(self.axis, self.exclusive, not self.reverse), only(cotangents))]

    def flops(self, inputs: Types, outputs: Types) -> int:
        """One addition an element."""
        return inputs[0].size

    def compute(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray) -> None:
        """One accumulation over windows that start at the right end."""
        x, y = (array.swapaxes(0, self.axis) for array in (inputs[0], outputs[0]))
        if self.reverse:
            x, y = x[::-1], y[::-1]
        if self.exclusive:
            y[:1] = 0
            x, y = x[:-1], y[1:]
        np.add.accumulate(x, axis=0, dtype=y.dtype, out=y)


def cumsum(b: Builder, x: Value, axis: int = 0, exclusive: bool = False, reverse: bool = False) -> Value:
    """Cumulative sum along an axis (negative ones count from the end)."""
    (found,) = normalize_axes(axis, len(x.shape))
    return b.apply(CumSum(found, exclusive, reverse), x)


def cumprod(b: Builder, x: Value, axis: int = 0, exclusive: bool = False, reverse: bool = False) -> Value:
    """Cumulative product along an axis of n elements (negative ones count from the end), as ONNX's CumProd.

    It takes ⌈log₂ n⌉ rounds (Hillis and Steele 1986). After round i each element is the product of 2ⁱ⁺¹ neighbours. So
    nothing is divided, and the gradient is right where there are zeros. Backward reads the results of all rounds.
    """
    (found,) = normalize_axes(axis, len(x.shape))
    extent = x.shape[found]

    def shifted(x: Value, count: int) -> Value:
        """`x` moved by `count` elements along the axis, ones behind it."""
        pads = [(0, 0)] * len(x.shape)
        pads[found] = (0, count) if reverse else (count, 0)
        return pad(b, slice_axis(b, x, found, count if reverse else 0, extent - count), pads, 1.0)

    if exclusive and extent:
        x = shifted(x, 1)
    reach = 1
    while reach < extent:
        x = elementwise(b, lambda x, before: x * before, x, shifted(x, reach))
        reach *= 2
    return x

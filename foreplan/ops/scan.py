"""Cumulative sums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from foreplan.errors import ShapeError
from foreplan.graph import Builder, Op, TensorType, Value, register
from foreplan.graph.op import Arrays, Cotangents, Types, Values, only
from foreplan.ops.reduce import normalize_axes


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

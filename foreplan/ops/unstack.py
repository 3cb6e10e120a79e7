"""A tensor taken apart along its first axis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from foreplan.base.errors import ShapeError
from foreplan.graph import Builder, DType, Fill, Kind, TensorType, Value, register
from foreplan.graph.axes import Axes, Factors, named
from foreplan.graph.op import Arrays, Cotangents, Types, Values
from foreplan.graph.types import Shape
from foreplan.ops.join import CopyOp, concat
from foreplan.ops.shape import broadcast_to, reshape

MOST_STEPS = 1 << 16


@register
@dataclass(frozen=True)
class Unstack(CopyOp):
    """y_t = x[t], one output an element of the first axis; the gradient puts them together in one go."""

    name: ClassVar[str] = "unstack"

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """As many outputs as the first axis has elements."""
        (x,) = inputs
        if not x.shape:
            raise ShapeError("a scalar has no axis to unstack; give a tensor with at least one axis")
        if x.shape[0] > MOST_STEPS:
            raise ShapeError(f"{x} has {x.shape[0]} steps, one output each; foreplan takes {MOST_STEPS} at most")
        return (x.with_shape(x.shape[1:]),) * x.shape[0]

    def indexing(self, inputs: Types, outputs: Types) -> Axes | None:
        """All of the first axis."""
        if not outputs:
            return None
        f = Factors()
        x = f.row("a", inputs[0].shape)
        return f.axes([x], [x[1:]] * len(outputs), named(x[:1]))

    def vjp(self, b: Builder, inputs: Values, outputs: Values, cotangents: Cotangents) -> Cotangents:
        """Cotangents side by side, zeros where there is none."""
        (x,) = inputs
        if not b.wants(x):
            return [None]
        shape = (1, *x.shape[1:])
        if None in cotangents:
            none = zeros(b, x.dtype, shape)
        return [concat(b, [none if flow is None else reshape(b, flow, shape) for flow in cotangents], 0)]

    def compute(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray) -> None:
        """Copy."""
        for y, part in zip(outputs, inputs[0]):
            np.copyto(y, part)


def unstack(b: Builder, x: Value) -> tuple[Value, ...]:
    """x[0], x[1], …, as one node."""
    return b.node(Unstack(), x)


def zeros(b: Builder, dtype: DType, shape: Shape) -> Value:
    """Zeros of a shape, which take the bytes of one."""
    return broadcast_to(b, b.store("zero", TensorType(dtype, ()), Kind.CONSTANT, Fill(0.0)), shape)

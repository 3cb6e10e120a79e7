"""A convolution with an epilogue: a map of each element of its result before it is written."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

import numpy as np

from foreplan.base.errors import ShapeError
from foreplan.graph import TensorType, as_dtype, register
from foreplan.graph.axes import Axes, Factors, Part, broadcast_dims, named
from foreplan.graph.op import Arrays, Types
from foreplan.ops.conv.ops import Conv, ConvOp, added_part
from foreplan.ops.expr import FUNCTIONS, Arg, Call, Expr, parse_expr, used_args
from foreplan.ops.map import Map
from foreplan.ops.window import pads_left

ADD, SUB, MUL, RELU = "add", "sub", "mul", "relu"


@dataclass(frozen=True)
class Step:
    """One step of an epilogue: a function of every element, and perhaps of another input.

    Attributes:
        function: add, sub, mul or relu.
        argument: number of the other input in the expression, from 1 on; 0 where there is none.
    """

    function: str
    argument: int = 0


@lru_cache(maxsize=4096)
def steps_of(expr: Expr) -> tuple[Step, ...] | None:
    """An expression as a chain of steps from a0 on, with each other argument once; None if it is none."""
    if expr == Arg(0):
        return ()
    if not isinstance(expr, Call):
        return None
    inner, rest = expr.args[0], expr.args[1:]
    if expr.function in (ADD, MUL) and isinstance(inner, Arg) and inner.index:
        inner, rest = expr.args[1], (inner,)
    before = steps_of(inner)
    if before is None or any(step.function == RELU for step in before):
        return None
    if expr.function == RELU:
        return (*before, Step(RELU))
    (other,) = rest if len(rest) == 1 else (None,)
    if expr.function not in (ADD, SUB, MUL) or not isinstance(other, Arg) or not other.index:
        return None
    step = Step(expr.function, other.index)
    return None if step.argument in (earlier.argument for earlier in before) else (*before, step)


@register
@dataclass(frozen=True)
class ConvMap(ConvOp):
    """y = f(x * w (+ bias), a1, a2, …): a convolution, and a map of its result and of further inputs.

    Inputs: x [N, C, *S], w [K, C/groups, *R], bias [K] if there is one, then the map's further inputs, each of one
    number a channel or as the output. Vectors may be wide beside narrow images; the map is computed in float32 and
    rounded once. Output: as the convolution's. Made for targets that have such a kernel, from a graph that needs no
    derivative any more.

    Attributes:
        expr: of a0, the result, and the further inputs.
        biased: whether the convolution has a bias.
    """

    name: ClassVar[str] = "conv_map"
    expr: str = "a0"
    biased: bool = False

    @property
    def conv(self) -> Conv:
        """The convolution alone."""
        return Conv(*self.geometry)

    @property
    def map(self) -> Map:
        """The map of its result."""
        return Map((self.expr,))

    @property
    def own(self) -> int:
        """The number of the convolution's own inputs."""
        return 2 + self.biased

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """The convolution's output, which the map leaves as it is."""
        further, reads = inputs[self.own :], self.own + max(used_args(parse_expr(self.expr)), default=0)
        if len(inputs) != reads:
            raise ShapeError(f"the convolution and {self.expr} read {reads} inputs, and got {len(inputs)}")
        (y,) = self.conv.infer(inputs[: self.own])
        if any(not self._fits(type, y) for type in further) or self._mapped(y, further) != y:
            raise ShapeError(
                f"{self.expr} of {y} and {', '.join(map(str, further))} must have the type of the convolution's result"
            )
        return (y,)

    def indexing(self, inputs: Types, outputs: Types) -> Axes:
        """As a convolution's, but all of what it sums."""
        f, (x, w, *added) = Factors(), inputs
        images, weights, y = self.walked(f, x.shape, w.shape)
        bias = [y[1:2]] * self.biased
        more = [*bias, *(broadcast_dims(y, t.shape) for t in added[len(bias) :])]
        return f.axes([images, weights, *more], [y], (named(images[2:]) - named(y[2:])) | {"c"})

    def part(self, part: Part) -> ConvMap | None:
        """As a convolution's."""
        if 0 in part.inputs[0]:
            return None
        return replace(self, pads=pads_left(self.pads, part), groups=self.groups_left(part))

    def _fits(self, further: TensorType, y: TensorType) -> bool:
        """Whether an input is as the result, or one number a channel."""
        vector = (y.shape[1], *(1 for _ in y.shape[2:]))
        alike = further.dtype in (y.dtype, y.dtype.wide)
        return further == y or (alike and further.shape in (vector, (1, *vector)))

    def _mapped(self, y: TensorType, further: Types) -> TensorType:
        """The type of the map's result, which is computed in the wide type."""
        (wide,) = self.map.infer([type.with_dtype(type.dtype.wide) for type in (y, *further)])
        return wide.with_dtype(y.dtype) if wide.dtype == y.dtype.wide else wide

    def accepts_strides(self, index: int, input: TensorType, strides: tuple[int, ...]) -> bool:
        """As the convolution; the map reads anything."""
        return index > 1 or super().accepts_strides(index, input, strides)

    def flops(self, inputs: Types, outputs: Types) -> int:
        """The operations of both."""
        mapped = self.map.flops([*outputs, *inputs[self.own :]], outputs)
        return self.conv.flops(inputs[: self.own], outputs) + mapped

    def workspace(self, inputs: Types, outputs: Types) -> int:
        """Of one, then of the other; of narrow images, of the convolution alone."""
        if inputs[0].dtype.is_narrow:
            return self.conv.workspace(inputs[:2], outputs)
        map = self.map.workspace([*outputs, *inputs[self.own :]], outputs)
        return max(self.conv.workspace(inputs[: self.own], outputs), map)

    def compute(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray) -> None:
        """The convolution, and the map in place: at the end, or of narrow images on each block of sums."""
        if as_dtype(inputs[0].dtype).is_narrow:
            self._compute_narrow(inputs, outputs, workspace)
            return
        self.conv.compute(inputs[: self.own], outputs, workspace)
        self.map.compute([*outputs, *inputs[self.own :]], outputs, workspace)

    def _compute_narrow(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray) -> None:
        x, w = inputs[:2]
        steps, further = steps_of(parse_expr(self.expr)), inputs[self.own :]
        assert steps is not None
        arrays = [a if a.shape == outputs[0].shape else a.reshape(-1) for a in further]
        for product, items, positions in self.conv.products(x, w, outputs[0], workspace):
            if self.biased:
                product += added_part(inputs[2], items, positions)
            for step in steps:
                if step.function == RELU:
                    np.maximum(product, 0, out=product)
                else:
                    part = added_part(arrays[step.argument - 1], items, positions)
                    FUNCTIONS[step.function].compute()(product, part, out=product)

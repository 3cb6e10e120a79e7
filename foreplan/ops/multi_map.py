"""One map of many small tensors, each by itself: multi-tensor apply, as NVIDIA's apex calls it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import numpy as np

from foreplan.base.errors import ShapeError
from foreplan.graph import Builder, Op, TensorType, register
from foreplan.graph.axes import Axes, Factors
from foreplan.graph.op import Arrays, Types, Values
from foreplan.ops.expr import used_args
from foreplan.ops.map import Map

Operand = TypeVar("Operand")


@register
@dataclass(frozen=True)
class MultiMap(Op):
    """y_t,i = f_i(x_t,0, x_t,1, …, s_0, s_1, …) for every t, such as an optimizer's update of many parameters.

    Inputs: `own` tensors of one shape for each t, one behind the other; then scalars, the same for all. Outputs: those
    of each t, one an expression. Made for targets that have such a kernel, from a graph that needs no derivative any
    more.

    Attributes:
        exprs: of a0, …: first the inputs of t, then the scalars.
        own: number of inputs of each t.
        count: number of t.
    """

    name: ClassVar[str] = "multi_map"
    any_strides: ClassVar[bool] = True
    exprs: tuple[str, ...]
    own: int
    count: int

    @property
    def map(self) -> Map:
        """The map of each t."""
        return Map(self.exprs)

    @property
    def scalars(self) -> int:
        """The number of inputs that all share."""
        return max((1 + i for i in used_args(*self.map.parsed)), default=0) - self.own

    def each(self, inputs: Sequence[Operand]) -> list[list[Operand]]:
        """The map's inputs for one t after the other."""
        shared = inputs[self.own * self.count :]
        return [[*inputs[t * self.own : (t + 1) * self.own], *shared] for t in range(self.count)]

    def results(self, outputs: Sequence[Operand], t: int) -> Sequence[Operand]:
        """The map's results for t."""
        return outputs[t * len(self.exprs) : (t + 1) * len(self.exprs)]

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """The map's outputs of each."""
        shared = inputs[self.own * self.count :]
        if self.own < 1 or self.count < 1 or len(shared) != max(0, self.scalars) or any(x.shape for x in shared):
            raise ShapeError(
                f"needs {self.own} inputs for each of {self.count} maps, then {max(0, self.scalars)} scalars, and got "
                f"{', '.join(map(str, inputs))}"
            )
        found: list[TensorType] = []
        for types in self.each(inputs):
            if any(type.shape != types[0].shape for type in types[: self.own]):
                raise ShapeError(
                    f"the tensors of one map must have the same shape, and are {', '.join(map(str, types[: self.own]))}"
                )
            found += self.map.infer(types)
        return tuple(found)

    def indexing(self, inputs: Types, outputs: Types) -> Axes | None:
        """Element by element, where all tensors have one shape."""
        if any(y.shape != outputs[0].shape for y in outputs):
            return None
        f = Factors()
        y = f.row("a", outputs[0].shape)
        return f.axes([y if x.rank else () for x in inputs], [y] * len(outputs))

    def overwrites(self, inputs: Types, outputs: Types) -> tuple[tuple[int, int], ...]:
        """As each map."""
        return tuple(
            (t * len(self.exprs) + o, t * self.own + i)
            for t, types in enumerate(self.each(inputs))
            for o, i in self.map.overwrites(types, self.results(outputs, t))
            if i < self.own
        )

    def flops(self, inputs: Types, outputs: Types) -> int:
        """Of all maps."""
        return sum(self.map.flops(x, self.results(outputs, t)) for t, x in enumerate(self.each(inputs)))

    def workspace(self, inputs: Types, outputs: Types) -> int:
        """The workspace of the largest map."""
        return max(self.map.workspace(x, self.results(outputs, t)) for t, x in enumerate(self.each(inputs)))

    def compute(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray) -> None:
        """One after the other."""
        for t, arrays in enumerate(self.each(inputs)):
            self.map.compute(arrays, self.results(outputs, t), workspace)

    def decompose(self, b: Builder, inputs: Values) -> Values:
        """A map for each."""
        return [y for given in self.each(inputs) for y in b.node(self.map, *given)]

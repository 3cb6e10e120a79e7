"""A map and rows that are added to its result, in one op: a stored tensor that both change is written in its place."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from foreplan.base.errors import ShapeError
from foreplan.graph import Builder, Cost, TensorType, register
from foreplan.graph.axes import Axes
from foreplan.graph.op import Arrays, Cotangents, Types, Values, only
from foreplan.ops.expr import Arg, derivative
from foreplan.ops.index import ScatterAdd
from foreplan.ops.map import Map, elementwise
from foreplan.ops.shape import sum_to_shape


@register
@dataclass(frozen=True)
class MapScatterAdd(ScatterAdd):
    """y = f(x_0, x_1, …) of the inputs from the third on, with updates[a…, i…, b…] added to y[a…, indices[i…], b…].

    The map's result is rounded to its element type before anything is added.

    Attributes:
        expr: f, of a0, a1, …, as in a map.
    """

    name: ClassVar[str] = "map_scatter_add"
    accumulates: ClassVar[int] = 0
    expr: str

    @property
    def map(self) -> Map:
        """What is computed before anything is added."""
        return Map((self.expr,))

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """`shape`, which the map's result must have."""
        if len(inputs) < 3:
            raise ShapeError(f"needs indices, updates, and one input of its map at least, and got {len(inputs)} inputs")
        return ScatterAdd.infer(self, [*inputs[:2], *self.map.infer(inputs[2:])])

    def indexing(self, inputs: Types, outputs: Types) -> Axes:
        """All of the indices."""
        found = super().indexing(inputs, outputs)
        return replace(found, whole=found.whole | found.sums.keys(), sums={})

    def vjp(self, b: Builder, inputs: Values, outputs: Values, cotangents: Cotangents) -> Cotangents:
        """The cotangent's rows, gathered; what the map's derivative makes of it for each of the map's inputs."""
        (expr,), g, read = self.map.parsed, only(cotangents), inputs[2:]
        found = [*ScatterAdd(self.axis, self.shape).vjp(b, inputs[:2], outputs, cotangents)]
        flows = derivative(expr, Arg(len(read)), expr)  # the output is no longer what the map gave
        for i, x in enumerate(read):
            wanted = i in flows and x.dtype.is_float and b.wants(x)
            flow = elementwise(b, flows[i], *read, g, dtype=x.dtype) if wanted else None
            found.append(None if flow is None else sum_to_shape(b, flow, x.shape))
        return found

    def overwrites(self, inputs: Types, outputs: Types) -> tuple[tuple[int, int], ...]:
        """As the map, which is computed whole before rows are added."""
        return tuple((o, i + 2) for o, i in self.map.overwrites(inputs[2:], outputs))

    def accepts_strides(self, index: int, input: TensorType, strides: tuple[int, ...]) -> bool:
        """Updates whose axes merge into three, and anything that the map reads."""
        return index > 1 or super().accepts_strides(index, input, strides)

    def cost(self, inputs: Types, outputs: Types) -> Cost:
        """The map's operations, and one addition an element of the updates."""
        adds = super().cost(inputs, outputs)
        return Cost(adds.flops + self.map.flops(inputs[2:], outputs), adds.nbytes)

    def workspace(self, inputs: Types, outputs: Types) -> int:
        """The larger of the two, as one is over before the other."""
        return max(self.map.workspace(inputs[2:], outputs), super().workspace(inputs, outputs))

    def compute(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray) -> None:
        """The map, then the rows."""
        self.map.compute(inputs[2:], outputs, workspace)
        self.add(inputs[0], inputs[1], outputs[0], workspace)

    def decompose(self, b: Builder, inputs: Values) -> Values:
        """A map and a scatter-add."""
        return b.node(ScatterAdd(self.axis, self.shape), *inputs[:2], *b.node(self.map, *inputs[2:]))

"""A result whose gradient is given by other nodes than those that compute it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from foreplan.base.errors import ShapeError
from foreplan.graph import Builder, Graph, GraphBuilder, Node, Op, TensorType, Value, register
from foreplan.graph.op import Arrays, Cotangents, Types, Values
from foreplan.ops.expr import where
from foreplan.ops.loop import parsed_body
from foreplan.ops.map import elementwise


@register
@dataclass(frozen=True)
class CustomGradient(Op):
    """Results as they are, whose gradients a graph computes: `jax.custom_vjp`, `torch.autograd.Function`.

    Inputs: the results; the tensors that get a gradient; and what else the gradients are computed from. Outputs: the
    results.

    Attributes:
        body: a graph as text, without stored values. Its inputs are the cotangents of the results, then what else is
            read; its outputs are called by the numbers of the tensors that they are the gradients of.
        results: their number.
        tensors: how many may get a gradient.
    """

    name: ClassVar[str] = "custom_gradient"
    body: str
    results: int
    tensors: int

    @cached_property
    def graph(self) -> Graph:
        """The body."""
        return parsed_body(self.body)

    def reached(self, inputs: Values) -> Values:
        """What the body gives gradients of."""
        return [inputs[self.results + int(name)] for name in self.graph.outputs]

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """The types of the results; what the body reads, and gives, is of the inputs' types."""
        body, split = self.graph, self.results + self.tensors
        self.check_count(inputs, split + len(body.inputs) - self.results)
        read = (*inputs[: self.results], *inputs[split:])
        for given, value in zip(read, body.inputs):
            if given != value.type:
                raise ShapeError(f"{value.name!r} of the gradient is {value.type}, and was given {given}")
        for name, value in body.outputs.items():
            argument = inputs[self.results + int(name)]
            if value.type != argument:
                raise ShapeError(f"the gradient of argument {name} is {value.type}, and the argument {argument}")
        return tuple(inputs[: self.results])

    def compute(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray) -> None:
        """Copy."""
        for x, y in zip(inputs, outputs):
            np.copyto(y, x)

    def vjp(self, b: Builder, inputs: Values, outputs: Values, cotangents: Cotangents) -> Cotangents:
        """What the body computes; a result that nothing reads has a cotangent of zeros."""
        body, saved = self.graph, inputs[self.results + self.tensors :]
        flows = [g if g is not None else _zeros(b, y) for g, y in zip(cotangents, outputs)]
        at = dict(zip(body.inputs, (*flows, *saved)))
        for node in body.nodes:
            at.update(zip(node.outputs, b.repeat(node, [at[value] for value in node.inputs])))
        found: list[Value | None] = [None] * len(inputs)
        for name, value in body.outputs.items():
            found[self.results + int(name)] = at[value]
        return found


def _zeros(b: Builder, like: Value) -> Value:
    return elementwise(b, lambda y: where(y > 0.0, 0.0, 0.0), like)


def with_gradient(
    b: Builder,
    results: Sequence[Value],
    tensors: Sequence[Value],
    cotangents: Sequence[Value],
    gradients: Sequence[Value | None],
) -> tuple[Value, ...]:
    """Results, whose gradients with respect to tensors are what has been computed from stand-ins of their cotangents.

    Args:
        b: has, as its last nodes, those that compute the gradients; they leave it.
        results: of one type each with the cotangents.
        tensors: that may get a gradient.
        cotangents: inputs of the builder, which leave it.
        gradients: one for each tensor; None: it gets none.

    Raises:
        ShapeError: a gradient has another type than its tensor.
    """
    moved = set(cotangents)
    nodes = []
    for node in b.nodes:
        if not moved.isdisjoint(node.inputs):
            moved.update(node.outputs)
            nodes.append(node)
    wanted = {value for value in gradients if value is not None}
    body_nodes: list[Node] = []
    for node in reversed(nodes):
        if not wanted.isdisjoint(node.outputs):
            wanted.update(node.inputs)
            body_nodes.insert(0, node)
    left = set(map(id, nodes))
    b.nodes[:] = [node for node in b.nodes if id(node) not in left]
    b.inputs[:] = [value for value in b.inputs if value not in set(cotangents)]
    read = dict.fromkeys(value for node in body_nodes for value in node.inputs if value not in moved)
    read |= dict.fromkeys(value for value in gradients if value is not None and value not in moved)
    body = GraphBuilder("gradient")
    at = {value: body.input(value.name, value.type) for value in (*cotangents, *read)}
    for node in body_nodes:
        at.update(zip(node.outputs, body.repeat(node, [at[value] for value in node.inputs])))
    outputs = {str(i): at[value] for i, value in enumerate(gradients) if value is not None}
    op = CustomGradient(body.finish(outputs).as_text(), len(results), len(tensors))
    return b.node(op, *results, *tensors, *read)

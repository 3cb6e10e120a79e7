"""Activations that ranks gather for products, and drop: the backward pass gathers them again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from foreplan.graph import Graph, Kind, Node, Value
from foreplan.ops.collective import AllGather, Finish
from foreplan.ops.shape import Reshape, Transpose
from foreplan.passes.base import Pass
from foreplan.passes.rewrite import builder_for


@dataclass(frozen=True)
class GatherAgain(Pass, requires=("backward",), ensures=("backward",), optional=True):
    """The step in which what an `all_gather` with `again` gives is read by the forward pass alone. Backward reads what
    another gather brings, before its first reader, so that in between each rank keeps its own part. What is gathered
    last stays, since backward begins with it.
    """

    def _run(self, graph: Graph) -> Graph:
        gathers = [node for node in graph.nodes_of(AllGather) if node.op.again]
        return _Again(graph, gathers).run() if gathers else graph


gather_again = GatherAgain()


class _Again:
    """One graph, with further gathers."""

    def __init__(self, graph: Graph, gathers: Sequence[Node]) -> None:
        self.graph, self.b = graph, builder_for(graph)
        self.gathers: dict[Value, Node] = {}  # by what is gathered, and the forms that it is brought into: what made it
        self.again: dict[Value, Value] = {}
        self.last = gathers[-1]

    def run(self) -> Graph:
        """The graph."""
        b, graph = self.b, self.graph
        for node in graph.nodes:
            inputs = node.inputs
            waits = node.of(Finish)  # for what was begun: it names what is sent
            if node.outputs[0].kind is not Kind.ACTIVATION and not waits:
                inputs = tuple(self.late(x) for x in inputs)
            elif self.brings(node):
                self.gathers[node.outputs[0]] = node
            gather = node.of(AllGather)
            op = replace(gather.op, again=False) if gather else node.op
            b.append(Node(op, inputs, node.outputs, node.name, node.source), inferred=True)
        return b.finish(graph.outputs, graph.updates, graph.loss, graph.gradients)

    def brings(self, node: Node) -> bool:
        """Whether a node gathers, or brings what has been gathered into another form."""
        if gather := node.of(AllGather):
            return gather.op.again and gather is not self.last
        return node.of(Reshape, Transpose) is not None and node.inputs[0] in self.gathers

    def late(self, value: Value) -> Value:
        """What the backward pass reads in the place of a value."""
        node = self.gathers.get(value)
        if node is None:
            return value
        if value not in self.again:
            b = self.b
            inputs = tuple(self.late(x) for x in node.inputs)
            gather = node.of(AllGather)
            op = replace(gather.op, time=1, again=False) if gather else node.op
            b.kind = Kind.GRADIENT
            self.again[value] = b.apply(op, *inputs, name=f"{node.name}/again")
        return self.again[value]

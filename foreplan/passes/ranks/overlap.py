"""Exchanges that go on while the step computes: each is waited for when the next one has begun."""

from __future__ import annotations

from dataclasses import replace

from foreplan.graph import Graph, Node, Value
from foreplan.ops.collective import Begin, Finish


def overlap_exchanges(graph: Graph) -> Graph:
    """The graph in which what waits for an exchange stands behind the beginning of the next one, with all that depends
    on it; two exchanges are then under way at a time, and the backward pass goes on beside them. A graph without
    exchanges as it is.

    The wait also reads what the next one has begun, so that no plan moves it before.
    """
    if not any(isinstance(node.op, Finish) for node in graph.nodes):
        return graph
    line = _Line()
    for node in graph.nodes:
        line.take(node)
    line.end()
    return replace(graph, nodes=tuple(line.nodes))


class _Line:
    """The nodes in their new order, and groups of those that still wait, each of them behind an exchange."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.groups: list[list[Node]] = []
        self.group_of: dict[Value, list[Node]] = {}

    def take(self, node: Node) -> None:
        """Put a node into the line, or let it wait."""
        waiting = [group for group in self.groups if any(self.group_of.get(x) is group for x in node.inputs)]
        if waiting:
            self.wait(node, waiting[-1])
        elif isinstance(node.op, Finish):
            self.groups.append([])
            self.wait(node, self.groups[-1])
        else:
            self.nodes.append(node)
            if isinstance(node.op, Begin):
                self.release(len(self.groups), node.outputs)

    def wait(self, node: Node, group: list[Node]) -> None:
        """Let a node wait in a group."""
        group.append(node)
        self.group_of.update((value, group) for value in node.outputs)

    def release(self, count: int, begun: tuple[Value, ...]) -> None:
        """Put the oldest groups into the line, given what has begun since."""
        released, self.groups = self.groups[:count], self.groups[count:]
        for group in released:
            for node in group:
                for value in node.outputs:
                    del self.group_of[value]
            first, *rest = group
            self.nodes.append(replace(first, inputs=(*first.inputs, *begun)))
            for node in rest:
                self.take(node)

    def end(self) -> None:
        """Put all that waits into the line."""
        while self.groups:
            self.release(1, ())

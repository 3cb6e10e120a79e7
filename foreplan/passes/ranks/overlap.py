"""Exchanges that go on while the step computes: each is waited for when the next one of its kind has begun."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from foreplan.graph import Graph, Node, Value
from foreplan.ops.collective import Begin, Finish
from foreplan.passes.base import Pass

SOON = 1 << 15  # bytes: an exchange that sends no more takes about as long as its beginning, and is waited for at once

Beside = Callable[[Begin], bool]  # whether an exchange goes on while a rank computes


def always(exchange: Begin) -> bool:
    """As exchanges of cards do, and of nodes."""
    return True


@dataclass(frozen=True)
class OverlapExchanges(Pass, requires=("kernels",), ensures=("kernels",), optional=True):
    """The graph in which what waits for an exchange stands behind the beginning of the next one of its kind, with all
    that depends on it; of each kind two exchanges are then under way at a time, and the backward pass goes on beside
    them. Kinds do not wait for one another: to gather weights needs nothing that is computed, so that it begins at once
    behind an exchange of gradients, which then would be waited for at once. An exchange on which the next one of its
    kind and ranks depends is waited for at once, too: else others would begin before their time.

    A graph without exchanges as it is. Messages between stages are listed so already, and keep their order: each reads
    what the one before it has begun.

    The wait also reads what the next one has begun, so that no plan moves it before. Small exchanges stay where they
    are, such as those of batch normalisation, on which all that follows depends. So do those that processors move,
    which compute nothing meanwhile: what is put off would take memory for no time.

    Attributes:
        beside: tells which exchanges go on beside computing.
    """

    beside: Beside = always

    def _run(self, graph: Graph) -> Graph:
        if not graph.nodes_of(Finish):
            return graph
        nodes = tuple(_Line(graph, self.beside).run())
        return graph if nodes == graph.nodes else replace(graph, nodes=nodes)


Kind = tuple[str, int, int]  # what is exchanged, and among which ranks


def _large(nodes: Sequence[Node], beside: Beside) -> dict[Value, Kind]:
    """What begins exchanges that others go on beside, and which they are."""
    found = dict[Value, Kind]()
    for node in nodes:
        if type(op := node.op) is Begin and node.inputs[0].type.nbytes > SOON and beside(op):
            found[node.outputs[0]] = op.kind, op.ranks, op.stride
    return found


def _needed_next(nodes: Sequence[Node], large: Mapping[Value, Kind]) -> set[int]:
    """The places of waits on which the next large exchange of their kind and ranks depends."""
    found = set[int]()
    for at, node in enumerate(nodes):
        if not node.of(Finish) or node.inputs[0] not in large:
            continue
        behind = set(node.outputs)
        for later in islice(nodes, at + 1, None):
            depends = not behind.isdisjoint(later.inputs)
            if depends:
                behind.update(later.outputs)
            if later.outputs and large.get(later.outputs[0]) == large[node.inputs[0]]:
                found |= {at} if depends else set()
                break
    return found


class _Line:
    """The nodes in their new order, and groups of those that still wait, each of them behind an exchange."""

    def __init__(self, graph: Graph, beside: Beside) -> None:
        self.nodes: list[Node] = []
        self.groups: list[list[int]] = []
        self.large = _large(graph.nodes, beside)
        self.group_of: dict[Value, list[int]] = {}
        self.given = list(graph.nodes)
        self.coming = list(range(len(self.given)))  # a heap: what has been released comes in its old place
        self.released = _needed_next(self.given, self.large)  # exchanges that need not wait, or not any more

    def run(self) -> list[Node]:
        """All of them."""
        while self.coming or self.groups:
            if self.coming:
                self.take(heapq.heappop(self.coming))
            else:
                self.release(self.groups[:1], ())
        return self.nodes

    def take(self, at: int) -> None:
        """Put a node into the line, or let it wait."""
        node = self.given[at]
        waiting = [group for group in self.groups if any(self.group_of.get(x) is group for x in node.inputs)]
        if waiting:
            self.wait(at, waiting[-1])
        elif node.of(Finish) and node.inputs[0] in self.large and at not in self.released:
            self.groups.append([])
            self.wait(at, self.groups[-1])
        else:
            self.nodes.append(node)
            if node.outputs[0] in self.large:
                kind, *_ = self.large[node.outputs[0]]
                alike = [group for group in self.groups if self.large[self.given[group[0]].inputs[0]][0] == kind]
                self.release(alike, node.outputs)

    def wait(self, at: int, group: list[int]) -> None:
        """Let a node wait in a group."""
        group.append(at)
        self.group_of.update((value, group) for value in self.given[at].outputs)

    def release(self, released: list[list[int]], begun: tuple[Value, ...]) -> None:
        """Let groups come again, given what has begun since."""
        self.groups = [group for group in self.groups if not any(group is each for each in released)]
        for group in released:
            first = group[0]
            self.given[first] = replace(self.given[first], inputs=(*self.given[first].inputs, *begun))
            self.released.add(first)
            for at in group:
                heapq.heappush(self.coming, at)
                for value in self.given[at].outputs:
                    del self.group_of[value]

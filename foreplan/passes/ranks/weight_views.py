"""Weights as views of the rows in which they are stored: a row that lies in parts is gathered before it is read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from foreplan.graph import Graph, Kind, Node, Value
from foreplan.graph.flat import Flat
from foreplan.ops.collective import AllGather, Group
from foreplan.ops.map import convert
from foreplan.passes.ranks.layout import Bucket, keep
from foreplan.passes.ranks.rows import taken
from foreplan.passes.rewrite import builder_for


class Phase(NamedTuple):
    """When nodes of a step run: in its forward pass or its backward pass, or in those of one micro-batch.

    Attributes:
        number: of the phase, in the order in which they run, from 0 on.
        forward: whether it goes forward.
    """

    number: int
    forward: bool


FORWARD, BACKWARD = Phase(0, True), Phase(1, False)


def by_pass(forward: Collection[Node]) -> Callable[[Node], Phase]:
    """The phase of each node of a step, given the nodes of its forward pass."""
    return lambda node: FORWARD if node in forward else BACKWARD


# When a bucket is gathered for what reads it; None: it is a result of the step.
When = Callable[[Bucket, Node | None], Phase]


def at_first(bucket: Bucket, reader: Node | None) -> Phase:
    """Once."""
    return FORWARD


def in_homes(
    graph: Graph, buckets: Sequence[Bucket], when: When, now: Mapping[Value, Value] = MappingProxyType({})
) -> Graph:
    """The graph in which weights are views of their buckets. One that lies in parts is gathered in each of its phases
    before its first reader, and does not lie there in between. What is read narrow alone is gathered narrow.

    Args:
        when: a bucket is gathered for a reader.
        now: in the graph, what values are that were others when buckets were made.
    """
    return _Homes(graph, buckets, when, now).run() if buckets else graph


class _Homes:
    """One graph in which weights become views."""

    def __init__(self, graph: Graph, buckets: Sequence[Bucket], when: When, now: Mapping[Value, Value]) -> None:
        self.graph, self.buckets, self.when = graph, buckets, when
        self.place = {
            now.get(value, value): (bucket, member)
            for bucket in buckets
            for values in (bucket.weights, bucket.copies)
            for value, member in zip(values, bucket.members)
        }
        self.rows: dict[tuple[Bucket, int], Value] = {}
        self.views: dict[tuple[Value, int], Value] = {}
        self.b = builder_for(graph)

    def run(self) -> Graph:
        """The graph."""
        graph, b = self.graph, self.b
        homes = [bucket.home for bucket in self.buckets]
        b.stored = [value for value in graph.stored if value not in self.place and value not in homes]
        keep(b, homes)
        for node in graph.nodes:
            if node.outputs[0] in self.place:  # a narrow copy, in whose place a whole row of them is made
                continue
            inputs = tuple(self.value(x, node) for x in node.inputs)
            b.append(Node(node.op, inputs, node.outputs, node.name, node.source), inferred=True)
        results = [{name: self.value(x) for name, x in some.items()} for some in (graph.outputs, graph.gradients)]
        return b.finish(results[0], graph.updates, graph.loss, results[1])

    def value(self, value: Value, reader: Node | None = None) -> Value:
        """What takes the place of a value; for a weight a view, made when it is first read in a phase."""
        if value not in self.place:
            return value
        bucket, member = self.place[value]
        phase = self.when(bucket, reader)
        if (value, phase.number) not in self.views:
            b, row = self.b, self.row(bucket, phase)
            b.scope, b.kind = f"{value.name}/", Kind.ACTIVATION
            self.views[value, phase.number] = taken(b, row, member.start, value.type)
            b.scope = ""
        return self.views[value, phase.number]

    def row(self, bucket: Bucket, phase: Phase) -> Value:
        """All of a bucket, gathered where it lies in parts."""
        lies, number = bucket.home.init, phase.number
        assert isinstance(lies, Flat)
        if lies.ranks == 1 and not bucket.copies:
            return bucket.home
        if (bucket, number) not in self.rows:
            b = self.b
            # A narrow copy is made once more, too: `share_common` keeps what is of the backward pass apart.
            b.scope, b.kind = f"{bucket.home.name}/", Kind.ACTIVATION if phase.forward else Kind.GRADIENT
            row = convert(b, bucket.home, bucket.copies[0].dtype) if bucket.copies else bucket.home
            if lies.ranks > 1:
                gather = Group(lies.ranks, lies.stride).op(AllGather, time=number)
                row = b.apply(gather, row, name="again" if number else "whole")
            self.rows[bucket, number] = row
            b.scope = ""
        return self.rows[bucket, number]

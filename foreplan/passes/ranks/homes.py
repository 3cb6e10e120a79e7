"""Weights as views of the rows in which they are stored: a row that lies in parts is gathered before it is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from foreplan.graph import Builder, Graph, Kind, Node, Value
from foreplan.graph.flat import Flat
from foreplan.ops.collective import AllGather, Group
from foreplan.ops.map import convert
from foreplan.passes.ranks.layout import Bucket, keep
from foreplan.passes.ranks.rows import taken

# Whether what reads a bucket reads it when it is gathered once more; None: it is a result of the step.
IsLate = Callable[[Bucket, Node | None], bool]


def never(bucket: Bucket, reader: Node | None) -> bool:
    """No bucket is gathered twice."""
    return False


def in_homes(graph: Graph, buckets: Sequence[Bucket], is_late: IsLate, late: Kind = Kind.ACTIVATION) -> Graph:
    """The graph in which weights are views of their buckets. A bucket that lies in parts is gathered before its first
    reader, and once more for those that are late: it does not lie there in between. What is read narrow alone is
    gathered narrow.

    Args:
        late: the kind of what is gathered once more.
    """
    return _Homes(graph, buckets, is_late, late).run() if buckets else graph


class _Homes:
    """One graph in which weights become views."""

    def __init__(self, graph: Graph, buckets: Sequence[Bucket], is_late: IsLate, kind: Kind) -> None:
        self.graph, self.buckets, self.is_late, self.kind = graph, buckets, is_late, kind
        self.place = {
            value: (bucket, member)
            for bucket in buckets
            for values in (bucket.weights, bucket.copies)
            for value, member in zip(values, bucket.members)
        }
        self.rows: dict[tuple[Bucket, bool], Value] = {}
        self.views: dict[tuple[Value, bool], Value] = {}
        self.b = b = Builder(graph.name)
        b.inputs, b.notes = list(graph.inputs), list(graph.notes)
        b.reserve((*graph.inputs, *graph.stored), graph.nodes)

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
        """What takes the place of a value; for a weight a view, made when it is first read."""
        if value not in self.place:
            return value
        bucket, member = self.place[value]
        late = self.is_late(bucket, reader)
        if (value, late) not in self.views:
            b, row = self.b, self.row(bucket, late)
            b.scope, b.kind = f"{value.name}/", Kind.ACTIVATION
            self.views[value, late] = taken(b, row, member.start, value.type)
            b.scope = ""
        return self.views[value, late]

    def row(self, bucket: Bucket, late: bool) -> Value:
        """All of a bucket, gathered where it lies in parts."""
        lies = bucket.home.init
        assert isinstance(lies, Flat)
        if lies.ranks == 1 and not bucket.copies:
            return bucket.home
        if (bucket, late) not in self.rows:
            b = self.b
            # A narrow copy is made once more, too: `share_common` keeps what is of the backward pass apart.
            b.scope, b.kind = f"{bucket.home.name}/", self.kind if late else Kind.ACTIVATION
            row = convert(b, bucket.home, bucket.copies[0].dtype) if bucket.copies else bucket.home
            if lies.ranks > 1:
                gather = Group(lies.ranks, lies.stride).op(AllGather, time=int(late))
                row = b.apply(gather, row, name="again" if late else "whole")
            self.rows[bucket, late] = row
            b.scope = ""
        return self.rows[bucket, late]

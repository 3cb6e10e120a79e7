"""Training state in parts, one on each rank: optimizer state, gradients, parameters (ZeRO's stages 1, 2 and 3)."""

from __future__ import annotations

from collections.abc import Collection

from foreplan.graph import Builder, Graph, Kind, Node, Value
from foreplan.ops.collective import AllGather, OwnPart, ReduceScatter
from foreplan.ops.map import convert
from foreplan.passes.autodiff import Consume, Consumer
from foreplan.passes.optimizer import Optimizer
from foreplan.passes.optimizer.updater import Updater
from foreplan.passes.ranks.buckets import cleared
from foreplan.passes.ranks.layout import Bucket, buckets_of, keep
from foreplan.passes.ranks.rows import joined, taken
from foreplan.passes.ranks.setting import Ranks


class Sharding:
    """What ranks hold parts of, in one step.

    A step is made in this order: `lay_out` of the forward graph; `reducing` and `updating` while it is differentiated,
    where they are what uses gradients; and `with_homes` of what comes out.

    Attributes:
        ranks: the setting.
        buckets: those of the graph that was laid out last.
    """

    def __init__(self, ranks: Ranks, optimizer: Optimizer) -> None:
        self.ranks, self.optimizer = ranks, optimizer
        self.buckets: tuple[Bucket, ...] = ()

    @property
    def gathers(self) -> bool:
        """Whether parameters lie in parts, and are gathered where they are read."""
        return self.ranks.shard == "parameters"

    def lay_out(self, forward: Graph) -> None:
        """Find the buckets of a forward graph."""
        self.buckets = buckets_of(forward, self.ranks, self.optimizer)

    def reducing(self, consume: Consume) -> Consume:
        """What gives each rank its part of the sums of all ranks' gradients, for `consume` to use."""
        return lambda b, scale, micro_batches: _Parts(b, consume(b, scale, micro_batches), self)

    def updating(self, b: Builder, scale: object, micro_batches: Value | None) -> Consumer:
        """What updates this rank's part of each bucket, and gathers the whole where every rank has it."""
        updater = Updater(b, self.optimizer, micro_batches, scale)  # type: ignore[arg-type]
        return _Owner(b, updater, self)

    def with_homes(self, graph: Graph, forward: Collection[Node]) -> Graph:
        """A graph in which weights are views of their buckets. Where these lie in parts, each is gathered before its
        first reader, and once more for the backward pass: only the last one stays in between. What is read narrow alone
        is gathered narrow.

        Args:
            forward: the nodes of the forward pass.
        """
        return _Homes(graph, self, forward).run() if self.buckets else graph


class _Parts:
    """Collects the gradients of each bucket; when they are all there, every rank gets its part of their sums."""

    def __init__(self, b: Builder, inner: Consumer, sharding: Sharding) -> None:
        self.b, self.inner = b, inner
        self.bucket_of = {value: bucket for bucket in sharding.buckets for value in bucket.weights}
        self.gradients: dict[Value, Value] = {}
        self.updates: dict[Value, Value] = {}

    def update(self, parameter: Value, gradient: Value) -> None:
        """Keep the gradient until its bucket is full, and then exchange this."""
        self.gradients[parameter] = gradient
        bucket, b = self.bucket_of[parameter], self.b
        if not all(value in self.gradients for value in bucket.weights):
            return
        scope, b.scope = b.scope, f"{bucket.home.name}/"
        keep(b, [bucket.home])
        gradients = [self.gradients.pop(value) for value in bucket.weights]
        row = joined(b, gradients, [each.start for each in bucket.members], bucket.size)
        if bucket.group.ranks > 1:
            row = b.apply(bucket.group.op(ReduceScatter), row, name="gradients")
        self.inner.update(bucket.home, row)
        for each in gradients:
            self.updates |= cleared(b, each)
        b.scope = scope

    def finish(self) -> dict[Value, Value]:
        """Every stored value's content for the next step."""
        return self.updates | self.inner.finish()


class _Owner:
    """Lets an optimizer update this rank's part of each bucket."""

    def __init__(self, b: Builder, updater: Updater, sharding: Sharding) -> None:
        self.b, self.updater, self.gathers = b, updater, sharding.gathers
        self.groups = {bucket.home: bucket.group for bucket in sharding.buckets}
        self.parts: dict[Value, Value] = {}  # by whole bucket, this rank's part

    def update(self, home: Value, gradient: Value) -> None:
        """Update a part."""
        part, group = home, self.groups[home]
        if not self.gathers and group.ranks > 1:
            part = self.parts[home] = self.b.apply(group.op(OwnPart), home, name="own_part")
        self.updater.update(part, gradient, home, group)

    def finish(self) -> dict[Value, Value]:
        """Every stored value's content for the next step: whole buckets are gathered."""
        updates, b = dict(self.updater.finish()), self.b
        for home, part in self.parts.items():
            b.scope = f"{home.name}/"
            updates[home] = b.apply(self.groups[home].op(AllGather), updates.pop(part), name="next")
        b.scope = ""
        return updates


class _Homes:
    """One graph in which weights become views."""

    def __init__(self, graph: Graph, sharding: Sharding, forward: Collection[Node]) -> None:
        self.graph, self.sharding = graph, sharding
        self.place = {
            value: (bucket, member)
            for bucket in sharding.buckets
            for values in (bucket.weights, bucket.copies)
            for value, member in zip(values, bucket.members)
        }
        self.backward = frozenset(graph.nodes).difference(forward) if sharding.gathers else frozenset()
        self.last = self._last_bucket(forward) if sharding.gathers else None
        self.rows: dict[tuple[Bucket, bool], Value] = {}
        self.views: dict[tuple[Value, bool], Value] = {}
        self.b = b = Builder(graph.name)
        b.inputs, b.notes = list(graph.inputs), list(graph.notes)
        b.reserve((*graph.inputs, *graph.stored), graph.nodes)

    def _last_bucket(self, forward: Collection[Node]) -> Bucket | None:
        """The one that the forward pass reads last, and the backward pass first."""
        read = (x for node in reversed(self.graph.nodes) if node in forward for x in node.inputs if x in self.place)
        value = next(read, None)
        return None if value is None else self.place[value][0]

    def run(self) -> Graph:
        """The graph."""
        graph, b = self.graph, self.b
        homes = [bucket.home for bucket in self.sharding.buckets]
        b.stored = [value for value in graph.stored if value not in self.place and value not in homes]
        keep(b, homes)
        for node in graph.nodes:
            if node.outputs[0] in self.place:  # a narrow copy, in whose place a whole row of them is made
                continue
            late = node in self.backward
            inputs = tuple(self.value(x, late, node) for x in node.inputs)
            b.append(Node(node.op, inputs, node.outputs, node.name, node.source), inferred=True)
        results = [{name: self.value(x, True) for name, x in some.items()} for some in (graph.outputs, graph.gradients)]
        return b.finish(results[0], graph.updates, graph.loss, results[1])

    def value(self, value: Value, late: bool, reader: Node | None = None) -> Value:
        """What takes the place of a value; for a weight a view, made when it is first read."""
        if value not in self.place:
            return value
        bucket, member = self.place[value]
        late = late and bucket is not self.last
        if (value, late) not in self.views:
            b, row = self.b, self.row(bucket, late)
            b.scope, b.kind = f"{value.name}/", Kind.ACTIVATION
            self.views[value, late] = taken(b, row, member.start, value.type)
            b.scope = ""
        return self.views[value, late]

    def row(self, bucket: Bucket, late: bool) -> Value:
        """All of a bucket, gathered where it lies in parts."""
        if not self.sharding.gathers:
            return bucket.home
        if (bucket, late) not in self.rows:
            b = self.b
            # A narrow copy is made once more, too: `share_common` keeps what is of the backward pass apart.
            b.scope, b.kind = f"{bucket.home.name}/", Kind.GRADIENT if late else Kind.ACTIVATION
            row = convert(b, bucket.home, bucket.copies[0].dtype) if bucket.copies else bucket.home
            if bucket.group.ranks > 1:
                row = b.apply(bucket.group.op(AllGather, time=int(late)), row, name="again" if late else "whole")
            self.rows[bucket, late] = row
            b.scope = ""
        return self.rows[bucket, late]

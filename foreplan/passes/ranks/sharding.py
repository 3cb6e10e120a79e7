"""Training state in parts, one on each rank: optimizer state, gradients, parameters (ZeRO's stages 1, 2 and 3)."""

from __future__ import annotations

from collections.abc import Collection

from foreplan.graph import Builder, Graph, Kind, Node, Value
from foreplan.ops.collective import AllGather, OwnPart, ReduceScatter
from foreplan.passes.autodiff import Consume, Consumer
from foreplan.passes.optimizer import Optimizer
from foreplan.passes.optimizer.updater import Updater
from foreplan.passes.ranks.buckets import cleared
from foreplan.passes.ranks.homes import in_homes, never
from foreplan.passes.ranks.layout import Bucket, buckets_of, keep
from foreplan.passes.ranks.rows import joined
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
        if not self.gathers:
            return in_homes(graph, self.buckets, never)
        placed = {value: each for each in self.buckets for value in (*each.weights, *each.copies)}
        read = (x for node in reversed(graph.nodes) if node in forward for x in node.inputs if x in placed)
        value = next(read, None)  # of the bucket that the forward pass reads last, and the backward pass first
        last = None if value is None else placed[value]
        backward = frozenset(graph.nodes).difference(forward)

        def is_late(bucket: Bucket, reader: Node | None) -> bool:
            return bucket is not last and (reader is None or reader in backward)

        return in_homes(graph, self.buckets, is_late, Kind.GRADIENT)


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

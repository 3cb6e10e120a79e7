"""Training state in parts, one on each rank: optimizer state, gradients, parameters (ZeRO's stages 1, 2 and 3)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from foreplan.graph import Builder, Graph, Node, Value
from foreplan.ops.collective import AllGather, OwnPart, ReduceScatter
from foreplan.passes.autodiff import (
    Consume,
    Consumer,
    Differentiate,
    MakeUpdater,
    check_not_written,
    differentiate,
)
from foreplan.passes.base import Pass
from foreplan.passes.loss_scale import LossScale
from foreplan.passes.optimizer import Optimizer
from foreplan.passes.optimizer.updater import Updater
from foreplan.passes.ranks.buckets import cleared
from foreplan.passes.ranks.kept_buckets import KeptBuckets
from foreplan.passes.ranks.layout import Bucket, buckets_of, keep
from foreplan.passes.ranks.rows import joined
from foreplan.passes.ranks.setting import Ranks
from foreplan.passes.ranks.weight_views import FORWARD, Phase, at_first, by_pass, in_homes


class Sharding:
    """What ranks hold parts of, in one step.

    A step is made in this order: `lay_out` of the forward graph; `reducing` and `updating` while it is differentiated,
    where they are what uses gradients; and `with_homes` of what comes out.

    Attributes:
        ranks: the setting.
        buckets: those of the graph that was laid out last.
    """

    def __init__(self, ranks: Ranks, optimizer: Optimizer, update: MakeUpdater) -> None:
        """
        Args:
            update: makes what updates this rank's parts.
        """
        self.ranks, self.optimizer, self.update = ranks, optimizer, update
        self.buckets: tuple[Bucket, ...] = ()

    @property
    def gathers(self) -> bool:
        """Whether parameters lie in parts, and are gathered where they are read."""
        return self.ranks.shard == "parameters"

    def lay_out(self, forward: Graph, trained: Collection[str], alone: Collection[Value] = ()) -> None:
        """Find the buckets of a forward graph.

        Args:
            trained: names of the weights that have gradients.
            alone: weights that have a bucket of their own.
        """
        self.buckets = buckets_of(forward, trained, self.ranks, self.optimizer, alone)

    def reducing(self, consume: Consume) -> Consume:
        """What gives each rank its part of the sums of all ranks' gradients, for `consume` to use."""
        return lambda b, scale, micro_batches: _Parts(b, consume(b, scale, micro_batches), self)

    def updating(self, b: Builder, scale: LossScale | None, micro_batches: Value | None) -> Consumer:
        """What updates this rank's part of each bucket, and gathers the whole where every rank has it."""
        return _Owner(b, self.update(b, scale, micro_batches), self)

    def with_homes(
        self, graph: Graph, phase_of: Callable[[Node], Phase], now: Mapping[Value, Value] = MappingProxyType({})
    ) -> Graph:
        """A graph in which weights are views of their buckets. Where these lie in parts, each is gathered in every
        phase before its first reader, but for `KeptBuckets`. What is read narrow alone is gathered narrow.

        Args:
            phase_of: of each node.
            now: in the graph, what values are that were others when it was laid out.
        """
        if not self.gathers:
            return in_homes(graph, self.buckets, at_first, now)
        place = {now.get(x, x): each for each in self.buckets for x in (*each.weights, *each.copies)}
        stays = KeptBuckets(
            [(phase_of(node).number, place[x]) for node in graph.nodes for x in node.inputs if x in place]
        )
        end = max(map(phase_of, graph.nodes), default=FORWARD)

        def when(bucket: Bucket, reader: Node | None) -> Phase:
            number, forward = end if reader is None else phase_of(reader)
            return Phase(stays.since(number, bucket), forward)

        return in_homes(graph, self.buckets, when, now)


@dataclass(frozen=True)
class DifferentiateInParts(
    Pass, requires=("forward", "loss", "training form", "no inner gradients"), ensures=("loss", "backward")
):
    """`differentiate`, where each rank holds a part of the training state.

    Attributes:
        sharding: what ranks hold; its buckets become those of this graph.
        step: makes the step of what each rank holds.

    Raises:
        UnsupportedError: the forward pass writes a parameter.
    """

    sharding: Sharding
    step: Differentiate

    def _run(self, graph: Graph) -> Graph:
        check_not_written(graph)
        self.sharding.lay_out(graph, differentiate(graph).gradients)
        return self.sharding.with_homes(self.step(graph), by_pass(set(graph.nodes)))


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

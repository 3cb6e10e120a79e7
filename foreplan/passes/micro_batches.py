"""One training step as two graphs: a body that runs for each micro-batch, and the update after them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from foreplan.graph import Builder, Fill, Graph, GraphBuilder, Kind, TensorType, Value
from foreplan.graph.types import FLOAT32
from foreplan.ops.expr import Arg, cast
from foreplan.ops.map import elementwise, elementwise_many
from foreplan.passes.autodiff import Consume
from foreplan.passes.base import Pass
from foreplan.passes.loss_scale import LossScale
from foreplan.passes.optimizer.site import zero


class Accumulation:
    """The values that a body keeps for the update: for each parameter the sum of its gradients, and their number.

    The body is forward, loss and backward of one micro-batch, differentiated with `consume`. It adds each parameter's
    gradient to an ACCUMULATOR, in place, counts, and moves running statistics and the random state on; its loss is the
    mean of the losses so far (`MeanLoss`). The update runs once after them (`update`): it divides the sums by the
    count, clips them, updates parameters and the optimizer's state, and clears the accumulators and the count.
    """

    def __init__(self) -> None:
        self._sums: dict[Value, Value] = {}
        self._scale: LossScale | None = None
        self.losses: tuple[Value, Value] | None = None  # their sum, and how many there are

    def consume(self, b: Builder, scale: LossScale | None, micro_batches: Value | None) -> _Accumulators:
        """The consumer that adds gradients up."""
        self._scale = scale
        return _Accumulators(b, self._sums)

    def update(self, body: Graph, consume: Consume) -> Graph:
        """The graph that runs after the micro-batches, for a body that has been made.

        Args:
            consume: makes what uses the sums of gradients.
        """
        assert self.losses is not None
        total, count = self.losses
        b = GraphBuilder(body.name)
        b.kind, b.stored = Kind.GRADIENT, list(body.stored)
        b.reserve((*body.inputs, *body.stored), body.nodes)
        consumer = consume(b, self._scale, count)
        for parameter, accumulator in self._sums.items():
            b.scope = f"{parameter.name}/"
            consumer.update(parameter, accumulator)
        b.scope = ""
        updates = consumer.finish()
        cleared = elementwise_many(b, [zero(total), zero(count)], total, count, name="clear")
        updates |= dict(zip((total, count), cleared))
        return b.finish({}, updates)


@dataclass(frozen=True)
class MeanLoss(Pass, requires=("loss", "backward"), ensures=("loss", "backward")):
    """The body that returns the mean of the losses so far, with accumulators of the losses and of their number.

    Attributes:
        accumulation: what the body keeps for the update.
    """

    accumulation: Accumulation

    def _run(self, graph: Graph) -> Graph:
        loss = graph.loss
        assert loss is not None
        b = GraphBuilder(base=graph)
        total = b.store("loss_sum", loss.type, Kind.ACCUMULATOR, Fill(0))
        count = b.store("micro_batches", TensorType(FLOAT32, ()), Kind.ACCUMULATOR, Fill(0))
        with_this, one_more = Arg(0) + Arg(2), Arg(1) + 1.0
        exprs = (with_this, one_more, with_this / cast(one_more, loss.dtype))
        names = ("loss_sum/next", "micro_batches/next", "mean_loss")
        new = elementwise_many(b, exprs, total, count, loss, name="mean_loss", outputs=names)
        self.accumulation.losses = total, count
        return b.finish(graph.outputs, {**graph.updates, total: new[0], count: new[1]}, new[2])


def with_same_stored(body: Graph, update: Graph) -> tuple[Graph, Graph]:
    """Both graphs with the stored values of either in one order, so that their programs keep them in the same bytes."""
    stored = tuple(dict.fromkeys((*body.stored, *update.stored)))
    return dataclasses.replace(body, stored=stored), dataclasses.replace(update, stored=stored)


class _Accumulators:
    """Adds every gradient to a stored sum of its own."""

    def __init__(self, b: Builder, sums: dict[Value, Value]) -> None:
        self.b, self.sums = b, sums
        self.updates: dict[Value, Value] = {}

    def update(self, parameter: Value, gradient: Value) -> None:
        """Add the gradient of one parameter."""
        accumulator = self.b.store(f"{parameter.name}/gradient", gradient.type, Kind.ACCUMULATOR, Fill(0))
        self.sums[parameter] = accumulator
        self.updates[accumulator] = elementwise(self.b, lambda a, g: a + g, accumulator, gradient, name="accumulate")

    def finish(self) -> dict[Value, Value]:
        """The accumulators' contents after this micro-batch."""
        return self.updates

"""Forward graph → two graphs of one training step: a body that runs for each micro-batch, and the update after them."""

from __future__ import annotations

import dataclasses

from foreplan.graph import Builder, DType, Fill, Graph, Kind, Value
from foreplan.graph.types import FLOAT32
from foreplan.ops.map import elementwise, elementwise_many
from foreplan.passes.autodiff import backward
from foreplan.passes.loss_scale import LossScale
from foreplan.passes.optimizer import Optimizer, Updater, zero
from foreplan.passes.simplify import simplified


def micro_batches(graph: Graph, optimizer: Optimizer, count: int, dtype: DType = FLOAT32) -> tuple[Graph, Graph]:
    """A training step over `count` micro-batches, as (body, update), computing in `dtype` what may be narrow.

    The body runs for each micro-batch: forward, loss and backward. It adds each parameter's gradient to an ACCUMULATOR,
    in place, and moves running statistics and the random state on; its loss is the sum so far of losses / `count`, and
    so their mean when the last one has run. The update runs once after them: it divides the sums by `count`, clips
    them, updates parameters and the optimizer's state, and clears the accumulators. Both graphs list the same stored
    values in the same order, so that their programs keep them in the same bytes.

    Requires: as `backward`; at least two micro-batches. Ensures: both graphs are simplified.

    Raises:
        ModelError, UnsupportedError: as `backward`.
    """
    sums: dict[Value, Value] = {}
    scales: list[LossScale | None] = []

    def consume(b: Builder, scale: LossScale | None) -> _Accumulators:
        scales.append(scale)
        return _Accumulators(b, sums)

    body = backward(graph, consume, dtype)
    body, total = _with_mean_loss(body, count)
    body = simplified(body)
    b = Builder(body.name)
    b.kind, b.stored = Kind.GRADIENT, list(body.stored)
    b.reserve((*body.inputs, *body.stored), body.nodes)
    updater = Updater(b, optimizer, count, scales[0])
    for parameter, accumulator in sums.items():
        b.scope = f"{parameter.name}/"
        updater.update(parameter, accumulator)
    b.scope = ""
    updates = updater.finish()
    (updates[total],) = elementwise_many(b, [zero(total)], total, name="clear")
    update = simplified(b.finish({}, updates))
    stored = tuple(dict.fromkeys((*body.stored, *update.stored)))
    return dataclasses.replace(body, stored=stored), dataclasses.replace(update, stored=stored)


class _Accumulators:
    """Adds every gradient to a stored sum of its own."""

    def __init__(self, b: Builder, sums: dict[Value, Value]) -> None:
        self.b, self.sums = b, sums
        self.updates: dict[Value, Value] = {}

    def update(self, parameter: Value, gradient: Value) -> None:
        """Add the gradient of one parameter."""
        accumulator = self.b.store(f"{parameter.name}/gradient", parameter.type, Kind.ACCUMULATOR, Fill(0))
        self.sums[parameter] = accumulator
        self.updates[accumulator] = elementwise(self.b, lambda a, g: a + g, accumulator, gradient, name="accumulate")

    def finish(self) -> dict[Value, Value]:
        """The accumulators' contents after this micro-batch."""
        return self.updates


def _with_mean_loss(body: Graph, count: int) -> tuple[Graph, Value]:
    """The body returning the mean loss, and the accumulator that it is kept in."""
    loss = body.loss
    assert loss is not None
    b = Builder(base=body)
    total = b.store("mean_loss", loss.type, Kind.ACCUMULATOR, Fill(0))
    new = elementwise(b, lambda t, x: t + x / float(count), total, loss, name="mean_loss/sum")
    return b.finish(body.outputs, {**body.updates, total: new}, new), total

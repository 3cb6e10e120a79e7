"""Forward graph → two graphs of one training step: a body that runs for each micro-batch, and the update after them."""

from __future__ import annotations

import dataclasses

from foreplan.graph import Builder, DType, Fill, Graph, Kind, TensorType, Value
from foreplan.graph.types import FLOAT32
from foreplan.ops.expr import Arg, cast
from foreplan.ops.map import elementwise, elementwise_many
from foreplan.passes.autodiff import backward
from foreplan.passes.loss_scale import LossScale
from foreplan.passes.optimizer import Optimizer, Updater, zero
from foreplan.passes.simplify import simplified


def micro_batches(graph: Graph, optimizer: Optimizer, dtype: DType = FLOAT32) -> tuple[Graph, Graph]:
    """A training step over micro-batches, however many, as (body, update), computing in `dtype` what may be narrow.

    The body runs for each micro-batch: forward, loss and backward. It adds each parameter's gradient to an ACCUMULATOR,
    in place, counts, and moves running statistics and the random state on; its loss is the mean of the losses so far.
    The update runs once after them: it divides the sums by the count, clips them, updates parameters and the
    optimizer's state, and clears the accumulators and the count. Both graphs list the same stored values in the same
    order, so that their programs keep them in the same bytes.

    Requires: as `backward`. Ensures: both graphs are simplified.

    Raises:
        ModelError, UnsupportedError: as `backward`.
    """
    sums: dict[Value, Value] = {}
    scales: list[LossScale | None] = []

    def consume(b: Builder, scale: LossScale | None) -> _Accumulators:
        scales.append(scale)
        return _Accumulators(b, sums)

    body = backward(graph, consume, dtype)
    body, total, count = _with_mean_loss(body)
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
    cleared = elementwise_many(b, [zero(total), zero(count)], total, count, name="clear")
    updates |= dict(zip((total, count), cleared))
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


def _with_mean_loss(body: Graph) -> tuple[Graph, Value, Value]:
    """The body returning the mean loss, and the accumulators of losses and of how many there were."""
    loss = body.loss
    assert loss is not None
    b = Builder(base=body)
    total = b.store("loss_sum", loss.type, Kind.ACCUMULATOR, Fill(0))
    count = b.store("micro_batches", TensorType(FLOAT32, ()), Kind.ACCUMULATOR, Fill(0))
    with_this, one_more = Arg(0) + Arg(2), Arg(1) + 1.0
    exprs = (with_this, one_more, with_this / cast(one_more, loss.dtype))
    names = ("loss_sum/next", "micro_batches/next", "mean_loss")
    new = elementwise_many(b, exprs, total, count, loss, name="mean_loss", outputs=names)
    return b.finish(body.outputs, {**body.updates, total: new[0], count: new[1]}, new[2]), total, count

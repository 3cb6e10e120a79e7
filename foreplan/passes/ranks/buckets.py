"""Gradients of several parameters, one behind the other, which all ranks sum up at once."""

from __future__ import annotations

from foreplan.graph import Builder, DType, Fill, Kind, TensorType, Value
from foreplan.ops.collective import AllReduce
from foreplan.ops.join import concat
from foreplan.ops.map import elementwise
from foreplan.ops.shape import reshape, slice_axis
from foreplan.passes.autodiff import Consume, Consumer
from foreplan.passes.optimizer.site import zero
from foreplan.passes.ranks.setting import Ranks

Member = tuple[Value, Value]  # a parameter and its gradient


def reducing(updating: Consume, ranks: Ranks) -> Consume:
    """What sums the gradients of all ranks before they are used: each rank then changes its weights alike."""
    return lambda b, scale, micro_batches: Buckets(b, updating(b, scale, micro_batches), ranks)


class Buckets:
    """Collects gradients until there are enough to be worth an exchange.

    Gradients are made within their bucket where their kernels can write them there. A bucket dies when the last
    parameter of it has been updated, so that a few buckets are alive at a time, and not all gradients.
    """

    def __init__(self, b: Builder, updater: Consumer, ranks: Ranks) -> None:
        self.b, self.updater, self.ranks = b, updater, ranks
        self.open: dict[DType, list[Member]] = {}
        self.updates: dict[Value, Value] = {}

    def update(self, parameter: Value, gradient: Value) -> None:
        """Put a gradient into a bucket; exchange this if it is full."""
        bucket = self.open.setdefault(gradient.dtype, [])
        bucket.append((parameter, gradient))
        if sum(gradient.type.nbytes for _, gradient in bucket) >= self.ranks.bucket:
            self.exchange(self.open.pop(gradient.dtype))

    def exchange(self, bucket: list[Member]) -> None:
        """Sum up over the ranks, and update."""
        b = self.b
        scope, b.scope = b.scope, ""
        start, whole = 0, b.apply(AllReduce(self.ranks.count), joined(b, bucket, self.ranks.count), name="gradients")
        for parameter, gradient in bucket:
            own = slice_axis(b, whole, 0, start, gradient.type.size)
            start += gradient.type.size
            b.scope = f"{parameter.name}/"
            self.updater.update(parameter, reshape(b, own, gradient.shape))
            self.clear(gradient)
        b.scope = scope

    def clear(self, gradient: Value) -> None:
        """Let a sum over micro-batches begin at zero again."""
        if gradient.kind is Kind.ACCUMULATOR:
            name = f"{gradient.name}/next"
            self.updates[gradient] = elementwise(self.b, zero(gradient), gradient, name=name)

    def finish(self) -> dict[Value, Value]:
        """Exchange what is left; every stored value's content for the next step."""
        while self.open:
            self.exchange(self.open.pop(next(iter(self.open))))
        return self.updates | self.updater.finish()


def joined(b: Builder, bucket: list[Member], ranks: int) -> Value:
    """Gradients as one row of elements, with zeros behind them, so that it divides among the ranks."""
    rows = [reshape(b, gradient, (gradient.type.size,)) for _, gradient in bucket]
    missing = -sum(row.type.size for row in rows) % ranks
    if missing:
        type = TensorType(rows[0].dtype, (missing,))
        rows.append(b.store("padding", type, Kind.CONSTANT, Fill(0.0)))
    return concat(b, rows)

"""Gradients of several parameters, one behind the other, which all ranks sum up at once."""

from __future__ import annotations

from foreplan.graph import Builder, DType, Kind, Value
from foreplan.graph.flat import laid_out
from foreplan.ops.collective import AllReduce, Group
from foreplan.ops.map import elementwise_many
from foreplan.passes.autodiff import Consume, Consumer
from foreplan.passes.optimizer.site import zero
from foreplan.passes.ranks.rows import joined, taken
from foreplan.passes.ranks.setting import Ranks

Summand = tuple[Value, Value]  # a parameter and its gradient


def summing(consume: Consume, ranks: Ranks) -> Consume:
    """What sums the gradients of all ranks before they are used: each rank then changes all weights alike."""
    return lambda b, scale, micro_batches: _Buckets(b, consume(b, scale, micro_batches), ranks)


class _Buckets:
    """Collects gradients until there are enough to be worth an exchange.

    Gradients are made within their bucket where their kernels can write them there. A bucket dies when the last
    parameter of it has been updated, so that a few buckets are alive at a time, and not all gradients.
    """

    def __init__(self, b: Builder, inner: Consumer, ranks: Ranks) -> None:
        self.b, self.inner, self.ranks = b, inner, ranks
        self.full = ranks.bucket(value for value in b.stored if value.kind is Kind.PARAMETER)
        self.open: dict[tuple[DType, Group], list[Summand]] = {}
        self.updates: dict[Value, Value] = {}

    def update(self, parameter: Value, gradient: Value) -> None:
        """Put a gradient into a bucket; exchange this if it is full. What no other rank has is used at once."""
        key = (gradient.dtype, self.ranks.with_other_samples(parameter))
        if key[1].ranks == 1:
            self.inner.update(parameter, gradient)
            self.updates |= cleared(self.b, gradient)
            return
        bucket = self.open.setdefault(key, [])
        bucket.append((parameter, gradient))
        if sum(gradient.type.nbytes for _, gradient in bucket) >= self.full:
            self.exchange(key[1], self.open.pop(key))

    def exchange(self, group: Group, bucket: list[Summand]) -> None:
        """Sum up over the ranks, and let each gradient be used."""
        b, scope = self.b, self.b.scope
        b.scope = ""
        gradients = [gradient for _, gradient in bucket]
        starts, size = laid_out([gradient.type for gradient in gradients], group.ranks)
        row = joined(b, gradients, starts, size)
        total = b.apply(group.op(AllReduce), row, name="gradients")
        for (parameter, gradient), start in zip(bucket, starts):
            b.scope = f"{parameter.name}/"
            self.inner.update(parameter, taken(b, total, start, gradient.type))
            self.updates |= cleared(b, gradient)
        b.scope = scope

    def finish(self) -> dict[Value, Value]:
        """Exchange what is left; every stored value's content for the next step."""
        while self.open:
            key = next(iter(self.open))
            self.exchange(key[1], self.open.pop(key))
        return self.updates | self.inner.finish()


def cleared(b: Builder, gradient: Value) -> dict[Value, Value]:
    """The next content of a sum over micro-batches, which has been used; nothing of another gradient."""
    if gradient.kind is not Kind.ACCUMULATOR:
        return {}
    (zeros,) = elementwise_many(b, [zero(gradient)], gradient, name="clear", outputs=[f"{gradient.name}/next"])
    return {gradient: zeros}

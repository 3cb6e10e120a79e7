"""A tensor as pieces of ranks, and exchanges of pieces along any axis: ops exchange along the first one."""

from __future__ import annotations

import math
from dataclasses import dataclass

from foreplan.graph import Builder, TensorType, Value
from foreplan.graph.shard import Shard
from foreplan.ops.collective import AllGather, AllReduce, OwnPart, ReduceScatter
from foreplan.ops.shape import reshape, transpose


@dataclass(frozen=True)
class Total:
    """What sums up the summands that ranks have of a tensor.

    Attributes:
        ranks: of a group.
        shard: the part of the sum that each rank gets; None: all of it.
    """

    ranks: int
    shard: Shard | None = None

    def of(self, b: Builder, x: Value) -> Value:
        """The sum, or this rank's part of it."""
        if self.shard is None:
            return b.apply(AllReduce(self.ranks), x, name="sum")
        return _first(b, x, self.shard, ReduceScatter(self.ranks), "sum")


def own_part(b: Builder, x: Value, shard: Shard) -> Value:
    """This rank's part of a tensor that every rank has whole."""
    return _first(b, x, shard, OwnPart(shard.ranks), "own_part")


def gathered(b: Builder, part: Value, shard: Shard, whole: TensorType) -> Value:
    """The whole tensor, given this rank's part. The backward pass gathers it again."""
    apart = _apart(whole, shard)
    row = reshape(b, part, (1, *_without(apart, shard.axis + 1)))
    every = b.apply(AllGather(shard.ranks, again=True), row, name="gathered")
    if math.prod(apart[: shard.axis + 1]) > 1:
        axes = range(1, len(apart))
        every = transpose(b, every, (*axes[: shard.axis + 1], 0, *axes[shard.axis + 1 :]))
    return reshape(b, every, whole.shape)


def _first(b: Builder, x: Value, shard: Shard, op: OwnPart | ReduceScatter, name: str) -> Value:
    """What an op gives of a tensor whose pieces are brought to the first axis."""
    apart, axis = _apart(x.type, shard), shard.axis + 1
    if math.prod(apart[:axis]) > 1:
        others = _without(tuple(range(len(apart))), axis)
        row = transpose(b, reshape(b, x, apart), (axis, *others))
    else:
        row = reshape(b, x, (shard.ranks, *_without(apart, axis)))
    return reshape(b, b.apply(op, row, name=name), shard.of(x.type).shape)


def _apart(whole: TensorType, shard: Shard) -> tuple[int, ...]:
    """The shape of a tensor whose cut axis is three: blocks, ranks, and what is of one rank."""
    shape, axis = whole.shape, shard.axis
    return (*shape[:axis], shard.blocks, shard.ranks, shape[axis] // shard.blocks // shard.ranks, *shape[axis + 1 :])


def _without(values: tuple[int, ...], index: int) -> tuple[int, ...]:
    return (*values[:index], *values[index + 1 :])

"""Parts of tensors and whole ones: what makes one of the other."""

from __future__ import annotations

from foreplan.graph import Builder, Value
from foreplan.graph.shard import Shard
from foreplan.ops.collective import AllGather, OwnPart
from foreplan.ops.shape import reshape, transpose


def part_of(b: Builder, value: Value, shard: Shard) -> Value:
    """This rank's part of what every rank has."""
    shape, axis = value.shape, shard.axis
    extent = shape[axis] // shard.blocks // shard.ranks
    apart = reshape(b, value, (*shape[:axis], shard.blocks, shard.ranks, extent, *shape[axis + 1 :]))
    others = [i for i in range(len(apart.shape)) if i != axis + 1]
    first = b.apply(OwnPart(shard.ranks), transpose(b, apart, (axis + 1, *others)), name="own_part")
    return reshape(b, first, shard.of(value.type).shape)


def whole_of(b: Builder, part: Value, shard: Shard) -> Value:
    """The whole of what each rank has a part of: gathered from all of them."""
    shape, axis, ranks, blocks = part.shape, shard.axis, shard.ranks, shard.blocks
    every = b.apply(AllGather(ranks), reshape(b, part, (1, *shape)), name="gathered")
    extent = shape[axis] // blocks
    apart = reshape(b, every, (ranks, *shape[:axis], blocks, extent, *shape[axis + 1 :]))
    others = list(range(1, len(apart.shape)))
    ordered = transpose(b, apart, (*others[: axis + 1], 0, *others[axis + 1 :]))
    return reshape(b, ordered, (*shape[:axis], ranks * shape[axis], *shape[axis + 1 :]))

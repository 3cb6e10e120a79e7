"""Stored values whose content differs from rank to rank, as a session reads and writes them: the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np

from foreplan.graph import TensorType
from foreplan.graph.flat import Flat
from foreplan.graph.init import RandomSeed
from foreplan.graph.shard import Shard
from foreplan.lower.program import Operand, Program, Slot
from foreplan.runtime.engine import Bound, Place
from foreplan.runtime.kernel import Run
from foreplan.runtime.world.world import World

_STRIDE = 0x9E3779B97F4A7C15  # between the seeds of ranks: 2^64 divided by the golden ratio, odd


class _Kept(Protocol):
    """A place without `fill` and `fetch`, which follow from the rest."""

    type: TensorType

    def read(self) -> np.ndarray: ...

    def write(self, array: np.ndarray) -> None: ...


class ByRank:
    """What a place of several ranks does by reading and writing."""

    def fill(self: _Kept, make: Callable[[np.ndarray], object]) -> None:
        """Made whole on each rank, which keeps its own."""
        elements = np.empty(self.type.shape, self.type.dtype.numpy)
        make(elements)
        self.write(elements)

    def fetch(self: _Kept, into: np.ndarray) -> Run:
        """Read at once."""
        into[...] = self.read()
        return lambda: None


class SpreadPlace(ByRank):
    """A tensor of which each rank holds a part. All ranks read it at the same time.

    Attributes:
        type: of the whole tensor.
    """

    def __init__(self, bound: Bound, type: TensorType, start: int, row: Operand, offset: int, world: World) -> None:
        """
        Args:
            type: of the tensor, and `start` its first element in the row.
            row: this rank's part of the row in which it lies, and `offset` the place of that part.
            world: the ranks that have parts of the row.
        """
        self.type, self.world, share = type, world, row.type.size
        self.stretches = []  # elements of the tensor, by the rank that holds them
        for rank in range(world.size):
            first, last = max(start, rank * share), min(start + self.type.size, (rank + 1) * share)
            if first < last:
                self.stretches.append((rank, slice(first - start, last - start)))
        self.own: tuple[slice, Place] | None = None
        for rank, stretch in self.stretches:
            if rank == world.rank:
                begin = (start + stretch.start - rank * share) * self.type.dtype.itemsize
                part = replace(row.type, shape=(stretch.stop - stretch.start,))
                window = replace(row, type=part, strides=part.strides, offset=row.offset + begin)
                self.own = stretch, bound.place(window, offset)

    def read(self) -> np.ndarray:
        """All of it, from the ranks that hold it."""
        whole = np.empty(self.type.size, self.type.dtype.numpy)
        if self.own is not None:
            whole[self.own[0]] = self.own[1].read()
        for rank, stretch in self.stretches:
            part = whole[stretch].view(np.uint8)
            self.world.begin("broadcast", rank, part.copy(), part)()
        return whole.reshape(self.type.shape)

    def write(self, array: np.ndarray) -> None:
        """This rank's part of it."""
        if self.own is not None:
            self.own[1].write(array.reshape(-1)[self.own[0]])


class ShardPlace(ByRank):
    """A tensor that is cut, each rank having one part. All ranks read it at the same time.

    Attributes:
        type: of the whole tensor.
    """

    def __init__(self, inner: Place, type: TensorType, shard: Shard, world: World) -> None:
        self.inner, self.type, self.shard, self.world = inner, type, shard, world

    def read(self) -> np.ndarray:
        """All of it."""
        own = np.ascontiguousarray(self.inner.read())
        found = np.empty((self.world.size, *own.shape), own.dtype)
        self.world.begin("all_gather", 0, own.reshape(-1).view(np.uint8), found.reshape(-1).view(np.uint8))()
        return self.shard.join(list(found))

    def write(self, array: np.ndarray) -> None:
        """This rank's part of it."""
        self.inner.write(np.ascontiguousarray(self.shard.take(array, self.world.rank)))


class SeedPlace(ByRank):
    """A random state, which each rank begins elsewhere, or each of several: that of the first rank is read and
    written.
    """

    def __init__(self, inner: Place, type: TensorType, number: int) -> None:
        self.inner, self.type = inner, type
        self.shift = np.uint64(number * _STRIDE % (1 << 64))

    def read(self) -> np.ndarray:
        """As the first rank has it."""
        state = self.inner.read().copy()
        state[0] -= self.shift
        return state

    def write(self, array: np.ndarray) -> None:
        """As this rank has it."""
        state = array.copy()
        state[0] += self.shift
        self.inner.write(state)


def own_parts(one: Place, other: Place) -> tuple[Place, Place] | None:
    """What a rank holds of two tensors of the same elements, where they lie alike; else both of them. None: this rank
    has nothing of them.
    """
    while isinstance(one, ShardPlace) and isinstance(other, ShardPlace):
        one, other = one.inner, other.inner
    if isinstance(one, SpreadPlace) and isinstance(other, SpreadPlace) and one.stretches == other.stretches:
        return None if one.own is None or other.own is None else (one.own[1], other.own[1])
    return one, other


def place_of(bound: Bound, program: Program, slot: Slot, offset: int, world: World) -> Place:
    """Where one of a program's tensors lies, whose value lies at `offset` of its region."""
    if slot.spread is None and slot.shard is None:
        inner = bound.place(slot.operand, offset)
        if world.size > 1 and isinstance(slot.init, RandomSeed):
            return SeedPlace(inner, slot.operand.type, world.rank % program.of_stage // slot.init.alike)
        return inner
    stored = program.stored_as[slot.operand.value]
    own, row = slot.operand, stored.init
    if slot.shard is not None:
        type = slot.shard.of(own.type)
        own = replace(own, type=type, strides=type.strides) if isinstance(row, Flat) else stored.operand
    if slot.spread is None:
        found: Place = bound.place(own, offset)
    else:
        assert isinstance(row, Flat)
        group = world.group(row.ranks, row.stride)
        found = SpreadPlace(bound, own.type, slot.spread, stored.operand, offset, group)
    if slot.shard is None:
        return found
    return ShardPlace(found, slot.operand.type, slot.shard, world.group(slot.shard.ranks, 1))

"""PyTorch's caching allocator for cards, replayed: rounding, blocks, segments.

Reference: `c10/cuda/CUDACachingAllocator.cpp` of PyTorch 2.13, with its defaults: no expandable segments, no limit to
splitting, one stream, a card that has room.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

from foreplan.base.units import align_up
from foreplan.eager.storage import Memory

ROUND = 512  # bytes: the size of a block is a multiple
SMALL = 1 << 20  # bytes: larger blocks come from the pool of large segments
SMALL_SEGMENT = 2 << 20
LARGE_SEGMENT = 20 << 20  # for blocks below
LEAST_OF_ITS_OWN = 10 << 20  # a block from here on has a segment made for it,
ROUND_LARGE = 2 << 20  # whose size is a multiple of this


@dataclass(eq=False, slots=True)
class Block:
    """A stretch of a segment, taken or free, with its neighbours."""

    address: int
    nbytes: int
    small: bool
    segment: int
    before: Block | None = None
    behind: Block | None = None
    taken: bool = False


@dataclass(frozen=True, slots=True)
class Segment:
    """Memory that was asked of the card."""

    address: int
    nbytes: int
    small: bool


@dataclass(eq=False)
class CachingAllocator:
    """The allocator's state.

    Attributes:
        allocated: bytes of taken blocks; `torch.cuda.memory_allocated`.
        reserved: bytes of segments; `torch.cuda.memory_reserved`.
    """

    base: int = 0x7F0000000000
    allocated: int = 0
    reserved: int = 0
    segments: list[Segment] = field(default_factory=list)
    _free: dict[bool, list[tuple[int, int]]] = field(default_factory=lambda: {True: [], False: []})
    _by_address: dict[int, Block] = field(default_factory=dict)

    def allocate(self, nbytes: int) -> Block:
        """A block: the smallest free one that is large enough, else one of a new segment."""
        size = max(ROUND, align_up(nbytes, ROUND))
        small = size <= SMALL
        free = self._free[small]
        place = bisect.bisect_left(free, (size, 0))
        if place < len(free):
            block = self._by_address[free.pop(place)[1]]
        else:
            block = self._grown(size, small)
        rest = block.nbytes - size
        if rest >= ROUND if small else rest > SMALL:
            other = Block(block.address + size, rest, small, block.segment, block, block.behind)
            if block.behind is not None:
                block.behind.before = other
            block.behind, block.nbytes = other, size
            self._by_address[other.address] = other
            self._put(other)
        block.taken = True
        self.allocated += block.nbytes
        return block

    def _grown(self, size: int, small: bool) -> Block:
        """The one block of a new segment."""
        nbytes = SMALL_SEGMENT if small else LARGE_SEGMENT if size < LEAST_OF_ITS_OWN else align_up(size, ROUND_LARGE)
        last = self.segments[-1] if self.segments else Segment(self.base, 0, True)
        segment = Segment(align_up(last.address + last.nbytes, ROUND_LARGE), nbytes, small)
        self.segments.append(segment)
        self.reserved += nbytes
        block = Block(segment.address, nbytes, small, len(self.segments) - 1)
        self._by_address[block.address] = block
        return block

    def free(self, block: Block) -> None:
        """Give a block back; free neighbours become one."""
        block.taken = False
        self.allocated -= block.nbytes
        for other in (block.before, block.behind):
            if other is None or other.taken:
                continue
            self._free[other.small].remove((other.nbytes, other.address))
            if other is block.before:
                del self._by_address[block.address]
                block.address, block.before = other.address, other.before
                if block.before is not None:
                    block.before.behind = block
            else:
                del self._by_address[other.address]
                block.behind = other.behind
                if block.behind is not None:
                    block.behind.before = block
            block.nbytes += other.nbytes
        self._by_address[block.address] = block
        self._put(block)

    def _put(self, block: Block) -> None:
        bisect.insort(self._free[block.small], (block.nbytes, block.address))


@dataclass(frozen=True, slots=True)
class Replayed:
    """What an allocator had after a number of events, and the most of it until then since the point before."""

    allocated: int
    reserved: int
    most_allocated: int


def replayed(memory: Memory, ends: Sequence[int]) -> tuple[Replayed, ...]:
    """The allocator's figures at points of a step as PyTorch runs it.

    Args:
        ends: the points, as numbers of events; ascending.
    """
    allocator, found, at = CachingAllocator(), [], 0
    blocks: dict[int, Block | None] = {}
    for end in ends:
        most = allocator.allocated
        for event in memory.events[at:end]:
            if event < 0:
                if (block := blocks.pop(~event)) is not None:
                    allocator.free(block)
            else:
                nbytes = memory.blocks[event].nbytes
                blocks[event] = allocator.allocate(nbytes) if nbytes else None
            most = max(most, allocator.allocated)
        at = end
        found.append(Replayed(allocator.allocated, allocator.reserved, most))
    return tuple(found)

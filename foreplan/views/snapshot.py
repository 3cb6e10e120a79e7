"""Memory snapshots in the form of `torch.cuda.memory._snapshot()`, which pytorch.org/memory_viz opens.

A snapshot is a dictionary: `segments` are memory that was asked of the card, with their blocks as they lie in the end;
`device_traces` has, for each device, every allocation and release in order. Reference: `torch/cuda/memory.py` and
`torch/cuda/_memory_viz.py` of PyTorch 2.13.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from foreplan.eager import Eager
from foreplan.eager.allocator import Block, CachingAllocator
from foreplan.units import align_up
from foreplan.views.memory import Memory

_BASE, _PAGE = 0x7F0000000000, 2 << 20
_SETTINGS = {"PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1, "expandable_segments": False}


@dataclass(frozen=True, slots=True)
class Taken:
    """A block that is taken.

    Attributes:
        name: for people.
        where: the line of the stack that says when it was taken: a number and a text.
        nbytes: of the block; `asked`: of what lies in it.
    """

    address: int
    nbytes: int
    asked: int
    name: str
    where: tuple[str, int]

    @property
    def frames(self) -> list[dict[str, Any]]:
        """The stack, as a snapshot has it."""
        return [{"name": self.name, "filename": self.where[0], "line": self.where[1]}]


@dataclass(eq=False)
class _Writer:
    """A snapshot that grows, event by event."""

    trace: list[dict[str, Any]] = field(default_factory=list)
    segments: list[tuple[int, int, bool]] = field(default_factory=list)
    taken: dict[int, Taken] = field(default_factory=dict)

    def add_segment(self, address: int, nbytes: int, small: bool) -> None:
        self.segments.append((address, nbytes, small))
        self._event("segment_alloc", address, nbytes, [])

    def take(self, block: Taken) -> None:
        self.taken[block.address] = block
        self._event("alloc", block.address, block.asked, block.frames)

    def release(self, address: int) -> None:
        block = self.taken.pop(address)
        for action in ("free_requested", "free_completed"):
            self._event(action, address, block.asked, block.frames)

    def _event(self, action: str, address: int, nbytes: int, frames: list[dict[str, Any]]) -> None:
        event = {"action": action, "addr": address, "size": nbytes, "stream": 0, "time_us": len(self.trace)}
        self.trace.append(event | {"frames": frames})

    def snapshot(self) -> dict[str, Any]:
        """The dictionary."""
        addresses = sorted(self.taken)
        found = [self._segment(*segment, addresses) for segment in self.segments]
        return {
            "segments": found,
            "device_traces": [self.trace],
            "allocator_settings": dict(_SETTINGS),
            "external_annotations": [],
        }

    def _segment(self, address: int, nbytes: int, small: bool, addresses: Sequence[int]) -> dict[str, Any]:
        taken = [self.taken[each] for each in addresses if address <= each < address + nbytes]
        blocks = list(_blocks(address, nbytes, taken))
        held = sum(block.nbytes for block in taken)
        return {
            "device": 0,
            "address": address,
            "total_size": nbytes,
            "allocated_size": held,
            "active_size": held,
            "requested_size": sum(block.asked for block in taken),
            "stream": 0,
            "segment_type": "small" if small else "large",
            "segment_pool_id": (0, 0),
            "is_expandable": False,
            "frames": [],
            "blocks": blocks,
        }


def _blocks(address: int, nbytes: int, taken: Iterable[Taken]) -> Iterator[dict[str, Any]]:
    """The blocks of a segment, free ones between those that are taken."""
    at = address
    for block in taken:
        if block.address > at:
            yield _block(at, block.address - at, 0, "inactive", [])
        yield _block(block.address, block.nbytes, block.asked, "active_allocated", block.frames)
        at = block.address + block.nbytes
    if at < address + nbytes:
        yield _block(at, address + nbytes - at, 0, "inactive", [])


def _block(address: int, nbytes: int, asked: int, state: str, frames: list[dict[str, Any]]) -> dict[str, Any]:
    return {"address": address, "size": nbytes, "requested_size": asked, "state": state, "frames": frames}


def eager_snapshot(eager: Eager) -> dict[str, Any]:
    """A step as PyTorch runs it, three times in a row, in the caching allocator of a card."""
    allocator, writer, memory = CachingAllocator(), _Writer(), eager.memory
    ends = iter(eager.phases)
    phase, blocks = next(ends), dict[int, Block]()
    for i, event in enumerate(memory.events):
        while i >= phase.end:
            phase = next(ends)
        if event < 0:
            if (block := blocks.pop(~event, None)) is not None:
                writer.release(block.address)
                allocator.free(block)
            continue
        made = memory.blocks[event]
        if not made.nbytes:
            continue
        known = len(allocator.segments)
        block = blocks[event] = allocator.allocate(made.nbytes)
        for segment in allocator.segments[known:]:
            writer.add_segment(segment.address, segment.nbytes, segment.small)
        writer.take(Taken(block.address, block.nbytes, made.nbytes, made.name, (phase.name, phase.iteration)))
    return writer.snapshot()


def plan_snapshot(memory: Memory) -> dict[str, Any]:
    """A plan: a segment for each of its regions on the device, and each buffer as a block of its own, from the
    instruction that writes it to the last one that reads it. The line of a block is the number of that instruction.
    """
    writer, base = _Writer(), _BASE
    bases = {}
    for height, region in zip(memory.plan.heights, memory.problem.regions):
        if region.on_device and height:
            bases[region.name] = base
            writer.add_segment(base, height, False)
            base = align_up(base + height, _PAGE)
    last = max(1, len(memory.plan.steps))
    begins: dict[int, list[Taken]] = {}
    ends: dict[int, list[int]] = {}
    for buffer in memory.buffers:
        if buffer.region not in bases or not buffer.nbytes or buffer.lower >= buffer.upper:
            continue
        address = bases[buffer.region] + buffer.offset
        where = (buffer.producer or "there before the step", buffer.lower)
        begins.setdefault(buffer.lower, []).append(Taken(address, buffer.nbytes, buffer.nbytes, buffer.name, where))
        if buffer.upper < last:
            ends.setdefault(buffer.upper, []).append(address)
    for step in range(last):
        for address in ends.get(step, ()):
            writer.release(address)
        for block in begins.get(step, ()):
            writer.take(block)
    return writer.snapshot()


def snapshot_bytes(snapshot: dict[str, Any]) -> bytes:
    """A snapshot as PyTorch writes its own: a pickle. Equal snapshots give equal bytes."""
    return pickle.dumps(_shared(snapshot, {}), protocol=4)


def _shared(value: Any, texts: dict[str, str]) -> Any:
    """The same value, with equal texts as one object: a pickle writes an object once."""
    if isinstance(value, dict):
        return {_shared(key, texts): _shared(each, texts) for key, each in value.items()}
    if isinstance(value, list):
        return [_shared(each, texts) for each in value]
    return texts.setdefault(value, value) if isinstance(value, str) else value

"""Memory snapshots in the form of `torch.cuda.memory._snapshot()`, which pytorch.org/memory_viz opens.

A snapshot is a dictionary: `segments` are memory that was asked of the card, with their blocks as they lie in the end;
`device_traces` has, for each device, every allocation and release in order. Reference: `torch/cuda/memory.py`,
`torch/cuda/_memory_viz.py` of PyTorch 2.13, and the page's `MemoryViz.js` and `process_alloc_data.js`.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from foreplan.eager import Eager
from foreplan.eager.allocator import Block, CachingAllocator
from foreplan.report.memory import Memory, NamedBuffer, printable
from foreplan.report.timeline import Timeline
from foreplan.version import VERSION

_BASE = 0x7F00_0000_0000
_SPAN = 1 << 32
_WRITTEN_BY = {"written by": f"foreplan {VERSION}"}
_ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1, "expandable_segments": False}
_NO_TIME = {"time": "one microsecond an event: no time is predicted"}

# The page colours by category, and names the categories, as soon as one event has one. It fails where none is
# `unknown` (`annotate_snapshot` in MemoryViz.js), which it takes for what has none.
_SEGMENTS, _UNKNOWN = "segments", "unknown"


@dataclass(frozen=True, slots=True)
class Frame:
    """A line of a stack. The page shows `file:line:name`."""

    name: str
    file: str
    line: int

    @property
    def entry(self) -> dict[str, Any]:
        """The line as a snapshot has it."""
        return {"name": printable(self.name), "filename": printable(self.file), "line": self.line}


@dataclass(frozen=True, slots=True)
class AllocatedBlock:
    """A block that is taken.

    Attributes:
        nbytes: of the block; `asked`: of what lies in it.
        category: gives its colour.
        frames: the stack, innermost first; the first one names what lies in the block.
        facts: what the page shows above the stack.
    """

    address: int
    nbytes: int
    asked: int
    category: str
    frames: tuple[Frame, ...]
    facts: dict[str, str] = field(default_factory=dict)


@dataclass(eq=False)
class _Writer:
    """A snapshot that grows, event by event; `now` is the time of the next one in microseconds."""

    trace: list[dict[str, Any]] = field(default_factory=list)
    segments: list[tuple[int, int, bool, tuple[Frame, ...]]] = field(default_factory=list)
    taken: dict[int, AllocatedBlock] = field(default_factory=dict)
    now: int = 0

    def add_segment(self, address: int, nbytes: int, small: bool, frames: tuple[Frame, ...]) -> None:
        self.segments.append((address, nbytes, small, frames))
        self._event("segment_alloc", address, nbytes, frames, category=_SEGMENTS)

    def take(self, block: AllocatedBlock) -> None:
        self.taken[block.address] = block
        about = {"user_metadata": block.facts} if block.facts else {}
        self._event("alloc", block.address, block.asked, block.frames, category=block.category, **about)

    def release(self, address: int) -> None:
        block = self.taken.pop(address)
        for action in ("free_requested", "free_completed"):
            self._event(action, address, block.asked, block.frames)

    def _event(self, action: str, address: int, nbytes: int, frames: Sequence[Frame], **more: Any) -> None:
        event = {"action": action, "addr": address, "size": nbytes, "stream": 0, "time_us": self.now}
        self.trace.append(event | {"frames": _entries(frames)} | more)

    def snapshot(self, settings: dict[str, Any], end: Frame) -> dict[str, Any]:
        """The dictionary. PyTorch, too, records the snapshot itself as the last event."""
        self._event("snapshot", 0, 0, (end,), category=_UNKNOWN)
        addresses = sorted(self.taken)
        return {
            "segments": [self._segment(*segment, addresses) for segment in self.segments],
            "device_traces": [self.trace],
            "allocator_settings": _WRITTEN_BY | settings,
            "external_annotations": [],
        }

    def _segment(
        self, address: int, nbytes: int, small: bool, frames: tuple[Frame, ...], addresses: Sequence[int]
    ) -> dict[str, Any]:
        taken = [self.taken[each] for each in addresses if address <= each < address + nbytes]
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
            "frames": _entries(frames),
            "blocks": list(_blocks(address, nbytes, taken)),
        }


def _entries(frames: Iterable[Frame]) -> list[dict[str, Any]]:
    return [frame.entry for frame in frames]


def _blocks(address: int, nbytes: int, taken: Iterable[AllocatedBlock]) -> Iterator[dict[str, Any]]:
    """The blocks of a segment, free ones between those that are taken."""
    at = address
    for block in taken:
        if block.address > at:
            yield _block(at, block.address - at, 0, "inactive")
        about = {"user_metadata": block.facts} if block.facts else {}
        yield _block(block.address, block.nbytes, block.asked, "active_allocated", block.frames) | about
        at = block.address + block.nbytes
    if at < address + nbytes:
        yield _block(at, address + nbytes - at, 0, "inactive")


def _block(address: int, nbytes: int, asked: int, state: str, frames: Sequence[Frame] = ()) -> dict[str, Any]:
    return {"address": address, "size": nbytes, "requested_size": asked, "state": state, "frames": _entries(frames)}


def eager_snapshot(eager: Eager) -> dict[str, Any]:
    """A step as PyTorch runs it, three times in a row, in the caching allocator of a card."""
    allocator, writer, memory = CachingAllocator(), _Writer(), eager.memory
    ends = iter(eager.phases)
    phase, blocks = next(ends), dict[int, Block]()
    for i, event in enumerate(memory.events):
        writer.now = i
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
        frames = (Frame(made.name, phase.name, phase.iteration),)
        for segment in allocator.segments[known:]:
            writer.add_segment(segment.address, segment.nbytes, segment.small, frames)
        writer.take(AllocatedBlock(block.address, block.nbytes, made.nbytes, str(made.use), frames))
    return writer.snapshot(_ALLOCATOR | _NO_TIME, Frame("the last step has ended", phase.name, phase.iteration))


def plan_snapshot(memory: Memory, title: str) -> dict[str, Any]:
    """A plan: a segment for each of its regions on the device, and each buffer as a block of its own, from the
    instruction that writes it to the last one that reads it, in predicted time. The last digits of an address are the
    offset in the region, and the line of a stack is the number of the instruction.
    """
    writer, bases = _Writer(), _bases(memory)
    heights = {region.name: height for region, height in zip(memory.problem.regions, memory.plan.heights)}
    for name, base in bases.items():
        writer.add_segment(base, heights[name], False, (Frame(f"region {name}", title, 0),))
    last = max(1, len(memory.plan.steps))
    begins: dict[int, list[AllocatedBlock]] = {}
    ends: dict[int, list[int]] = {}
    line = Timeline.of(memory.problem, memory.plan)
    edges, clock = line.clock
    for buffer in memory.buffers:
        if buffer.region not in bases or not buffer.nbytes or buffer.lower >= buffer.upper:
            continue
        address = bases[buffer.region] + buffer.offset
        category = buffer.category.replace("_", " ")
        facts = _facts(buffer, line)
        frames = tuple(_frames(buffer, memory))
        begins.setdefault(buffer.lower, []).append(
            AllocatedBlock(address, buffer.nbytes, buffer.nbytes, category, frames, facts)
        )
        if buffer.upper < last:
            ends.setdefault(buffer.upper, []).append(address)
    for step in range(last):
        writer.now = int(edges[step]) // 1000
        for address in ends.get(step, ()):
            writer.release(address)
        for block in begins.get(step, ()):
            writer.take(block)
    writer.now = int(edges[-1]) // 1000
    told = {
        "plan of": printable(title),
        "instructions": len(memory.plan.steps),
        "arena bytes": memory.arena,
        "lower bound bytes": memory.lower_bound,
        "peak at instruction": memory.peak_step,
        "time": clock,
    }
    return writer.snapshot(told, Frame("the step has ended", title, len(memory.plan.steps)))


def _bases(memory: Memory) -> dict[str, int]:
    """The address of each region on the device that holds anything."""
    span = _SPAN
    while span < max(memory.plan.heights, default=0):
        span *= 2
    heights = zip(memory.plan.heights, memory.problem.regions)
    names = [region.name for height, region in heights if region.on_device and height]
    return {name: _BASE + i * span for i, name in enumerate(names)}


def _frames(buffer: NamedBuffer, memory: Memory) -> Iterator[Frame]:
    """The instruction that writes a buffer, and the line of the model that it comes from."""
    if buffer.written != buffer.lower:
        yield Frame(buffer.name, "there before the step", 0)
        return
    yield Frame(buffer.name, buffer.producer, buffer.written)
    calls = getattr(memory.problem, "calls", ())
    source = calls[memory.plan.steps[buffer.written].action].source if calls else ""
    if found := re.fullmatch(r"(.+):(\d+)", source):
        yield Frame("model", found[1], int(found[2]))


def _facts(buffer: NamedBuffer, line: Timeline) -> dict[str, str]:
    facts = {"shape": buffer.shape} if buffer.shape else {}
    if buffer.written == buffer.lower:
        facts["phase"] = str(line.phases[buffer.written])
    facts["alive"] = f"instructions {buffer.lower} to {buffer.upper - 1}; the step has {len(line.phases)}"
    if buffer.readers:
        more = f", the last of {len(buffer.readers)}" if len(buffer.readers) > 1 else ""
        facts["read by"] = f"instruction {buffer.readers[-1]}{more}"
    facts["place"] = f"{buffer.region}, offset {buffer.offset:,}"
    return facts


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

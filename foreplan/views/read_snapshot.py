"""Real snapshots of PyTorch's, read safely: peak, what was alive there, and how well the allocator used its memory.

A pickle is code. What is read holds dictionaries, lists, tuples, text and numbers (`plain_pickle`). Time and memory
grow with the file alone: lists that stand in it many times count each time, stacks are looked at once, and whatever is
hashed is text or a number.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from foreplan.base.arguments import path_of
from foreplan.base.errors import UsageError
from foreplan.base.untrusted import contents
from foreplan.views.plain_pickle import NotPlain, read_plain

_UNKNOWN = "(allocated before the record began)"
_LEAST = 16  # bytes of a file for each event in it, at least; PyTorch writes some sixty or more
_FREE = 1024  # events that any file may have
_LONGEST = 4096  # letters of a file's name


@dataclass(frozen=True, slots=True)
class PeakAllocation:
    """An allocation that is alive at the peak: where it was made, and its bytes."""

    name: str
    nbytes: int


@dataclass(frozen=True)
class Recorded:
    """What a snapshot says of one device.

    Attributes:
        peak: the most bytes that were allocated.
        reserved: bytes of segments at that moment.
        allocations: how many were recorded.
        alive: what was allocated at the peak, the largest first.
    """

    peak: int
    reserved: int
    allocations: int
    alive: tuple[PeakAllocation, ...]


def read_snapshot(path: str | Path) -> Recorded:
    """The device with the highest peak of a snapshot that `torch.cuda.memory._dump_snapshot` wrote.

    Raises:
        UsageError: the file cannot be read, is no snapshot, holds more than plain data, or recorded no allocation.
    """
    name = path_of("read_snapshot", path)
    try:
        data = contents(name, "snapshot")
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {error.strerror}") from None
    try:
        found = _devices(read_plain(data), len(data))
    except NotPlain as error:
        raise UsageError(f"{name} is refused: {error}; a snapshot of PyTorch's holds plain data only") from None
    except Exception as error:  # other data than a snapshot has
        raise UsageError(
            f"{name} is no snapshot of PyTorch's memory ({type(error).__name__}: {str(error)[:80]}); write one with "
            "torch.cuda.memory._record_memory_history() and torch.cuda.memory._dump_snapshot(path)"
        ) from None
    best = max(found, key=lambda each: each.peak, default=None)
    if best is None or not best.allocations:
        raise UsageError(
            f"{name} records no allocation: call torch.cuda.memory._record_memory_history() before the step"
        )
    return best


def _devices(snapshot: dict[str, Any], size: int) -> list[Recorded]:
    """What a snapshot says of each device.

    Args:
        size: of its file; the same list may stand in a pickle many times, so that events are counted.
    """
    traces = snapshot["device_traces"]
    if len(traces) + sum(map(len, traces)) > size // _LEAST + _FREE:
        raise NotPlain(f"it lists more events than it has room for, {_LEAST} bytes each")
    segments: dict[int, list[dict[str, Any]]] = {}
    for each in snapshot["segments"]:
        segments.setdefault(_whole(each.get("device", 0)), []).append(each)
    places = _Places()
    return [_recorded(trace, segments.get(device, []), places) for device, trace in enumerate(traces)]


def _recorded(trace: list[dict[str, Any]], segments: list[dict[str, Any]], places: _Places) -> Recorded:
    allocated = sum(_whole(each.get("requested_size", each["allocated_size"])) for each in segments)
    reserved = sum(_whole(each["total_size"]) for each in segments)
    for event in trace:  # what there was before the first event
        allocated -= _SIGNS.get(_action(event), 0) * _whole(event["size"])
        reserved -= _SEGMENTS.get(_action(event), 0) * _whole(event["size"])
    start, peak, at = (allocated, reserved), (allocated, reserved), 0
    for i, event in enumerate(trace):
        allocated += _SIGNS.get(_action(event), 0) * _whole(event["size"])
        reserved += _SEGMENTS.get(_action(event), 0) * _whole(event["size"])
        if allocated > peak[0]:
            peak, at = (allocated, reserved), i + 1
    alive = _alive(trace[:at], places)
    rest = peak[0] - sum(each.nbytes for each in alive)
    if rest > 0 and start[0] > 0:
        alive.append(PeakAllocation(_UNKNOWN, rest))
    count = sum(event["action"] == "alloc" for event in trace)
    return Recorded(*peak, count, tuple(sorted(alive, key=lambda each: -each.nbytes)))


_SIGNS = {"alloc": 1, "free_completed": -1}
_SEGMENTS = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


def _whole(value: object) -> int:
    """A whole number; nothing else is one, whatever `int` would make of it."""
    if type(value) is not int:
        raise TypeError(f"a {type(value).__name__} where a whole number stands")
    return value


def _action(event: dict[str, Any]) -> str:
    """What an event says that happened: text, since the hash of nested tuples takes exponential time."""
    action = event["action"]
    if type(action) is not str:
        raise TypeError(f"a {type(action).__name__} where an action stands")
    return action


def _alive(trace: list[dict[str, Any]], places: _Places) -> list[PeakAllocation]:
    """What has been allocated and not released, with the innermost line of Python that allocated it."""
    found: dict[int, PeakAllocation] = {}
    for event in trace:
        if event["action"] == "alloc":
            found[_whole(event["addr"])] = PeakAllocation(places.of(event.get("frames") or []), _whole(event["size"]))
        elif event["action"] == "free_completed":
            found.pop(_whole(event["addr"]), None)
    return list(found.values())


@dataclass
class _Places:
    """Where stacks are, each told once: many events share one.

    Attributes:
        known: by the list of its frames, and by its frame.
    """

    known: dict[int, str] = field(default_factory=dict)

    def of(self, frames: list[dict[str, Any]]) -> str:
        """The innermost line of Python, or of anything else."""
        if id(frames) not in self.known:
            own = next((frame for frame in frames if frame["filename"].endswith(".py")), frames[0] if frames else None)
            self.known[id(frames)] = "(no stack was recorded)" if own is None else self._of_frame(own)
        return self.known[id(frames)]

    def _of_frame(self, frame: dict[str, Any]) -> str:
        if id(frame) not in self.known:
            name, file, line = frame["name"], frame["filename"], frame["line"]
            if len(file) > _LONGEST:
                raise NotPlain(f"the name of a file in it has more than {_LONGEST} letters")
            self.known[id(frame)] = f"{name:.{_LONGEST}} ({PurePosixPath(file).name}:{_whole(line)})"
        return self.known[id(frame)]

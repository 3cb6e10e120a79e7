"""Real snapshots of PyTorch's, read safely: peak, what was alive there, and how well the allocator used its memory.

A pickle is code. So what is read may hold dictionaries, lists, tuples, text and numbers; anything that would have to be
imported is refused before it is.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foreplan.arguments import path_of
from foreplan.errors import UsageError

_UNKNOWN = "(allocated before the record began)"


class _Plain(pickle.Unpickler):
    """An unpickler of plain containers."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it would import {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to something outside it")


@dataclass(frozen=True, slots=True)
class Alive:
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
    alive: tuple[Alive, ...]


def read_snapshot(path: str | Path) -> Recorded:
    """The device with the highest peak of a snapshot that `torch.cuda.memory._dump_snapshot` wrote.

    Raises:
        UsageError: the file cannot be read, is no snapshot, holds more than plain data, or recorded no allocation.
    """
    name = path_of("read_snapshot", path)
    try:
        data = Path(name).read_bytes()
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {error.strerror}") from None
    try:
        snapshot = _Plain(io.BytesIO(data)).load()
        found = [_recorded(snapshot, device) for device in range(len(snapshot["device_traces"]))]
    except pickle.UnpicklingError as error:
        raise UsageError(f"{name} is refused: {error}; a snapshot of PyTorch's holds plain data only") from None
    except Exception as error:  # a damaged pickle raises almost anything
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


def _recorded(snapshot: dict[str, Any], device: int) -> Recorded:
    trace = snapshot["device_traces"][device]
    segments = [each for each in snapshot["segments"] if each.get("device", 0) == device]
    allocated = sum(int(each.get("requested_size", each["allocated_size"])) for each in segments)
    reserved = sum(int(each["total_size"]) for each in segments)
    for event in trace:  # what there was before the first event
        allocated -= _SIGNS.get(event["action"], 0) * int(event["size"])
        reserved -= _SEGMENTS.get(event["action"], 0) * int(event["size"])
    start, peak, at = (allocated, reserved), (allocated, reserved), 0
    for i, event in enumerate(trace):
        allocated += _SIGNS.get(event["action"], 0) * int(event["size"])
        reserved += _SEGMENTS.get(event["action"], 0) * int(event["size"])
        if allocated > peak[0]:
            peak, at = (allocated, reserved), i + 1
    alive = _alive(trace[:at])
    rest = peak[0] - sum(each.nbytes for each in alive)
    if rest > 0 and start[0] > 0:
        alive.append(Alive(_UNKNOWN, rest))
    count = sum(event["action"] == "alloc" for event in trace)
    return Recorded(*peak, count, tuple(sorted(alive, key=lambda each: -each.nbytes)))


_SIGNS = {"alloc": 1, "free_completed": -1}
_SEGMENTS = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


def _alive(trace: list[dict[str, Any]]) -> list[Alive]:
    """What has been allocated and not released, with the innermost line of Python that allocated it."""
    found: dict[int, Alive] = {}
    for event in trace:
        if event["action"] == "alloc":
            found[event["addr"]] = Alive(_place(event.get("frames") or []), int(event["size"]))
        elif event["action"] == "free_completed":
            found.pop(event["addr"], None)
    return list(found.values())


def _place(frames: list[dict[str, Any]]) -> str:
    own = next((frame for frame in frames if str(frame["filename"]).endswith(".py")), frames[0] if frames else None)
    if own is None:
        return "(no stack was recorded)"
    return f"{own['name']} ({Path(str(own['filename'])).name}:{own['line']})"

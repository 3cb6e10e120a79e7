"""How much more host memory this process can take before the operating system ends it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from foreplan.base.errors import DoesNotFitError
from foreplan.base.units import format_bytes
from foreplan.planner.plan import Plan

_V1 = {
    "limit": "memory.limit_in_bytes",
    "used": "memory.usage_in_bytes",
    "cache": ("total_inactive_file", "total_active_file"),
}
_V2 = {"limit": "memory.max", "used": "memory.current", "cache": ("inactive_file", "active_file", "slab_reclaimable")}


@dataclass(frozen=True)
class Room:
    """Memory that is still available.

    Attributes:
        nbytes: how much; memory that holds copies of files counts, as the kernel drops these first.
        total: the memory in all.
        source: where the figure comes from, for people.
    """

    nbytes: int
    total: int
    source: str


def check_room(nbytes: int, plan: Plan) -> None:
    """Check the bytes that a session would allocate against the memory available; if that is not known, all is allowed.

    Linux gives addresses for more memory than there is, and ends the process when it writes there.

    Raises:
        DoesNotFitError: it is more.
    """
    found = room()
    if found is None or nbytes <= found.nbytes:
        return
    raise DoesNotFitError(
        f"a session takes {format_bytes(nbytes)} of host memory, and {format_bytes(found.nbytes)} of "
        f"{format_bytes(found.total)} are available ({found.source}): compile with a budget below that "
        f"(budget=, --budget), take a smaller batch, or free some memory",
        needed=nbytes,
        capacity=found.nbytes,
        lower_bound=plan.lower_bound_bytes,
        plan=plan,
        advice=(f"a budget below {format_bytes(found.nbytes)} (budget=, --budget)",),
    )


def give_back() -> None:
    """Return to the system what planning and binding have freed, which the C library keeps for later (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def room(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> Room | None:
    """The least of the machine's available memory, free swap included, and of the memory that each control group of
    this process leaves; None if nothing is known.

    Args:
        proc, cgroups: the kernel's folders with these figures.

    Source: proc_meminfo(5), cgroups(7); Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst of Linux.
    """
    machine = _numbers(proc / "meminfo", scale=1024)
    swap = machine.get("SwapFree", 0)
    found = []
    if "MemAvailable" in machine:
        total = machine.get("MemTotal", 0) + machine.get("SwapTotal", 0)
        found.append(Room(machine["MemAvailable"] + swap, total, f"{proc / 'meminfo'}, MemAvailable and SwapFree"))
    for folder, names in _folders(proc, cgroups):
        limit, used = (_number(folder / str(names[which])) for which in ("limit", "used"))
        if limit is None or used is None or limit >= 1 << 62:  # version 1 writes a huge number for `no limit`
            continue
        stat = _numbers(folder / "memory.stat")
        cache = min(used, sum(stat.get(name, 0) for name in names["cache"]))
        more = _swap(folder, swap)
        found.append(
            Room(max(0, limit - used + cache + more), limit + more, f"the limit in {folder / str(names['limit'])}")
        )
    return min(found, key=lambda each: each.nbytes, default=None)


def _folders(proc: Path, cgroups: Path) -> Iterator[tuple[Path, Mapping[str, str | Sequence[str]]]]:
    """The control groups that hold this process, each within the next; in a container, without the outer ones."""
    for line in _text(proc / "self" / "cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            root, names = (cgroups / "unified" if (cgroups / "unified").is_dir() else cgroups), _V2
        elif "memory" in controllers.split(","):
            root, names = cgroups / "memory", _V1
        else:
            continue
        inner = PurePosixPath("/".join(part for part in path.split("/") if part not in ("", ".", "..")))
        for each in (inner, *inner.parents) if inner.parts else (inner,):
            yield root / each, names


def _swap(folder: Path, free: int) -> int:
    """How much of the free swap a control group may take."""
    limit, used = _number(folder / "memory.swap.max"), _number(folder / "memory.swap.current")
    if limit is not None and used is not None:
        return min(free, max(0, limit - used))
    both, own = _number(folder / "memory.memsw.limit_in_bytes"), _number(folder / "memory.limit_in_bytes")
    return free if both is None or own is None else min(free, max(0, both - own))


def _number(file: Path) -> int | None:
    """The number in a file; None for `max`, or without the file."""
    text = _text(file).strip()
    return int(text) if text.isascii() and text.isdigit() else None


def _numbers(file: Path, scale: int = 1) -> dict[str, int]:
    """Lines such as `MemFree:  123 kB` or `active_file 123`."""
    lines = (line.replace(":", " ").split() for line in _text(file).splitlines())
    return {words[0]: int(words[1]) * scale for words in lines if len(words) > 1 and words[1].isdigit()}


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""

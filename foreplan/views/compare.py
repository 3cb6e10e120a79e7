"""A real snapshot of PyTorch's memory beside a plan."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from foreplan.base.units import format_bytes
from foreplan.report.memory import Memory
from foreplan.views.read_snapshot import Recorded

_LARGEST = 10


@dataclass(frozen=True)
class Comparison:
    """What PyTorch did, and what the plan does.

    Attributes:
        recorded: of the snapshot.
        memory: of the plan.
    """

    recorded: Recorded
    memory: Memory

    @property
    def figures(self) -> dict[str, tuple[int, int]]:
        """Of both: bytes allocated at the peak, bytes reserved for that, and the number of allocations in a step."""
        memory, recorded = self.memory, self.recorded
        return {
            "allocated_bytes": (recorded.peak, int(memory.live[memory.peak_step]) if len(memory.live) else 0),
            "reserved_bytes": (recorded.reserved, memory.arena),
            "allocations": (recorded.allocations, 1),
        }

    def as_json(self) -> dict[str, Any]:
        """For programs: exact integers."""
        found: dict[str, Any] = {name: {"pytorch": a, "plan": b} for name, (a, b) in self.figures.items()}
        alive = [asdict(each) for each in self.recorded.alive[:_LARGEST]]
        largest = [{"name": each.name, "nbytes": each.nbytes} for each in self.memory.largest(_LARGEST)]
        return found | {"alive_at_peak": {"pytorch": alive, "plan": largest}}

    def __str__(self) -> str:
        (a, b), (c, d), (n, m) = self.figures.values()
        lines = [
            f"{'':<28}{'PyTorch':>14}{'plan':>14}",
            f"{'allocated at the peak':<28}{format_bytes(a):>14}{format_bytes(b):>14}",
            f"{'reserved then':<28}{format_bytes(c):>14}{format_bytes(d):>14}",
            f"{'reserved and not allocated':<28}{_share(a, c):>14}{_share(b, d):>14}",
            f"{'allocations':<28}{n:>14,}{m:>14,}",
        ]
        recorded = [(each.name, each.nbytes) for each in self.recorded.alive[:_LARGEST]]
        planned = [(each.name, each.nbytes) for each in self.memory.largest(_LARGEST)]
        for title, rows in (("PyTorch", recorded), ("the plan", planned)):
            lines += ["", f"alive at the peak of {title}, the largest:", ""]
            lines += [f"  {format_bytes(nbytes):>12}  {name}" for name, nbytes in rows]
        return "\n".join(lines) + "\n"


def _share(allocated: int, reserved: int) -> str:
    return f"{1 - allocated / reserved:.1%}" if reserved else "-"

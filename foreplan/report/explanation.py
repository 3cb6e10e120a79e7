"""Why a step needs the memory that it needs, and what would change that, in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from foreplan.base.units import format_bytes
from foreplan.graph import Graph
from foreplan.planner import Stages
from foreplan.report.memory import Memory
from foreplan.report.peak_words import PeakBuffer, peak_words
from foreplan.report.timeline import Timeline

Rebuild = Callable[[int], Graph]


@dataclass(frozen=True)
class Change:
    """One change, and what it brings.

    Attributes:
        name: what is changed, for people.
        how: the flags of the command line that ask for it.
        arena_bytes: height of the arena then; None: it cannot be done.
        seconds_ratio: predicted time for a sample then, over the time now, less 1; None where no time is predicted.
        note: why it cannot be done; else empty.
    """

    name: str
    how: str
    arena_bytes: int | None
    seconds_ratio: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Explanation:
    """Why a step needs the memory that it needs.

    Attributes:
        memory: of the step; of one in two halves, that of the half that needs more.
        timeline: what its instructions are.
        held: the largest things alive at the peak.
        stages: what the planner has done already.
        changes: what else could be done, and what it brings.
    """

    memory: Memory
    timeline: Timeline
    held: tuple[PeakBuffer, ...]
    stages: Stages
    changes: tuple[Change, ...]

    @property
    def words(self) -> tuple[str, ...]:
        """Where the peak is and what makes it, in sentences."""
        return peak_words(self.memory, self.timeline)

    def to_json(self) -> dict[str, Any]:
        """The same for programs; sizes in bytes."""
        peak = self.memory.peak_step
        held = [
            {"name": each.buffer.name, "nbytes": each.buffer.nbytes, "category": str(each.buffer.category)}
            | {"shape": each.buffer.shape, "since": each.since, "waits": each.waits}
            for each in self.held
        ]
        return {
            "words": list(self.words),
            "arena_bytes": self.memory.arena,
            "peak_step": peak,
            "peak_action": self.memory.action_at(peak),
            "peak_phase": str(self.timeline.phases[peak]) if self.timeline.phases else None,
            "held": held,
            **asdict(self.stages),
            "changes": [asdict(each) for each in self.changes],
        }

    def __str__(self) -> str:
        parts = ["\n".join(self.words)]
        if self.held:
            parts.append("\n".join(["The largest things there:", "", *_held_lines(self.held)]))
        parts.append("\n".join(["What the planner has done:", "", *_stage_lines(self)]))
        if self.changes:
            lines = ["What would change it (each line is computed, none adds to another):", ""]
            parts.append("\n".join([*lines, *_change_lines(self)]))
        return "\n\n".join(parts) + "\n"


def _held_lines(held: tuple[PeakBuffer, ...]) -> Iterator[str]:
    for each in held:
        shape = f" {each.buffer.shape}" if each.buffer.shape else ""
        yield f"  {format_bytes(each.buffer.nbytes):>12}  {each.buffer.name}{shape}"
        yield f"{'':16}{each.since}"
        yield f"{'':16}{each.waits}"


def _stage_lines(told: Explanation) -> Iterator[str]:
    """One row per stage: bytes that live at its peak, the arena, what it changed, how."""
    yield f"  {'after':<14}{'live':>12}{'arena':>12}{'change':>9}"
    before = 0
    for stage in told.stages.stages:
        change = f"{stage.arena_bytes / before - 1:+.1%}" if before else ""
        sizes = f"{format_bytes(stage.live_bytes):>12}{format_bytes(stage.arena_bytes):>12}"
        yield f"  {stage.name:<14}{sizes}{change:>9}  {stage.detail}"
        before = stage.arena_bytes
    if told.stages.each_once_bytes:
        yield f"  No order without recomputation needs less than {format_bytes(told.stages.each_once_bytes)}."
    if (bound := told.memory.order_lower_bound) is not None:
        yield f"  No schedule at all needs less than {format_bytes(bound)}."


def _change_lines(told: Explanation) -> Iterator[str]:
    rows = [("", "arena", "change", "time a sample", "")]
    for each in told.changes:
        if each.arena_bytes is None:
            rows.append((each.name, "cannot be", "", "", each.note))
            continue
        change = f"{each.arena_bytes / told.memory.arena - 1:+.1%}" if told.memory.arena else ""
        time = "" if each.seconds_ratio is None else f"{each.seconds_ratio:+.1%}"
        rows.append((each.name, format_bytes(each.arena_bytes), change, time, each.how))
    width = max(len(row[0]) for row in rows)
    for name, arena, change, time, how in rows:
        yield f"  {name:<{width}}{arena:>13}{change:>9}{time:>15}  {how}".rstrip()

"""A step as eager PyTorch runs it beside the plan of the same step, phase by phase."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from foreplan.eager import Eager
from foreplan.lower.program import Program
from foreplan.planner import Plan
from foreplan.planner.problem import Role
from foreplan.units import format_bytes
from foreplan.views.memory import Memory

_TITLES = {
    "inputs": "after the inputs",
    "model": "after the model",
    "forward": "forward",
    "backward": "backward",
    "step": "optimizer step",
}


@dataclass(frozen=True)
class Row:
    """Bytes after one phase, and the most within it; None: the plan has no such phase.

    Attributes:
        phase: inputs, model, forward, backward or step.
        iteration: of the loop, from 1; 0 before it.
        live, most: of PyTorch's live tensors.
        allocated, reserved: by the caching allocator of a card.
        planned, planned_most: alive in the plan.
    """

    phase: str
    iteration: int
    live: int
    most: int
    allocated: int | None
    reserved: int | None
    planned: int | None
    planned_most: int | None


@dataclass(frozen=True)
class Beside:
    """PyTorch's step and the plan.

    Attributes:
        eager: the step as PyTorch runs it.
        program, plan: the same step, planned.
    """

    eager: Eager
    program: Program
    plan: Plan

    @cached_property
    def ours(self) -> dict[str, tuple[int, int]]:
        """Of each phase of the plan: bytes alive at its end, and the most within it. Updates are part of backward."""
        memory, values = Memory(self.program, self.plan), self.program.values
        inputs = sum(value.nbytes for value in values if value.role is Role.INPUT)
        kept = memory.persistent
        found = {"inputs": (inputs, inputs), "model": (inputs + kept, inputs + kept)}
        live = [int(nbytes) for nbytes in memory.live] or [kept]
        end = self._forward_end
        found["forward"] = (live[end - 1], max(live[:end]))
        if self.program.loss is not None:
            found["backward"] = (kept, max(live[end:], default=kept))
            found["step"] = (kept, kept)
        return found

    @property
    def _forward_end(self) -> int:
        """The number of instructions of the forward pass: up to the one that gives the loss."""
        if self.program.loss is None:
            return max(1, len(self.plan.steps))
        makers = set(self.program.producers[self.program.loss.operand.value])
        return next((i + 1 for i, step in enumerate(self.plan.steps) if step.action in makers), 1)

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """All phases of PyTorch's loop."""
        found = []
        for i, phase in enumerate(self.eager.phases):
            card = self.eager.replayed[i] if self.eager.cuda else None
            planned = self.ours.get(phase.name, (None, None))
            allocator = (None, None) if card is None else (card.allocated, card.reserved)
            found.append(Row(phase.name, phase.iteration, phase.live, phase.most, *allocator, *planned))
        return tuple(found)

    def as_json(self) -> dict[str, Any]:
        """The same for programs, in bytes."""
        variant, largest = asdict(self.eager.variant), self.eager.largest_workspace
        return {
            "device": "cuda" if self.eager.cuda else "cpu",
            "variant": variant,
            "peak_bytes": self.eager.peak,
            "largest_workspace": None if largest is None else {"of": largest.name, "bytes": largest.nbytes},
            "planned_peak_bytes": self.plan.arena_bytes,
            "phases": [asdict(row) for row in self.rows],
            "notes": list(self.eager.notes),
        }

    def __str__(self) -> str:
        unit = "MiB" if self.eager.peak >= 10 << 20 else "KiB"
        lines = [_line([unit, "PyTorch", "most", *(["reserved"] if self.eager.cuda else []), "foreplan", "most"])]
        before = 0
        for row in self.rows:
            if row.iteration != before:
                lines.append(f"step {row.iteration}")
                before = row.iteration
            cells = [row.live, row.most, *([row.reserved] if self.eager.cuda else []), row.planned, row.planned_most]
            name = f"{'  ' if row.iteration else ''}{_TITLES[row.phase]}"
            lines.append(_line([name, *(_number(cell, unit) for cell in cells)]))
        largest = self.eager.largest_workspace
        ratio = self.eager.peak / max(1, self.plan.arena_bytes)
        lines += [
            "",
            f"peak of PyTorch's live tensors {format_bytes(self.eager.peak)}, "
            f"of the plan's arena {format_bytes(self.plan.arena_bytes)}: {ratio:.2f} times as much",
            *([] if largest is None else [f"largest {largest.name}, {format_bytes(largest.nbytes)}"]),
            *(f"note: {note}" for note in self.eager.notes),
        ]
        return "\n".join(lines) + "\n"


def _number(nbytes: int | None, unit: str) -> str:
    return "" if nbytes is None else f"{nbytes / (1 << 20 if unit == 'MiB' else 1 << 10):,.1f}"


def _line(cells: list[str]) -> str:
    return (f"{cells[0]:<18}" + "".join(f"{cell:>13}" for cell in cells[1:])).rstrip()

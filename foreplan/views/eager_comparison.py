"""A step as eager PyTorch runs it beside the plan of the same step, phase by phase."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from foreplan.base.units import format_bytes
from foreplan.eager import Eager
from foreplan.eager.result import Row, json_of, remarks_of, rows_of, table_of
from foreplan.lower.program import Program
from foreplan.planner import Plan
from foreplan.planner.problem import Role
from foreplan.report.memory import Memory


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
        return rows_of(self.eager, self.ours)

    def as_json(self) -> dict[str, Any]:
        """The same for programs, in bytes."""
        return json_of(self.eager, self.rows) | {"planned_peak_bytes": self.plan.arena_bytes}

    def __str__(self) -> str:
        ratio = self.eager.peak / max(1, self.plan.arena_bytes)
        lines = [
            *table_of(self.eager, self.rows, beside=True),
            "",
            f"peak of PyTorch's live tensors {format_bytes(self.eager.peak)}, "
            f"of the plan's arena {format_bytes(self.plan.arena_bytes)}: {ratio:.2f} times as much",
            *remarks_of(self.eager),
        ]
        return "\n".join(lines) + "\n"

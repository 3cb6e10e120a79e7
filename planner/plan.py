"""A planner's answer: which action runs when, where everything lies, the bounds, and why they hold."""

from __future__ import annotations

from dataclasses import dataclass

from foreplan.base.units import format_bytes
from foreplan.planner.problem import Problem


@dataclass(frozen=True, slots=True)
class Step:
    """One run of an action.

    Attributes:
        action: index into the problem's actions.
        reads: byte offset of each value the action reads, in its own order, each relative to the value's region.
        writes: likewise for what it writes.
        workspace: byte offset of its scratch memory; 0 where it needs none.
    """

    action: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    workspace: int = 0


@dataclass(frozen=True, slots=True)
class Buffer:
    """Bytes that are reserved for a stretch of steps; derived from a plan, for people and for bounds.

    Attributes:
        value: the value it holds, or -1 for a workspace.
        lower: index of the first step during which the bytes are reserved.
        upper: index after the last one (half-open).
        written: the step that writes it; -1 if it was there before, and for a workspace.
        readers: the steps that read it, in order.
    """

    value: int
    region: int
    offset: int
    nbytes: int
    lower: int
    upper: int
    written: int = -1
    readers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Certificate:
    """Why a plan is as good as it says.

    Attributes:
        peak_step: the first step at which the live set is largest: the lower bound.
        placement: the heuristic or search that found the offsets.
        order: the heuristic that found the order.
        stages: (stage, arena_bytes after it), from program order on.
    """

    peak_step: int
    placement: str
    order: str
    stages: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Plan:
    """A schedule with addresses.

    Attributes:
        problem_digest: of the problem that it answers.
        steps: in order of execution.
        starts: (value, offset) of every INPUT and STORED value when the step begins.
        ends: (value, offset) of every OUTPUT and STORED value when it ends.
        heights: bytes of each region.
        arena_bytes: the heights of the device's regions together, persistent values included.
        lower_bound_bytes: the highest live set of this schedule; no plan of the same order is lower, with any offsets
            and any writes in place.
        order_lower_bound_bytes: no schedule of the problem's actions is lower; None where it was not proved.
        budget: bytes that the arena was asked to stay within, together with what lies beside it where that was
            counted; or None.
    """

    problem_digest: str
    steps: tuple[Step, ...]
    starts: tuple[tuple[int, int], ...]
    ends: tuple[tuple[int, int], ...]
    heights: tuple[int, ...]
    arena_bytes: int
    lower_bound_bytes: int
    order_lower_bound_bytes: int | None
    certificate: Certificate
    budget: int | None = None

    def __repr__(self) -> str:
        return f"<Plan: {len(self.steps)} steps in {format_bytes(self.arena_bytes)}>"

    def as_text(self, problem: Problem) -> str:
        """A line a step, with names and offsets."""
        lines = [
            f"plan arena={self.arena_bytes} ({format_bytes(self.arena_bytes)}) lower_bound={self.lower_bound_bytes} "
            f"order_lower_bound={self.order_lower_bound_bytes} heights={list(self.heights)}"
        ]
        names = [value.name for value in problem.values]
        lines += [f"start {names[value]}@{offset}" for value, offset in self.starts]
        for i, step in enumerate(self.steps):
            action = problem.actions[step.action]
            reads = ", ".join(f"{names[v]}@{o}" for v, o in zip(action.reads, step.reads))
            writes = ", ".join(f"{names[v]}@{o}" for v, o in zip(action.writes, step.writes))
            work = f" workspace {action.workspace}@{step.workspace}" if action.workspace else ""
            lines.append(f"{i:5d} {action.name}: {writes} = {reads}{work}")
        lines += [f"end {names[value]}@{offset}" for value, offset in self.ends]
        return "\n".join(lines) + "\n"

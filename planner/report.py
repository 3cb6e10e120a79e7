"""What a plan holds where and when, for tables, pictures and errors; derived from its steps alone."""

from __future__ import annotations

import numpy as np

from foreplan.planner.bound import granularities
from foreplan.planner.plan import Buffer, Plan
from foreplan.planner.problem import Category, Problem, Role
from foreplan.units import align_up


def buffers(plan: Plan, problem: Problem) -> tuple[Buffer, ...]:
    """Every stretch of bytes that a verified plan reserves, workspaces included, in order of time and then of offset.

    A value lives from the step that writes it (0 if it was there before) to its last read, or to the end. Where a
    value takes the bytes of another in place, they are its own from that very step on; if it is smaller, from the step
    after. A value that is made of parts in place holds its bytes from the step on that writes the first of them. No two
    buffers that overlap in time overlap in bytes, so the sizes of those live at a step add up.
    """
    return tuple(sorted(_Ledger(plan, problem).close(), key=lambda b: (b.lower, b.region, b.offset, b.upper, b.value)))


def live_at(plan: Plan, problem: Problem, step: int) -> tuple[Buffer, ...]:
    """The buffers reserved during one step, by region and offset."""
    live = [buffer for buffer in buffers(plan, problem) if buffer.lower <= step < buffer.upper]
    return tuple(sorted(live, key=lambda b: (b.region, b.offset, b.value)))


def bytes_by_category(plan: Plan, problem: Problem, step: int) -> dict[Category, int]:
    """Bytes on the device at one step by what people call them; their sum at the peak is the plan's lower bound.

    Each buffer counts as the value that its bytes hold, rounded up to what anything in its region is aligned to.
    """
    return {category: int(series[step]) for category, series in category_series(plan, problem).items()}


def category_series(plan: Plan, problem: Problem) -> dict[Category, np.ndarray]:
    """`bytes_by_category` of all steps at once: int64[steps] for each category, in the order of `Category`."""
    steps = max(len(plan.steps), 1)
    grain = granularities(problem)
    change = {category: np.zeros(steps + 1, np.int64) for category in Category}
    for buffer in buffers(plan, problem):
        if problem.regions[buffer.region].on_device:
            category = Category.WORKSPACE if buffer.value < 0 else problem.values[buffer.value].category
            nbytes = align_up(buffer.nbytes, grain[buffer.region])
            change[category][buffer.lower] += nbytes
            change[category][buffer.upper] -= nbytes
    return {category: np.cumsum(series)[:-1] for category, series in change.items()}


class _Ledger:
    """Buffers being found by going through the steps; a buffer is known by its value and offset while it is live."""

    def __init__(self, plan: Plan, problem: Problem) -> None:
        self.problem = problem
        self.steps = max(len(plan.steps), 1)
        self.value: list[int] = []
        self.offset: list[int] = []
        self.lower: list[int] = []
        self.upper: list[int] = []
        self.over: list[int] = []  # the buffer whose bytes each took over, or -1
        self.workspaces: list[Buffer] = []
        self.current: dict[tuple[int, int], int] = {}
        for value, offset in plan.starts:
            self._open(value, offset, 0)
            if problem.values[value].role is Role.STORED:
                self.upper[-1] = self.steps
        self.stored = {value: index for index, value in enumerate(self.value)}
        for step in range(len(plan.steps)):
            self._run(plan, step)
        for value, offset in plan.ends:
            self.upper[self.current[value, offset]] = self.steps

    def _open(self, value: int, offset: int, step: int) -> None:
        self.current[value, offset] = len(self.value)
        self.value.append(value)
        self.offset.append(offset)
        self.lower.append(step)
        self.upper.append(step + 1)
        self.over.append(-1)

    def _withdraw(self, buffer: int) -> int:
        """Let bytes, and those that they took over, count with the whole that they are part of; since which step."""
        while True:
            self.upper[buffer] = first = self.lower[buffer]
            if self.over[buffer] < 0:
                return first
            buffer = self.over[buffer]

    def _run(self, plan: Plan, number: int) -> None:
        values, step = self.problem.values, plan.steps[number]
        action = self.problem.actions[step.action]
        for value, offset in zip(action.reads, step.reads):
            buffer = self.current[value, offset]
            self.upper[buffer] = max(self.upper[buffer], number + 1)
        in_place = {
            pair.write: pair.read for pair in action.overwrites if step.writes[pair.write] == step.reads[pair.read]
        }
        firsts = [number] * len(action.writes)
        for part in action.parts:
            lies = step.reads[part.read] - step.writes[part.write]
            if lies == part.offset and values[action.reads[part.read]].nbytes:
                buffer = self.current[action.reads[part.read], step.reads[part.read]]
                firsts[part.write] = min(firsts[part.write], self._withdraw(buffer))
        for i, (value, offset) in enumerate(zip(action.writes, step.writes)):
            read = in_place.get(i, -1)
            start, over = firsts[i], -1
            if values[value].home >= 0:
                self.upper[self.stored[values[value].home]] = number
            elif read >= 0 and values[value].nbytes and values[action.reads[read]].region == values[value].region:
                start += values[value].nbytes < values[action.reads[read]].nbytes
                over = self.current[action.reads[read], offset]
                self.upper[over] = start
            self._open(value, offset, number)
            self.lower[-1], self.over[-1] = start, over
        if action.workspace:
            self.workspaces.append(
                Buffer(-1, action.workspace_region, step.workspace, action.workspace, number, number + 1)
            )

    def close(self) -> list[Buffer]:
        values = self.problem.values
        rows = zip(self.value, self.offset, self.lower, self.upper)
        found = [Buffer(v, values[v].region, o, values[v].nbytes, low, up) for v, o, low, up in rows if low < up]
        return found + self.workspaces

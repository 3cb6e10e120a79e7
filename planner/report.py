"""Which values a plan holds where and when, for tables, pictures and errors; derived from its steps alone."""

from __future__ import annotations

import numpy as np

from foreplan.base.errors import UsageError
from foreplan.base.units import align_up
from foreplan.planner.memory.bounds import granularities
from foreplan.planner.plan import Buffer, Plan
from foreplan.planner.problem import Category, Problem, Role
from foreplan.planner.verify.wellformed import check_plan


def buffers(plan: Plan, problem: Problem) -> tuple[Buffer, ...]:
    """Every stretch of bytes that a verified plan reserves, workspaces included, in order of time and then of offset.

    A value lives from the step that writes it (0 if it was there before) to its last read, or to the end. A value that
    takes the bytes of another in place holds them from that step on; if it is smaller, from the next step on. A value
    that is made of parts in place holds its bytes from the step that joins them on, and each part until then. An input
    that nobody reads is gone when the first step begins. Buffers that overlap in time do not overlap in bytes, so the
    sizes at a step add up.

    Raises:
        PlanError: the problem is not well-formed, or the plan answers another one.
    """
    check_plan(plan, problem)
    return tuple(sorted(_Ledger(plan, problem).close(), key=lambda b: (b.lower, b.region, b.offset, b.upper, b.value)))


def live_at(plan: Plan, problem: Problem, step: int) -> tuple[Buffer, ...]:
    """The buffers reserved during one step, by region and offset.

    Raises:
        PlanError: see `buffers`.
        UsageError: there is no such step.
    """
    check_plan(plan, problem)
    _check_step(plan, step)
    live = [buffer for buffer in buffers(plan, problem) if buffer.lower <= step < buffer.upper]
    return tuple(sorted(live, key=lambda b: (b.region, b.offset, b.value)))


def bytes_by_category(plan: Plan, problem: Problem, step: int) -> dict[Category, int]:
    """Bytes on the device at one step by category.

    Their sum is what the plan holds at that step. At the peak the sum is the plan's lower bound, or more where a write
    lies beside a read whose bytes it could have taken.

    Each buffer has the category of its value; its size is rounded up to the smallest alignment in its region.

    Raises:
        PlanError, UsageError: see `live_at`.
    """
    check_plan(plan, problem)
    _check_step(plan, step)
    return {category: int(series[step]) for category, series in category_series(plan, problem).items()}


def category_series(plan: Plan, problem: Problem) -> dict[Category, np.ndarray]:
    """`bytes_by_category` of all steps at once: int64[steps] for each category, in the order of `Category`.

    For step 0, the values that are there when it begins count instead, if they are more.

    Raises:
        PlanError: see `buffers`.
    """
    check_plan(plan, problem)
    steps = max(len(plan.steps), 1)
    grain = granularities(problem)
    change = {category: np.zeros(steps + 1, np.int64) for category in Category}
    for buffer in buffers(plan, problem):
        if problem.regions[buffer.region].on_device:
            category = Category.WORKSPACE if buffer.value < 0 else problem.values[buffer.value].category
            nbytes = align_up(buffer.nbytes, grain[buffer.region])
            change[category][buffer.lower] += nbytes
            change[category][buffer.upper] -= nbytes
    found = {category: np.cumsum(series)[:-1] for category, series in change.items()}
    given = dict.fromkeys(Category, 0)
    for value, _ in plan.starts:
        v = problem.values[value]
        if problem.regions[v.region].on_device:
            given[v.category] += align_up(v.nbytes, grain[v.region])
    if sum(given.values()) > sum(int(series[0]) for series in found.values()):
        for category, series in found.items():
            series[0] = given[category]
    return found


def _check_step(plan: Plan, step: int) -> None:
    """A plan without steps still has what is there at its start, as step 0."""
    last = max(len(plan.steps), 1) - 1
    if type(step) is not int or not 0 <= step <= last:
        raise UsageError(f"step must be an int from 0 to {last}, got {step!r:.80}")


class _Ledger:
    """The search for buffers, step by step; a buffer is known by its value and offset while it is live."""

    def __init__(self, plan: Plan, problem: Problem) -> None:
        self.problem = problem
        self.steps = max(len(plan.steps), 1)
        self.value: list[int] = []
        self.offset: list[int] = []
        self.lower: list[int] = []
        self.upper: list[int] = []
        self.written: list[int] = []
        self.readers: list[list[int]] = []
        self.workspaces: list[Buffer] = []
        self.current: dict[tuple[int, int], int] = {}
        self.stored: dict[int, int] = {}  # by stored value, the buffer of its content
        for value, offset in plan.starts:
            self._open(value, offset, 0, -1)
            if problem.values[value].role is Role.STORED:
                self.upper[-1], self.stored[value] = self.steps, self.current[value, offset]
            elif plan.steps:
                self.upper[-1] = 0  # gone when the first step begins, unless a step reads it
        for step in range(len(plan.steps)):
            self._run(plan, step)
        for value, offset in plan.ends:
            self.upper[self.current[value, offset]] = self.steps

    def _open(self, value: int, offset: int, step: int, written: int) -> None:
        self.current[value, offset] = len(self.value)
        self.value.append(value)
        self.offset.append(offset)
        self.lower.append(step)
        self.upper.append(step + 1)
        self.written.append(written)
        self.readers.append([])

    def _run(self, plan: Plan, number: int) -> None:
        values, step = self.problem.values, plan.steps[number]
        action = self.problem.actions[step.action]
        read = [self.current[value, offset] for value, offset in zip(action.reads, step.reads)]
        for buffer in read:
            self.upper[buffer] = max(self.upper[buffer], number + 1)
            self.readers[buffer].append(number)
        lower = [number] * len(action.writes)
        pairs = [(pair.write, pair.read, 0) for pair in action.overwrites]
        for write, old, offset in pairs + [(part.write, part.read, part.offset) for part in action.parts]:
            new, gone = values[action.writes[write]], values[action.reads[old]]
            lies = step.reads[old] - step.writes[write] == offset and new.region == gone.region
            if not lies or not new.nbytes or not gone.nbytes:
                continue
            if new.nbytes < gone.nbytes:
                lower[write] = number + 1
            else:
                self.upper[read[old]] = number
        for (value, offset), first in zip(zip(action.writes, step.writes), lower):
            self._open(value, offset, number, number)
            self.lower[-1] = first
            if (home := values[value].home) >= 0:
                self.upper[self.stored[home]] = number
                self.stored[home] = self.current[value, offset]
        if action.workspace:
            self.workspaces.append(
                Buffer(-1, action.workspace_region, step.workspace, action.workspace, number, number + 1)
            )

    def close(self) -> list[Buffer]:
        values = self.problem.values
        rows = zip(self.value, self.offset, self.lower, self.upper, self.written, map(tuple, self.readers))
        found = [Buffer(v, values[v].region, o, values[v].nbytes, *rest) for v, o, *rest in rows if rest[0] < rest[1]]
        return found + self.workspaces

"""What the instructions of a plan are to people: their phase of the step, and when they run in predicted time."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from foreplan.planner.plan import Plan
from foreplan.planner.problem import Category, Problem, Role


class Phase(StrEnum):
    """What an instruction does for the step, in the order in which pictures show them."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"
    RECOMPUTE = "recompute"  # what it writes has been written before in the same step
    COPY = "copy"  # to host memory, or back


@dataclass(frozen=True)
class Timeline:
    """The instructions of a plan.

    Attributes:
        names: of the actions that they run.
        phases: one an instruction.
        edges: nanoseconds from the beginning of the step to that of each instruction, and to the end: int64
            [instructions + 1]. All are zero where the target predicts no time.
        measured: whether these times were measured; else they are predicted.
    """

    names: tuple[str, ...]
    phases: tuple[Phase, ...]
    edges: np.ndarray
    measured: bool = False

    @staticmethod
    def of(problem: Problem, plan: Plan, nanoseconds: Sequence[int] | None = None) -> Timeline:
        """The instructions of a plan of a problem.

        Args:
            nanoseconds: measured, of each instruction; by default predicted times stand.
        """
        actions = [problem.actions[step.action] for step in plan.steps]
        predicted = [action.nanoseconds for action in actions]
        times = np.array(predicted if nanoseconds is None else nanoseconds, np.int64)
        names = tuple(action.name for action in actions)
        edges = np.concatenate([np.zeros(1, np.int64), np.cumsum(times)])
        return Timeline(names, _phases(problem, plan), edges, nanoseconds is not None)

    @property
    def nanoseconds(self) -> int:
        """Predicted time of the step; 0 where the target predicts none."""
        return int(self.edges[-1])

    @property
    def clock(self) -> tuple[np.ndarray, str]:
        """Edges for viewers that need a time, in nanoseconds, and what they are, for people."""
        if self.nanoseconds:
            return self.edges, "measured time" if self.measured else "predicted time"
        return np.arange(len(self.edges)) * 1000, "one microsecond an instruction: the target predicts no time"


def _phases(problem: Problem, plan: Plan) -> tuple[Phase, ...]:
    found, written = [], set[int]()
    for step in plan.steps:
        writes = problem.actions[step.action].writes
        if step.action in problem.copies:
            found.append(Phase.COPY)
        elif writes and written.issuperset(writes):
            found.append(Phase.RECOMPUTE)
        else:
            found.append(_phase(problem, step.action))
        written.update(writes)
    return tuple(found)


def _phase(problem: Problem, index: int) -> Phase:
    """Of an action that runs for the first time.

    Running statistics belong to the forward pass, and sums over micro-batches to the backward pass, although both are
    kept from step to step.
    """
    action, values = problem.actions[index], problem.values
    kept = {values[v].category for v in action.writes if values[v].home >= 0}
    gradient = any(
        values[v].category is Category.GRADIENTS and values[v].role is not Role.STORED and values[v].home < 0
        for v in (*action.reads, *action.writes)
    )
    passes = Phase.BACKWARD if gradient else Phase.FORWARD
    if not kept or (kept == {Category.PARAMETERS} and not gradient) or (kept == {Category.GRADIENTS} and gradient):
        return passes
    return Phase.UPDATE


def aligned(first: Sequence[str], second: Sequence[str]) -> np.ndarray:
    """Where the instructions of one plan lie beside those of another, by the names of their actions.

    The longest list of instructions that both plans run in the same order is aligned; others lie between those. The
    second run of a name is another instruction than the first.

    Args:
        first: names of the instructions of the plan that gives the axis.
        second: names of those that are laid on it.

    Returns:
        The place of the beginning of each instruction of `second` among those of `first`, and that of the end:
        float64[len(second) + 1].
    """
    place = {each: i for i, each in enumerate(_numbered(first))}
    pairs = [(i, place[each]) for i, each in enumerate(_numbered(second)) if each in place]
    kept = [pairs[i] for i in _longest_rise([there for _, there in pairs])]
    begin = [] if kept and kept[0][0] == 0 else [(0, 0)]
    here, there = zip(*begin, *kept, (len(second), len(first)))
    return np.interp(np.arange(len(second) + 1), here, there)


def _numbered(names: Sequence[str]) -> list[tuple[str, int]]:
    """Each name with how often it came before."""
    seen: Counter[str] = Counter()
    found = []
    for name in names:
        found.append((name, seen[name]))
        seen[name] += 1
    return found


def _longest_rise(numbers: Sequence[int]) -> list[int]:
    """Indices of a longest rising subsequence (Fredman 1975, "On computing the length of longest increasing
    subsequences")."""
    ends: list[int] = []  # the least last number of the rises of each length
    at: list[int] = []
    before: list[int] = []
    for i, number in enumerate(numbers):
        length = bisect_left(ends, number)
        before.append(at[length - 1] if length else -1)
        ends[length : length + 1], at[length : length + 1] = [number], [i]
    found = []
    i = at[-1] if at else -1
    while i >= 0:
        found.append(i)
        i = before[i]
    return found[::-1]

"""Liveness: the steps during which every value's bytes are needed, for one order of the actions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foreplan.base.errors import PlanError
from foreplan.planner.problem import Problem, Role


@dataclass(frozen=True)
class LiveRanges:
    """Instances of values and when they live; half-open [lower, upper) over steps.

    An instance is one write of a value, or its content when the step begins; a value that is computed twice has
    two. Inputs and stored values come first, in the problem's order, then writes in the order of the steps.

    Attributes:
        steps: their number; an empty schedule counts as one step, in which inputs and stored values live.
        values: the value of each instance.
        lower: the step that writes it, or 0.
        upper: one past the step that reads it last, or `steps`; 0 for an input that no step reads.
        kept: whether it must still be there when the last step has run.
        reads: for each step, the instance of each of its action's reads.
        writes: likewise for its writes.
    """

    steps: int
    values: list[int]
    lower: list[int]
    upper: list[int]
    kept: list[bool]
    reads: list[list[int]]
    writes: list[list[int]]


def live_ranges(problem: Problem, order: Sequence[int]) -> LiveRanges:
    """Live ranges of every instance when the actions `order` (indices, one a step) run one after the other.

    An INPUT lives from step 0 to its last read, a STORED value throughout, an OUTPUT's last instance from its write to
    the end, and anything else from its write to its last read, or for that step alone.

    Raises:
        PlanError: an action reads a value that is not there yet, or an output is never written.
    """
    steps = max(len(order), 1)
    current = [-1] * len(problem.values)
    values = [v for v, value in enumerate(problem.values) if value.role in (Role.INPUT, Role.STORED)]
    stored = [problem.values[v].role is Role.STORED for v in values]
    for instance, v in enumerate(values):
        current[v] = instance
    lower = [0] * len(values)
    upper = [steps if keep or not order else 0 for keep in stored]
    kept = list(stored)
    reads: list[list[int]] = []
    writes: list[list[int]] = []
    for step, index in enumerate(order):
        action = problem.actions[index]
        read = [current[v] for v in action.reads]
        for instance, v in zip(read, action.reads):
            if instance < 0:
                raise PlanError(
                    f"step {step} ({action.name!r}) reads {problem.values[v].name!r} before any step writes it"
                )
            if not kept[instance]:
                upper[instance] = step + 1
        first = len(values)
        for instance, v in enumerate(action.writes, first):
            current[v] = instance
            values.append(v)
            lower.append(step)
            upper.append(step + 1)
            kept.append(False)
        reads.append(read)
        writes.append(list(range(first, len(values))))
    for v, value in enumerate(problem.values):
        if value.role is Role.OUTPUT:
            if current[v] < 0:
                raise PlanError(f"value {value.name!r} must be there at the end, and no step writes it")
            upper[current[v]] = steps
            kept[current[v]] = True
    return LiveRanges(steps, values, lower, upper, kept, reads, writes)

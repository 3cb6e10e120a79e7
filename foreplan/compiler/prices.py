"""Predicted times of steps, by which their forms are compared."""

from __future__ import annotations

from foreplan.lower import Program
from foreplan.planner import Plan, totals

DEAR = 0.02  # recomputation of a step that adds more to its time is held against parts
LITTLE = 0.01  # what parts may add to the time of a step without a budget; recomputation may add as much


def adds_little(whole: Program, split: Program) -> bool:
    """Whether a step with more of it in parts takes next to no more time: kernels over a part may be slow."""
    return base_nanoseconds(split) <= (1 + LITTLE) * base_nanoseconds(whole)


def base_nanoseconds(program: Program) -> int:
    """Predicted time without recomputation, by the fastest kernels."""
    return totals(program, [()])[0].base_nanoseconds


def is_dear(program: Program, plan: Plan) -> bool:
    """Whether recomputation adds so much to the predicted time that other forms of the step are looked at."""
    return program.costs(plan).nanoseconds > (1 + DEAR) * base_nanoseconds(program)

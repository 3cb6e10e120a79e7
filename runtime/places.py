"""Where a plan puts the values of a step, and when its actions run: metadata for files with the step's graph."""

from __future__ import annotations

from collections.abc import Mapping

from foreplan.planner import Plan, buffers
from foreplan.planner.problem import Problem

Metadata = Mapping[str, Mapping[str, int | str]]  # by name, facts by key


def places_of_values(problem: Problem, plan: Plan) -> Metadata:
    """By value: its bytes, region and offset, the instruction that writes it, and those for which it lives (half-open).
    A value with several lives has lists with spaces between them.
    """
    found: dict[str, dict[str, int | str]] = {}
    for buffer in buffers(plan, problem):
        if buffer.value < 0:
            continue
        value = problem.values[buffer.value]
        facts = found.setdefault(value.name, {"bytes": value.nbytes, "region": problem.regions[value.region].name})
        for key in ("offset", "written", "lower", "upper"):
            facts[key] = f"{facts.get(key, '')} {getattr(buffer, key)}".strip()
    return found


def runs_of_actions(problem: Problem, plan: Plan) -> Metadata:
    """By action: the instructions that run it, its workspace in bytes, and its predicted nanoseconds."""
    found: dict[str, dict[str, int | str]] = {}
    for i, step in enumerate(plan.steps):
        action = problem.actions[step.action]
        facts = found.setdefault(action.name, {"workspace": action.workspace, "predicted_ns": action.nanoseconds})
        facts["instruction"] = f"{facts.get('instruction', '')} {i}".strip()
    return found

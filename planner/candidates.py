"""Kernel candidates: actions that differ in workspace and cost alone, such as kernels for one op.

Candidates read and write the same values in the same way: which of them runs at a step changes the live bytes of that
step and nothing else. The searches therefore see one action for each set of candidates, with their least workspace and
their least cost. `recompute.candidate_front` then chooses among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from foreplan.planner.problem import Action, Problem


@dataclass(frozen=True)
class Lean:
    """A problem with one candidate of each set.

    Attributes:
        whole: the problem with all candidates.
        problem: one action for each set of candidates.
        costs: of its actions.
        sets: for each of these actions the candidates that may run in its place, that of the least workspace first.
    """

    whole: Problem
    problem: Problem
    costs: tuple[int, ...]
    sets: tuple[tuple[int, ...], ...]


def merge_candidates(problem: Problem, costs: Sequence[int]) -> Lean:
    """The problem with one action for each set of candidates.

    Actions with an effect are no candidates: each must run.

    Args:
        costs: of one run of each action.
    """
    alike: dict[tuple[object, ...], list[int]] = {}
    for index, action in enumerate(problem.actions):
        alike.setdefault((index,) if action.effect else _likeness(action), []).append(index)
    if len(alike) == len(problem.actions):
        return Lean(problem, problem, tuple(costs), tuple((index,) for index in range(len(costs))))
    sets = [
        sorted(candidates, key=lambda i: (problem.actions[i].workspace, costs[i], i)) for candidates in alike.values()
    ]
    actions = []
    for candidates in sets:
        cheapest = min(problem.actions[index].nanoseconds for index in candidates)
        actions.append(replace(problem.actions[candidates[0]], nanoseconds=cheapest))
    lean = Problem(problem.values, tuple(actions), problem.regions)
    return Lean(problem, lean, tuple(min(costs[i] for i in candidates) for candidates in sets), tuple(map(tuple, sets)))


def _likeness(action: Action) -> tuple[object, ...]:
    """What candidates have in common."""
    return action.reads, action.writes, action.overwrites, action.parts, action.workspace_region

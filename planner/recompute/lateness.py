"""The steps of a schedule that recomputes, each run again as late as something needs it: what a new order improves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from foreplan.base.errors import PlanError
from foreplan.planner.order.dependences import Dependences, dependences
from foreplan.planner.placement.layout import schedule
from foreplan.planner.problem import Problem
from foreplan.planner.recompute.order import unroll


@dataclass(frozen=True)
class LateOrder:
    """Steps in another order.

    Attributes:
        problem: whose actions are the steps, and whose values are what each of them makes (see `unroll`).
        order: of these actions.
    """

    problem: Problem
    order: tuple[int, ...]


def as_late(problem: Problem, steps: Sequence[int], orders: Sequence[Sequence[int]]) -> LateOrder | None:
    """The lowest schedule of some steps in which the first run of every action stands where one of the orders has it,
    and further runs as late as something needs them.

    Recomputation is searched among schedules of this kind: by how much the steps' own order is better, was found later.

    Args:
        problem: that the steps solve.
        steps: actions, one a step.
        orders: each of actions once.

    Returns:
        None where there is no such schedule, or where the steps are one already.
    """
    runs = unroll(problem, steps)
    try:
        graph = dependences(runs)
    except PlanError:
        return None
    if len(graph.actions) < len(steps):
        return None
    found: list[tuple[int, ...]] = []
    for order in orders:
        place = {action: position for position, action in enumerate(order)}
        made = _placed(runs, steps, _late(runs, steps, place), place)
        if made == list(range(len(steps))):
            return None
        if made is not None and _obeys(graph, made):
            found.append(tuple(made))
    return LateOrder(runs, min(found, key=lambda made: schedule(runs, "", made).bound)) if found else None


def _late(runs: Problem, steps: Sequence[int], place: Mapping[int, int]) -> list[bool]:
    """Which runs come as late as something needs them: those beyond an action's first, and those of actions that the
    steps have right ahead of their first reader, or with only such between, and the order has elsewhere.
    """
    first = {action: step for step, action in reversed(list(enumerate(steps)))}
    late = [first[action] != step for step, action in enumerate(steps)]
    other = len(steps) - 1  # the nearest run after the one at hand that is not late
    for step in reversed(range(len(steps))):
        readers = [reader for value in runs.actions[step].writes for reader in runs.readers[value]]
        reader = min(readers, default=len(steps))
        if not late[step] and reader <= other:
            next_to_it = place.get(steps[step], -1) + 1 == place.get(steps[reader], -1)
            late[step] = late[reader] or not next_to_it
        if not late[step]:
            other = step
    return late


def _placed(runs: Problem, steps: Sequence[int], late: Sequence[bool], place: Mapping[int, int]) -> list[int] | None:
    """The runs with those that are not late in their places, each behind the late ones that it needs; None where
    something is needed ahead of its place. A run of what has no place stays ahead of the next one that has.
    """
    at, places = len(place), [0] * len(steps)
    for step in reversed(range(len(steps))):
        if not late[step]:
            at = place.get(steps[step], at)
        places[step] = at
    maker = {value: step for step, action in enumerate(runs.actions) for value in action.writes}
    made: list[int] = []
    done = [False] * len(steps)
    for main in sorted((step for step in range(len(steps)) if not late[step]), key=lambda step: (places[step], step)):
        needed, stack = {main}, [main]
        while stack:
            for value in runs.actions[stack.pop()].reads:
                earlier = maker.get(value, -1)
                if earlier >= 0 and not done[earlier] and earlier not in needed:
                    if not late[earlier]:
                        return None
                    needed.add(earlier)
                    stack.append(earlier)
        for step in sorted(needed):
            done[step] = True
            made.append(step)
    return made if len(made) == len(steps) else None


def _obeys(graph: Dependences, order: Sequence[int]) -> bool:
    at = {run: position for position, run in enumerate(order)}
    return all(
        at[graph.actions[earlier]] < at[graph.actions[node]]
        for node, before in enumerate(graph.before)
        for earlier in before
    )

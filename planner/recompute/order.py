"""The order of a schedule that recomputes: every run an action of its own, so that the search over orders applies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from foreplan.base.errors import PlanError
from foreplan.planner.effort import OrderEffort
from foreplan.planner.memory.alias_sets import merge
from foreplan.planner.memory.liveness import live_ranges
from foreplan.planner.order.best import improve
from foreplan.planner.order.dependences import dependences
from foreplan.planner.problem import Problem, Role


def reorder(problem: Problem, order: Sequence[int], effort: OrderEffort) -> tuple[int, ...]:
    """The same runs in an order that needs no more bytes than the given one: recomputation, which comes as late as
    possible, is moved ahead of what takes up its room.
    """
    unrolled = unroll(problem, order)
    graph = dependences(unrolled)
    if len(graph.actions) < len(order):  # what some run makes is not read: a plan with runs in vain is not worth it
        return tuple(order)
    better = improve(unrolled, graph, range(len(order)), effort)
    found = tuple(order) if better is None else tuple(order[run] for run in better.order)
    return found if _is_possible(problem, found) else tuple(order)


def _is_possible(problem: Problem, order: Sequence[int]) -> bool:
    """Whether no run has to overwrite what a later one reads. Where two runs that make the same value have changed
    places with one that overwrites it, this may overwrite the other one's.
    """
    try:
        merge(problem, order, live_ranges(problem, order))
    except PlanError:
        return False
    return True


def unroll(problem: Problem, order: Sequence[int]) -> Problem:
    """The problem whose actions are the runs of an order, once each, and whose values are what each run makes."""
    ranges = live_ranges(problem, order)
    last = {v: instance for instance, v in enumerate(ranges.values)}
    values = []
    for instance, v in enumerate(ranges.values):
        value = problem.values[v]
        role = Role.TRANSIENT if value.role is Role.OUTPUT and last[v] != instance else value.role
        home = last[value.home] if value.home >= 0 else -1
        values.append(replace(value, name=f"{value.name}#{instance}", role=role, home=home, copy_of=-1))
    actions = [
        replace(problem.actions[index], name=f"{problem.actions[index].name}#{step}", reads=tuple(r), writes=tuple(w))
        for step, (index, r, w) in enumerate(zip(order, ranges.reads, ranges.writes))
    ]
    return Problem(tuple(values), tuple(actions), problem.regions)

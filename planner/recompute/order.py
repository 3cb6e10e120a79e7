"""The order of a schedule that recomputes: every run an action of its own, so that the search over orders applies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from foreplan.planner.effort import OrderEffort
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
    return tuple(order) if better is None else tuple(order[run] for run in better.order)


def unroll(problem: Problem, order: Sequence[int]) -> Problem:
    """The problem whose actions are the runs of an order, once each, and whose values are what each run makes."""
    ranges = live_ranges(problem, order)
    last = {v: instance for instance, v in enumerate(ranges.values)}
    values = []
    for instance, v in enumerate(ranges.values):
        value = problem.values[v]
        role = Role.TRANSIENT if value.role is Role.OUTPUT and last[v] != instance else value.role
        home = last[value.home] if value.home >= 0 else -1
        values.append(replace(value, name=f"{value.name}#{instance}", role=role, home=home))
    actions = [
        replace(problem.actions[index], name=f"{problem.actions[index].name}#{step}", reads=tuple(r), writes=tuple(w))
        for step, (index, r, w) in enumerate(zip(order, ranges.reads, ranges.writes))
    ]
    return Problem(tuple(values), tuple(actions), problem.regions)

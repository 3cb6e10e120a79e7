"""The Pareto front of plans, from no recomputation to the least bytes found, and the choice among them.

Copies off the device and back, where a problem has actions for them, count as recomputation does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from foreplan.base.errors import DoesNotFitError
from foreplan.planner.effort import USUAL, Effort
from foreplan.planner.memory.order_bound import order_bound
from foreplan.planner.order.dependences import dependences
from foreplan.planner.order.heuristics import updates_first, updates_last
from foreplan.planner.placement.layout import Layout, Schedule, arena_bytes, assemble, lay_out, schedule, settle
from foreplan.planner.plan import Plan
from foreplan.planner.problem import Problem
from foreplan.planner.recompute.arrays import NEVER
from foreplan.planner.recompute.runs import annealed
from foreplan.planner.recompute.schedules import Point, frontier, recompute, reordered
from foreplan.planner.verify.verifier import verify

Beside = Callable[[Plan], int]
FREE = 100  # n: recomputation that adds at most 1/n to the predicted time counts as free


def whole_bytes(plan: Plan, beside: Beside | None) -> int:
    """Bytes that count toward a budget: those of the arena, and what a plan takes beside it where that is counted."""
    return plan.arena_bytes + (0 if beside is None else beside(plan))


@dataclass(frozen=True)
class Base:
    """The best schedule without recomputation, laid out.

    Attributes:
        stages: (stage, arena_bytes after it), from program order on.
    """

    schedule: Schedule
    layout: Layout
    stages: tuple[tuple[str, int], ...]

    @property
    def arena(self) -> int:
        """Its bytes on the device."""
        return self.stages[-1][1]


@dataclass(frozen=True)
class Curve:
    """Schedules of one problem by descending bytes and ascending cost; a function of the problem alone.

    Attributes:
        problem: that they solve.
        base: what all start from.
        points: those that recompute, by ascending cost, which is below 0 where cheaper producers save more than runs
            add.
        effort: how long each point is placed.
    """

    problem: Problem
    base: Base
    points: tuple[Point, ...]
    effort: Effort = USUAL

    def __len__(self) -> int:
        return 1 + len(self.points)

    @cached_property
    def order_bound(self) -> int:
        """Bytes below which no schedule goes."""
        return order_bound(self.problem)

    def plan(self, index: int) -> Plan:
        """The verified plan of a point, of which the first, number 0, recomputes nothing."""
        return _finish(self, *self._laid_out(index))

    def within(self, allowed: int, beside: Beside | None = None) -> Plan:
        """The plan of least cost that is within a budget.

        Args:
            allowed: bytes of the arena, and of what a plan takes beside it.
            beside: the bytes that a plan takes beside its arena; None: those do not count.

        Raises:
            DoesNotFitError: there is none; with the smallest plan there is.
        """
        least: Plan | None = None
        needed = 0
        for index in self._by_cost():
            if self._bound(index) > allowed and index < len(self) - 1:
                continue
            found = self.plan(index)
            nbytes = whole_bytes(found, beside)
            if nbytes <= allowed:
                return replace(found, budget=allowed)
            if least is None or nbytes < needed:
                least, needed = found, nbytes
        assert least is not None
        raise DoesNotFitError(
            f"needs {needed} bytes, allowed are {allowed}",
            needed=needed,
            capacity=allowed,
            lower_bound=least.lower_bound_bytes,
            plan=least,
        )

    def lowest(self, most_cost: int) -> Plan:
        """The plan of the smallest arena among those within a further cost."""
        best, chosen, layout = self.base.arena, self.base.schedule, self.base.layout
        for index in reversed(range(1, len(self))):
            if self.points[index - 1].cost > most_cost or self._bound(index) >= best:
                continue
            trial = self._laid_out(index)
            if (height := arena_bytes(self.problem, trial[1].heights)) < best:
                best, (chosen, layout) = height, trial
        return _finish(self, chosen, layout)

    def _by_cost(self) -> list[int]:
        cheaper = sum(point.cost < 0 for point in self.points)
        return [*range(1, cheaper + 1), 0, *range(cheaper + 1, len(self))]

    def _bound(self, index: int) -> int:
        return self.points[index - 1].bound if index else self.base.schedule.bound

    def _laid_out(self, index: int) -> tuple[Schedule, Layout]:
        if index == 0:
            return self.base.schedule, self.base.layout
        chosen = schedule(self.problem, self.base.schedule.name, self.points[index - 1].order)
        return chosen, lay_out(self.problem, chosen, self.effort.placement)


def free_cost(base: Base, cost: Sequence[int]) -> int:
    """What may be added to a schedule and still count as free."""
    return sum(cost[index] for index in base.schedule.order) // FREE


def free_curve(problem: Problem, base: Base, cost: Sequence[int], most: int, effort: Effort) -> Curve:
    """The beginning of a curve, as far as recomputation is free."""
    bound, found = base.schedule.bound, []
    for order in _orders(problem, base):
        found += recompute(problem, order, bound, cost, effort.recompute, caps=[most], most_cost=most, thorough=False)
    return Curve(problem, base, tuple(frontier([point for point in found if point.cost <= most], bound)), effort)


def whole_curve(
    problem: Problem, base: Base, cost: Sequence[int], effort: Effort, *, thorough: bool = True, again: bool = True
) -> Curve:
    """The curve of a cost for each action, as far down as the search goes; see `recompute`.

    Where there are several orders to start from, and many actions, a short search tells which deserves the long one.
    """
    whole, own = sum(cost[index] for index in base.schedule.order), effort.recompute
    caps = [whole // share if share else int(NEVER) for share in own.shares]
    bound, orders = base.schedule.bound, _orders(problem, base)
    found: list[Point] = []
    if not thorough or len(base.schedule.order) > own.all_orders:
        short = [
            recompute(problem, order, bound, cost, own, caps=caps, thorough=False, again=again) for order in orders
        ]
        found = [point for points in short for point in points]
        lowest = [_lowest(points, caps, bound) for points in short]
        orders = [orders[lowest.index(min(lowest))]]
    small = len(base.schedule.order) <= own.sequences.actions
    for order in orders if thorough else ():
        points = recompute(problem, order, bound, cost, own, caps=caps, again=again)
        found += points if small else reordered(problem, points, caps, bound, len(points), effort)
    if thorough and small:
        found = reordered(problem, frontier(found, bound), caps, bound, own.sequences.points, effort)
        orders = [base.schedule.order, *orders]
        found = annealed(problem, orders, found, caps, bound, cost, own.sequences, again=again)
    return Curve(problem, base, tuple(frontier(found, bound)), effort)


def _orders(problem: Problem, base: Base) -> list[Sequence[int]]:
    """Orders to recompute in: the best without recomputation, the same with its updates last, and the listed one.

    What is computed long before it is needed costs the first nothing at its peak, and yet is in the way once the peak
    falls; and after an update nothing can be recomputed any more from what it replaced.
    """
    graph = dependences(problem)
    orders = [base.schedule.order, tuple(updates_last(problem, graph, base.schedule.order))]
    return list(dict.fromkeys([*orders, tuple(updates_first(problem, graph))]))


def _lowest(points: Sequence[Point], caps: Sequence[int], bound: int) -> int:
    """The live bytes of what each cap allows, together."""
    return sum(min([point.bound for point in points if point.cost <= cap], default=bound) for cap in caps)


def _finish(curve: Curve, chosen: Schedule, layout: Layout) -> Plan:
    problem, base, stages = curve.problem, curve.base, curve.base.stages
    if chosen.order != base.schedule.order:
        stages += (("recompute", arena_bytes(problem, layout.heights)),)
    layout, loosened = settle(problem, chosen, layout, curve.effort.placement)
    if loosened:
        stages = (*stages, ("loosened", arena_bytes(problem, layout.heights)))
    found = assemble(problem, chosen, layout, curve.order_bound, stages)
    verify(found, problem)
    return found

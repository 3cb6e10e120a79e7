"""The cost of less memory, by recomputation and by parts: the curves of a step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from foreplan.compiler.compiled import Compiled
from foreplan.compiler.forms import other_forms
from foreplan.compiler.kept_plans import kept_plan
from foreplan.compiler.prices import DEAR, base_nanoseconds
from foreplan.lower.outside import beside
from foreplan.lower.program import Program
from foreplan.planner import Curve, Plan, Problem, plan_curve, totals
from foreplan.report.memory import Memory

SHARES = (0.01, 0.05, 0.20)  # the lowest plans within these shares of added time are always points
APART = 0.96  # other points are at least this much lower than the one before


@dataclass(frozen=True)
class Point:
    """One plan of the curve.

    Attributes:
        budget_bytes: the smallest budget that gives this plan: of the whole card, or of the arena on the host.
        peak_bytes: the arena and the memory outside it; see `Memory.peak`.
        arena_bytes: height of the arena.
        host_bytes: host memory for values copied there; 0 where the program offers no copies.
        lower_bound_bytes: highest live set of its schedule.
        extra_flops_ratio: added flops over those of the step as it is without recomputation, by the fastest kernels.
        extra_seconds_ratio: likewise of predicted time.
        instructions: how many it runs.
        in_parts: whether what runs in parts was chosen for this budget.
    """

    budget_bytes: int
    peak_bytes: int
    arena_bytes: int
    host_bytes: int
    lower_bound_bytes: int
    extra_flops_ratio: float
    extra_seconds_ratio: float
    instructions: int
    in_parts: bool = False


def host_bytes(problem: Problem, found: Plan) -> int:
    """Heights of the regions off the device."""
    return sum(height for height, region in zip(found.heights, problem.regions) if not region.on_device)


class Form:
    """A step as it is, or with more of it in parts.

    Attributes:
        step: with its plan without recomputation.
    """

    def __init__(self, step: Compiled) -> None:
        self.step = step

    @cached_property
    def curve(self) -> Curve:
        """Its plans within budgets."""
        return plan_curve(self.step.program)


class Forms:
    """What a step can be within budgets: first as it is, then with more of it in parts. Each is made when it is asked
    for, once.
    """

    def __init__(self, step: Compiled, allowed: int | None = None) -> None:
        """No form is made yet.

        Args:
            step: as it is without recomputation.
            allowed: the budget in bytes, if there is one.
        """
        self._made = [Form(step)]
        self._left = other_forms(step, allowed)

    def __iter__(self) -> Iterator[Form]:
        """Each form."""
        for i in itertools.count():
            if i == len(self._made):
                if (following := next(self._left, None)) is None:
                    return
                graph, program = following
                plan = kept_plan(program, None, "off")
                self._made.append(Form(replace(self._made[0].step, graph=graph, program=program, plan=plan)))
            yield self._made[i]


def pareto(step: Compiled) -> tuple[Point, ...]:
    """The curve that budgets choose from, by descending arena: no recomputation, the lowest plans found within +1 %,
    +5 % and +20 % of predicted time, the least possible found, and points between. No other is as low and as fast.

    Args:
        step: without recomputation.
    """
    floor = 0 if step.update is None else step.update.plan.arena_bytes
    whole, *others = Forms(step)
    points = _points(whole.step.program, whole.curve, floor)
    if step.program.loss is None:
        before = points  # parts are for what recomputation cannot reach
    else:
        before = [point for point in points if point.extra_seconds_ratio <= DEAR]
    cheap = min([point.arena_bytes for point in before], default=points[0].arena_bytes)
    base = base_nanoseconds(whole.step.program)
    added = [base_nanoseconds(form.step.program) / max(1, base) - 1 for form in others]
    for form, extra in sorted(zip(others, added), key=lambda pair: pair[1]):
        if not _is_beaten(form.step.plan, extra, points):
            found = _points(form.step.program, form.curve, floor)
            points += [replace(point, in_parts=True) for point in found if point.arena_bytes < cheap]
    points.sort(key=lambda point: (point.extra_seconds_ratio, point.arena_bytes))
    lowest = itertools.accumulate((point.arena_bytes for point in points), min)
    higher = itertools.chain([points[0].arena_bytes + 1], lowest)
    return tuple(point for point, least in zip(points, higher) if point.arena_bytes < least)


def _is_beaten(plan: Plan, extra: float, points: Sequence[Point]) -> bool:
    """Whether some point takes no more time than a form without recomputation, and no more bytes than any schedule of
    it.


    Args:
        plan: of the form, without recomputation.
        extra: what it adds to the time of the step as it is, as `Point.extra_seconds_ratio`.
    """
    least = plan.order_lower_bound_bytes or 0
    return any(point.arena_bytes <= least and point.extra_seconds_ratio <= extra for point in points)


def _points(program: Program, curve: Curve, floor: int) -> list[Point]:
    """Some plans of a program, along its curve.

    Args:
        floor: bytes of arena that another program needs at another time.
    """
    plans, counted = dict[int, Plan](), beside(program)
    for index in _chosen(curve):
        found = curve.plan(index)
        plans.setdefault(max(found.arena_bytes, floor), found)
    points = []
    for arena, found in plans.items():
        costs, whole = program.costs(found), arena if counted is None else arena + counted(found)
        host, extra = host_bytes(program, found), (costs.extra_flops_ratio, costs.extra_seconds_ratio)
        points.append(
            Point(whole, Memory.of(program, found).peak, arena, host, found.lower_bound_bytes, *extra, len(found.steps))
        )
    return points


def _chosen(curve: Curve) -> list[int]:
    ratios = [each.extra_seconds_ratio for each in totals(curve.problem, [point.order for point in curve.points])]
    chosen = {0, len(curve) - 1}
    for share in SHARES:
        chosen.add(max((i for i, ratio in enumerate(ratios, 1) if ratio <= share), default=0))
    last = curve.base.arena
    for i, point in enumerate(curve.points, 1):
        if point.bound <= APART * last:
            chosen.add(i)
            last = point.bound
    return sorted(chosen)


def affordable(curve: Curve, most: int | None = None) -> Curve:
    """A curve up to a predicted time in nanoseconds; None: any. It begins as it did."""
    if most is None:
        return curve
    costs = totals(curve.problem, [point.order for point in curve.points])
    points = tuple(p for p, cost in zip(curve.points, costs) if cost.nanoseconds <= most)
    return Curve(curve.problem, curve.base, points)

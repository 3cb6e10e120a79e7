"""The cost of less memory, by recomputation: the curve of a program, and the largest batch that fits a memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from foreplan.lower.outside import beside
from foreplan.lower.program import Program
from foreplan.planner import Curve, Plan, Problem, plan_curve, totals
from foreplan.views.memory import Memory

SHARES = (0.01, 0.05, 0.20)  # the lowest plans within these shares of added time are always points
APART = 0.96  # other points are at least this much lower than the one before
BISECT = 3  # consecutive answers on one side, after which the limit is sought in the middle
FARTHEST = 16  # the next count tried is at most this many times one that fits


@dataclass(frozen=True)
class Point:
    """One plan of the curve.

    Attributes:
        budget_bytes: the smallest budget that gives this plan: of the whole card, or of the arena on the host.
        peak_bytes: the arena and the memory outside it; see `Memory.peak`.
        arena_bytes: height of the arena.
        host_bytes: host memory for values copied there; 0 where the program offers no copies.
        lower_bound_bytes: highest live set of its schedule.
        extra_flops_ratio: added flops over those of the fastest kernels without recomputation.
        extra_seconds_ratio: likewise of predicted time.
        instructions: how many it runs.
    """

    budget_bytes: int
    peak_bytes: int
    arena_bytes: int
    host_bytes: int
    lower_bound_bytes: int
    extra_flops_ratio: float
    extra_seconds_ratio: float
    instructions: int


def host_bytes(problem: Problem, found: Plan) -> int:
    """Heights of the regions off the device."""
    return sum(height for height, region in zip(found.heights, problem.regions) if not region.on_device)


def pareto(problem: Problem, floor: int = 0) -> tuple[Point, ...]:
    """The curve that budgets choose from, by descending arena: no recomputation, the lowest plans found within +1 %,
    +5 % and +20 % of predicted time, the least possible found, and points between. No other is as low and as fast.

    Args:
        problem: the problem to plan.
        floor: bytes of arena that another program needs at another time.
    """
    counted = beside(problem) if isinstance(problem, Program) else None
    curve = plan_curve(problem)
    plans: dict[int, Plan] = {}
    for index in _chosen(curve):
        found = curve.plan(index)
        plans.setdefault(max(found.arena_bytes, floor), found)
    points = []
    orders = [[step.action for step in found.steps] for found in plans.values()]
    for (arena, found), costs in zip(plans.items(), totals(problem, orders)):
        host, extra = host_bytes(problem, found), (costs.extra_flops_ratio, costs.extra_seconds_ratio)
        whole = arena if counted is None else arena + counted(found)
        points.append(
            Point(whole, Memory.of(problem, found).peak, arena, host, found.lower_bound_bytes, *extra, len(found.steps))
        )
    points.sort(key=lambda point: (point.extra_seconds_ratio, point.arena_bytes))
    lowest = itertools.accumulate((point.arena_bytes for point in points), min)
    before = itertools.chain([points[0].arena_bytes + 1], lowest)
    return tuple(point for point, least in zip(points, before) if point.arena_bytes < least)


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


def affordable(problem: Problem, most: float | None = None) -> Curve:
    """The curve of added time, up to a share of the time of the fastest kernels without recomputation."""
    curve = plan_curve(problem)
    if most is None:
        return curve
    costs = totals(problem, [point.order for point in curve.points])
    points = tuple(p for p, cost in zip(curve.points, costs) if cost.extra_seconds_ratio <= most)
    return Curve(problem, curve.base, points)


def largest(needed: Callable[[int], int], memory: int, first: int = 1, fixed: int = 0) -> int:
    """The largest count (of samples, say) that fits, if a larger count never needs less; else a count that fits,
    followed by one that does not.

    The bytes needed grow nearly in proportion to the count. So the next count tried is where a straight line through
    the known counts meets the memory. Bisection takes over if the tries stay on one side (as in the Illinois form of
    regula falsi: Dowell and Jarratt, BIT 1971).

    Args:
        needed: the bytes that a count needs: at most `memory` where the count fits.
        memory: bytes available.
        first: the count to try first.
        fixed: about the bytes that every count needs.

    Returns:
        0 where not even one fits.
    """
    low, high = (0, min(fixed, memory)), None
    count, streak, fitted = first, 0, None
    while True:
        nbytes = needed(count)
        streak = streak + 1 if (nbytes <= memory) is fitted else 1
        fitted = nbytes <= memory
        if fitted:
            low = count, nbytes
        else:
            high = count, nbytes
        if high is not None and high[0] - low[0] <= 1:
            return low[0]
        if high is None:
            grown = nbytes - fixed
            guess = (memory - fixed) * count // grown if grown > 0 else FARTHEST * count
            count = min(max(guess, count + 2 ** max(streak - 2, 0)), FARTHEST * count)
        elif streak >= BISECT:
            count = (low[0] + high[0]) // 2
        else:
            line = low[0] + (memory - low[1]) * (high[0] - low[0]) // (high[1] - low[1])
            count = min(max(line, low[0] + 1), high[0] - 1)

"""What memory costs in recomputation: the curve of a program, and the largest batch that fits a memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from foreplan.planner import Curve, Plan, Problem, plan_curve

SHARES = (0.01, 0.05, 0.20)  # the lowest plans within these shares of added flops and time are always points
APART = 0.96  # other points are at least this much lower than the one before


@dataclass(frozen=True)
class Point:
    """One plan of the curve.

    Attributes:
        budget_bytes: the smallest budget that gives it.
        peak_bytes: what the step needs on the device.
        arena_bytes: height of the arena.
        lower_bound_bytes: highest live set of its schedule.
        extra_flops_ratio: added flops over those without recomputation.
        extra_seconds_ratio: likewise of predicted time.
        instructions: how many it runs.
    """

    budget_bytes: int
    peak_bytes: int
    arena_bytes: int
    lower_bound_bytes: int
    extra_flops_ratio: float
    extra_seconds_ratio: float
    instructions: int


def extra_ratios(problem: Problem, order: Sequence[int], base: Sequence[int]) -> tuple[float, float]:
    """Added flops and predicted time of a schedule over another that runs each action once."""
    actions = problem.actions
    flops = sum(actions[index].flops for index in base)
    nanoseconds = sum(actions[index].nanoseconds for index in base)
    more_flops = sum(actions[index].flops for index in order) - flops
    more_nanoseconds = sum(actions[index].nanoseconds for index in order) - nanoseconds
    return more_flops / flops if flops else 0.0, more_nanoseconds / nanoseconds if nanoseconds else 0.0


def pareto(problem: Problem, floor: int = 0) -> tuple[Point, ...]:
    """The curve by descending arena: no recomputation, the lowest plans found within +1 %, +5 % and +20 % of flops and
    of predicted time, the least possible found, and points between.

    Args:
        problem: what is planned.
        floor: bytes of arena that are needed for something else at another time.
    """
    plans: dict[int, tuple[Plan, Curve]] = {}
    for cost, which in (("nanoseconds", 1), ("flops", 0)):
        curve = plan_curve(problem, cost)
        for index in _chosen(curve, which):
            found = curve.plan(index)
            plans.setdefault(max(found.arena_bytes, floor), (found, curve))
    points = []
    for arena, (found, curve) in sorted(plans.items(), reverse=True):
        order = [step.action for step in found.steps]
        ratios = extra_ratios(problem, order, curve.base.schedule.order)
        points.append(Point(arena, arena, arena, found.lower_bound_bytes, *ratios, len(order)))
    return tuple(point for i, point in enumerate(points) if not any(_beats(other, point) for other in points[i + 1 :]))


def _chosen(curve: Curve, which: int) -> list[int]:
    base = curve.base.schedule.order
    ratios = [extra_ratios(curve.problem, point.order, base)[which] for point in curve.points]
    chosen = {0, len(curve) - 1}
    for share in SHARES:
        chosen.add(max((i for i, ratio in enumerate(ratios, 1) if ratio <= share), default=0))
    last = curve.base.arena
    for i, point in enumerate(curve.points, 1):
        if which == 1 and point.bound <= APART * last:
            chosen.add(i)
            last = point.bound
    return sorted(chosen)


def _beats(a: Point, b: Point) -> bool:
    return (
        a.arena_bytes <= b.arena_bytes
        and a.extra_flops_ratio <= b.extra_flops_ratio
        and a.extra_seconds_ratio <= b.extra_seconds_ratio
    )


def plan_within(problem: Problem, memory: int, most_flops: float | None = None, *, thorough: bool = True) -> Plan:
    """The plan of least added time within a memory, or of least added flops where their share has a limit.

    Raises:
        DoesNotFitError: there is none; with the smallest plan there is.
    """
    curve = plan_curve(problem, "nanoseconds" if most_flops is None else "flops", thorough=thorough)
    if most_flops is None:
        return curve.within(memory)
    base = curve.base.schedule.order
    points = tuple(p for p in curve.points if extra_ratios(problem, p.order, base)[0] <= most_flops)
    return Curve(problem, curve.base, points).within(memory)


def largest(needed: Callable[[int], int], memory: int, first: int = 1) -> int:
    """The largest count (of samples, say) that fits, if what one count needs never exceeds what a larger one does.

    Args:
        needed: from a count to the bytes of a plan that fits, or of the smallest one where none does.
        memory: bytes that are there.
        first: the count to try first.

    Returns:
        0 where not even one fits.
    """
    low, high, step = 0, 0, 1
    count = first
    while True:
        if needed(count) <= memory:
            low = count
        else:
            high = count
        if high and high - low <= 1:
            return low
        if not high or not low:
            # Away from the first by steps that double: the limit is often near.
            count = low + step if low else max(1, high - step)
            step *= 2
        else:
            count = (low + high) // 2

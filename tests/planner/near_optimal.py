"""Compares budgeted plans with the exact optimum, at shares of the arena that the plan without recomputation needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from foreplan.base.errors import DoesNotFitError
from foreplan.planner import Problem, plan, plan_curve
from foreplan.planner.placement.layout import arena_bytes, lay_out, schedule
from foreplan.planner.recompute.schedules import late_updates
from tests.planner.exact_remat import Exact, Formulation

SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4)


@dataclass(frozen=True)
class Comparison:
    """One problem within one budget.

    Attributes:
        budget: bytes.
        ours: nanoseconds of the planner's plan, or None where it finds none.
        exact: the optimum over the planner's order and, where its plan puts off first runs, over that order too.
        placed: whether the planner's placer keeps the optimal schedule, whose live bytes are within the budget, there.
    """

    share: float
    budget: int
    ours: int | None
    exact: Exact
    placed: bool

    @property
    def ratio(self) -> float | None:
        """What the plan costs over the least; None where either is missing or the least is not proved."""
        if self.ours is None or self.exact.cost is None or not self.exact.proved:
            return None
        return self.ours / self.exact.cost

    @property
    def missed(self) -> bool:
        """Whether there is a schedule within the budget, and placed there, and the planner finds none."""
        return self.ours is None and self.exact.cost is not None and self.placed


def compare(problem: Problem, seconds: float, shares: Sequence[float] = SHARES) -> Iterator[Comparison]:
    """Comparisons by falling budget, down to where it is proved that nothing fits.

    Args:
        seconds: after which the solver gives up on one budget and order.
    """
    whole = plan(problem, remat="off")
    order = late_updates(problem, [step.action for step in whole.steps])
    cost = [action.nanoseconds for action in problem.actions]
    curve = plan_curve(problem)
    for share in shares:
        budget = int(whole.arena_bytes * share)
        try:
            steps = [step.action for step in curve.within(budget).steps]
        except DoesNotFitError:
            steps = []
        first_runs = list(dict.fromkeys(steps)) or order
        orders = [order] if first_runs == order else [order, first_runs]
        exact = least([Formulation(problem, each, budget).solve(cost, seconds, steps or None) for each in orders])
        ours = sum(cost[index] for index in steps) if steps else None
        yield Comparison(share, budget, ours, exact, exact.order is not None and arena(problem, exact.order) <= budget)
        if ours is None and exact.proved and exact.cost is None:
            return


def arena(problem: Problem, order: Sequence[int]) -> int:
    """Bytes of an order's arena as the planner places it."""
    return arena_bytes(problem, lay_out(problem, schedule(problem, "", order)).heights)


def least(found: Sequence[Exact]) -> Exact:
    """The best of several searches, proved where all are."""
    solved = [one for one in found if one.cost is not None]
    best = min(solved, key=lambda one: one.cost or 0, default=found[0])
    bounds = [one.bound for one in found if one.bound is not None]
    return Exact(best.order, best.cost, min(bounds, default=None), all(one.proved for one in found))

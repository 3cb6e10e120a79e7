"""Costs: of actions, and of schedules against the base of every ratio that foreplan reports."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from numbers import Integral

from foreplan.base.errors import UsageError
from foreplan.planner.candidates import merge_candidates
from foreplan.planner.order.dependences import dependences
from foreplan.planner.problem import Action, Problem, Role
from foreplan.planner.verify.wellformed import check_problem

COSTS = ("nanoseconds", "flops")


@dataclass(frozen=True, slots=True)
class Totals:
    """The costs of some schedules together, and of the same steps without recomputation and copies, by the fastest
    kernels.

    Attributes:
        flops: floating-point operations.
        nanoseconds: predicted time.
        base_flops, base_nanoseconds: of the base (`fastest`).
    """

    flops: int
    nanoseconds: int
    base_flops: int
    base_nanoseconds: int

    def __add__(self, other: Totals) -> Totals:
        return Totals(*map(operator.add, astuple(self), astuple(other)))

    def __mul__(self, times: int) -> Totals:
        return Totals(*[times * total for total in astuple(self)])

    @property
    def extra_flops_ratio(self) -> float:
        """Added flops over those of the base; below 0 where slower kernels have fewer. 0 where the base has none."""
        return self.flops / self.base_flops - 1 if self.base_flops else 0.0

    @property
    def extra_seconds_ratio(self) -> float:
        """Added time over that of the base; 0 where the base takes none."""
        return self.nanoseconds / self.base_nanoseconds - 1 if self.base_nanoseconds else 0.0


def costs_of(problem: Problem, cost: str) -> list[int]:
    """What one run of each action costs, for choosing between schedules.

    Bytes moved weigh next to nothing: they decide between actions without flops. Where nothing is known, the number of
    runs counts. A copy off the device has no flops: it counts as the average number of flops that run in its time.

    Args:
        cost: "nanoseconds" or "flops"; where no action has nanoseconds, flops count.

    Raises:
        UsageError: another cost.
    """
    if cost not in COSTS:
        raise UsageError(f"a cost must be one of {', '.join(map(repr, COSTS))}, got {cost!r}")
    flops = [action.flops + action.nbytes // 64 for action in problem.actions]
    others = [i for i in range(len(flops)) if i not in problem.copies]
    total, time = sum(flops[i] for i in others), sum(problem.actions[i].nanoseconds for i in others)
    for i in problem.copies:
        flops[i] += problem.actions[i].nanoseconds * total // max(time, 1)
    known = [[action.nanoseconds for action in problem.actions]] if cost == "nanoseconds" else []
    return next((costs for costs in (*known, flops) if any(costs)), [1] * len(problem.actions))


def free_costs(problem: Problem) -> list[int]:
    """Costs in which a narrow copy of a stored value, such as of a weight in bfloat16, is made at no cost.

    It says nothing that the stored value does not say. So holding it from one reader to the next is no gain that a
    plan without a budget should pay for with bytes at its peak.
    """
    costs = costs_of(problem, "nanoseconds")
    return [0 if _narrows(problem, action) else cost for action, cost in zip(problem.actions, costs)]


def _narrows(problem: Problem, action: Action) -> bool:
    """Whether an action makes one smaller value of a stored one, and reads nothing else."""
    if len(action.reads) != 1 or len(action.writes) != 1 or action.effect:
        return False
    source, result = problem.values[action.reads[0]], problem.values[action.writes[0]]
    return source.role is Role.STORED and result.nbytes < source.nbytes


def fastest(problem: Problem) -> tuple[int, ...]:
    """The base: the actions that run, once each, when nothing is recomputed and each is the fastest of its candidates.

    It depends on the problem alone, and on no plan. What the problem itself has again (`Problem.repeats`) is no part.
    """
    costs = costs_of(problem, "nanoseconds")
    lean = merge_candidates(problem, costs)
    found = (min(lean.sets[i], key=lambda action: costs[action]) for i in dependences(lean.problem).actions)
    return tuple(action for action in found if action not in problem.repeats)


def totals(problem: Problem, orders: Iterable[Sequence[int]]) -> list[Totals]:
    """The cost of each of several schedules of a problem, with the base.

    Args:
        orders: schedules, each a sequence of indices of actions.

    Raises:
        PlanError: the problem is not well-formed (`check_problem`).
        UsageError: an order names an action that is not there.
    """
    check_problem(problem)
    orders = _known(problem, orders)
    base = _sums(problem, fastest(problem))
    return [Totals(*_sums(problem, order), *base) for order in orders]


def _known(problem: Problem, orders: Iterable[Sequence[int]]) -> list[Sequence[int]]:
    """The orders, each of which runs actions of the problem only."""
    count = len(problem.actions)
    found = list(orders) if isinstance(orders, Iterable) else [orders]
    for order in found:
        if not isinstance(order, Sequence) or not all(isinstance(i, Integral) and 0 <= int(i) < count for i in order):
            raise UsageError(
                f"an order is a sequence of indices of actions, each from 0 to {count - 1}, got {order!r:.80}"
            )
    return found


def _sums(problem: Problem, order: Sequence[int]) -> tuple[int, int]:
    actions = [problem.actions[index] for index in order]
    return sum(action.flops for action in actions), sum(action.nanoseconds for action in actions)

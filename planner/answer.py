"""The proof that a plan, beyond being right, does what was asked: within its budget, and recomputing what it may."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from foreplan.base.errors import VerificationError
from foreplan.planner.candidates import Lean, merge_candidates
from foreplan.planner.costs import free_costs
from foreplan.planner.order.dependences import dependences
from foreplan.planner.plan import Plan
from foreplan.planner.problem import Problem
from foreplan.planner.recompute.arrays import may_run_again
from foreplan.planner.recompute.front import FREE, Beside, whole_bytes

MOST_RUNS = 16  # of an action, on average: no search finds as many


def check_answer(plan: Plan, problem: Problem, budget: int | float | None, remat: str, beside: Beside | None) -> None:
    """Prove what `verify` leaves open of a plan that somebody else has found: that it answers the question.

    That is: it is within the budget; it runs again only what may run again, and nothing with `remat="off"` but copies;
    without a budget that adds at most 1 % to the predicted time. That no better plan would be found is not proved.

    Args:
        plan: a right one, as `verify` proves.
        budget: in bytes, of which the plan names as many; a share, for which no number is proved; or None.
        remat: "auto" or "off".
        beside: the bytes that a plan takes beside its arena, where a budget in bytes holds for both.

    Raises:
        VerificationError: says what was not asked for.
    """
    if isinstance(budget, float):
        if plan.budget is None:
            raise VerificationError("it names no budget")
    elif plan.budget != budget:
        raise VerificationError(f"it was made for a budget of {plan.budget} bytes, not {budget}")
    elif budget is not None and (nbytes := whole_bytes(plan, beside)) > budget:
        raise VerificationError(f"it needs {nbytes} bytes, more than its budget of {budget}")
    for number, step in enumerate(plan.steps):
        if step.workspace and not problem.actions[step.action].workspace:
            raise VerificationError(f"step {number} needs no workspace, but has one at {step.workspace}")
    costs = free_costs(problem)
    lean = merge_candidates(problem, costs)
    base = dependences(lean.problem).actions
    _check_runs(plan, lean, base, remat)
    once, found = sum(lean.costs[index] for index in base), sum(costs[step.action] for step in plan.steps)
    if budget is None and found > once + once // FREE:
        raise VerificationError(f"its steps cost {found}, {once} without recomputation; 1/{FREE} more is allowed")


def _check_runs(plan: Plan, lean: Lean, base: Collection[int], remat: str) -> None:
    """Nothing runs again that may not: what the planner would run without recomputation runs once."""
    problem = lean.problem
    runs = Counter(step.action for step in plan.steps)
    if len(plan.steps) > MOST_RUNS * len(problem.actions):
        raise VerificationError(f"it has {len(plan.steps)} steps for {len(problem.actions)} actions")
    first = set(base)
    for index, candidates in enumerate(lean.sets):
        action = problem.actions[index]
        moves = index in problem.copies and not any(problem.values[v].kept for v in action.writes)
        again = moves or (remat != "off" and may_run_again(problem, action))
        times = sum(runs[candidate] for candidate in candidates)
        if not again and times > (index in first):
            raise VerificationError(f"it runs {action.name!r} {times} times, more often than it may")

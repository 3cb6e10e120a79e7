"""The plan of a program, verified, kept from run to run, with advice where it does not fit."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from foreplan.base.arguments import REMAT, choice, instance, names_in
from foreplan.base.errors import DoesNotFitError, UsageError
from foreplan.compiler.advice import explained, keeping_less
from foreplan.compiler.kept_plans import kept_plan
from foreplan.compiler.segments import plan_checkpoints
from foreplan.lower import Program
from foreplan.lower.outside import beside
from foreplan.planner import Beside, Plan, Problem

CHOOSES = "checkpoint says what is recomputed, and {} lets the planner choose: give one"


def plan(
    problem: Problem, budget: int | float | str | None = None, remat: str = "auto", checkpoint: Iterable[str] = ()
) -> Plan:
    """The lowest plan found for a problem, verified: see `foreplan.planner.plan`.

    Args:
        budget, remat: see `foreplan.planner.plan`. Of a program for a card, a budget in bytes holds for all that the
            process takes there: see `compile`.
        checkpoint: segments of a program to recompute, and nothing else: see `compile`.

    Raises:
        DoesNotFitError: the budget cannot be met; shows the peak with its largest buffers, and what to try next.
        PlanError, UsageError: as the planner's own.
    """
    instance("what is planned", problem, Problem, "make one with lower(graph, target)")
    choice("remat", remat, REMAT)
    if entries := names_in("checkpoint", checkpoint):
        if budget is not None:
            raise UsageError(CHOOSES.format("a budget"))
        if not isinstance(problem, Program):
            raise UsageError("checkpoint names operations, and a problem has none: give what `lower` returns")
        if problem.copies:
            raise UsageError(CHOOSES.format("offload"))
        return plan_checkpoints(problem, entries)
    return within(problem, budget, remat, beside(problem) if isinstance(problem, Program) else None)


def within(problem: Problem, budget: int | float | str | None, remat: str, counted: Beside | None) -> Plan:
    """The plan of least cost within a budget, for the arena and what is counted beside it."""
    try:
        return kept_plan(problem, budget, remat, counted)
    except DoesNotFitError as error:

        def fits(other: Problem) -> bool:
            with suppress(DoesNotFitError):
                return bool(kept_plan(other, budget, remat, counted))
            return False

        raise explained(error, problem, keeping_less(error, problem, fits)) from None

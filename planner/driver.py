"""The stages of planning, top to bottom: order, alias, offsets, certificate, check."""

from __future__ import annotations

import math
from dataclasses import replace

from foreplan.errors import DoesNotFitError, UsageError
from foreplan.planner.bound import order_bound
from foreplan.planner.dependences import dependences
from foreplan.planner.layout import Layout, Schedule, arena_bytes, assemble, lay_out, schedule
from foreplan.planner.order import HEURISTICS
from foreplan.planner.plan import Plan
from foreplan.planner.problem import Problem
from foreplan.planner.report import buffers
from foreplan.planner.verify import verify
from foreplan.units import format_bytes, parse_bytes

REMAT = ("off", "free", "auto")
ADVICE = (
    "a smaller batch or shorter sequences",
    "an optimizer with less state",
    "a larger budget; this planner does not recompute activations to save memory yet",
)


def plan(problem: Problem, budget: int | float | str | None = None, remat: str = "free") -> Plan:
    """The lowest plan found for a problem, verified; a function of the problem alone, whatever the budget.

    Args:
        budget: what the arena must stay within: bytes, text such as "2GiB", or, as a float, a share of the arena that
            is needed without a budget. The plan does not depend on it: either it fits, or this raises.
        remat: what may be recomputed to save memory: nothing ("off"), what costs no time ("free"), or whatever the
            budget asks for ("auto"). This planner recomputes nothing yet, so all three give the same plan.

    Raises:
        DoesNotFitError: the arena exceeds the budget; says what fills it, and what to try.
        PlanError: the problem allows no plan.
        UsageError: a budget or `remat` that cannot be understood.
    """
    _check_options(budget, remat)
    chosen, layout, stages = _search(problem)
    found = assemble(problem, chosen, layout, order_bound(problem), stages)
    verify(found, problem)
    if budget is None:
        return found
    allowed = math.floor(found.arena_bytes * budget) if isinstance(budget, float) else parse_bytes(budget)
    if found.arena_bytes > allowed:
        raise _does_not_fit(found, problem, allowed)
    return replace(found, budget=allowed)


def _check_options(budget: int | float | str | None, remat: str) -> None:
    if remat not in REMAT:
        raise UsageError(f"remat must be one of {', '.join(map(repr, REMAT))}, got {remat!r}")
    if isinstance(budget, bool) or (isinstance(budget, float) and not 0 < budget < math.inf):
        raise UsageError(f"a budget is bytes, text such as '2GiB', or a float above 0 as a share, got {budget!r}")
    if isinstance(budget, str | int):
        parse_bytes(budget)


def _search(problem: Problem) -> tuple[Schedule, Layout, tuple[tuple[str, int], ...]]:
    """The best schedule and layout over all orders, and the arena after each improvement, from program order on.

    Orders are laid out by ascending bound, and those whose bound is not below the best arena so far not at all.
    """
    graph = dependences(problem)
    candidates: list[Schedule] = []
    seen: set[tuple[int, ...]] = set()
    for name, heuristic in HEURISTICS.items():
        order = tuple(heuristic(problem, graph))
        if order not in seen:
            seen.add(order)
            candidates.append(schedule(problem, name, order))
    best, others = candidates[0], candidates[1:]
    layout = lay_out(problem, best)
    arena = arena_bytes(problem, layout.heights)
    stages = [(best.name, arena)]
    for candidate in sorted(others, key=lambda other: other.bound):
        if candidate.bound >= arena:
            break
        trial = lay_out(problem, candidate)
        if (height := arena_bytes(problem, trial.heights)) < arena:
            best, layout, arena = candidate, trial, height
            stages.append((best.name, arena))
    return best, layout, tuple(stages)


def _does_not_fit(found: Plan, problem: Problem, allowed: int) -> DoesNotFitError:
    peak = found.certificate.peak_step
    name = problem.actions[found.steps[peak].action].name if found.steps else "no action"
    live = [buffer for buffer in buffers(found, problem) if buffer.lower <= peak < buffer.upper]
    live = [buffer for buffer in live if problem.regions[buffer.region].on_device]
    live.sort(key=lambda buffer: (-buffer.nbytes, buffer.value))
    largest = ", ".join(
        f"{problem.values[b.value].name if b.value >= 0 else 'workspace'} {format_bytes(b.nbytes)}" for b in live[:5]
    )
    bound = found.lower_bound_bytes
    hopeless = ""
    if found.order_lower_bound_bytes is not None and found.order_lower_bound_bytes > allowed:
        hopeless = f"; no order of these actions needs less than {format_bytes(found.order_lower_bound_bytes)}"
    return DoesNotFitError(
        f"needs {format_bytes(found.arena_bytes)} ({found.arena_bytes} bytes), allowed are {format_bytes(allowed)} "
        f"({allowed} bytes); this schedule's lower bound is {format_bytes(bound)}{hopeless}. The peak is at step "
        f"{peak} ({name}); largest there: {largest}. Try {', or '.join(ADVICE)}.",
        needed=found.arena_bytes,
        capacity=allowed,
        lower_bound=bound,
        plan=found,
        advice=ADVICE,
    )

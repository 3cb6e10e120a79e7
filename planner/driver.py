"""The stages of planning, top to bottom: order, alias, recompute, offsets, certificate, check."""

from __future__ import annotations

from fractions import Fraction

from foreplan.base.arguments import REMAT, choice
from foreplan.base.errors import DoesNotFitError
from foreplan.base.units import format_bytes, parse_budget
from foreplan.planner.candidates import merge_candidates
from foreplan.planner.costs import costs_of, free_costs, totals
from foreplan.planner.effort import USUAL, Effort
from foreplan.planner.order.best import improve
from foreplan.planner.order.dependences import dependences
from foreplan.planner.order.heuristics import HEURISTICS
from foreplan.planner.placement.layout import Schedule, arena_bytes, lay_out, schedule
from foreplan.planner.plan import Plan
from foreplan.planner.problem import Problem
from foreplan.planner.recompute.candidate_front import choose_candidates
from foreplan.planner.recompute.front import Base, Beside, Curve, free_cost, free_curve, whole_bytes, whole_curve
from foreplan.planner.report import buffers
from foreplan.planner.verify.wellformed import MOST, check_problem


def plan(
    problem: Problem,
    budget: int | float | str | None = None,
    remat: str = "auto",
    *,
    beside: Beside | None = None,
    effort: Effort = USUAL,
) -> Plan:
    """The lowest plan found for a problem, or the cheapest within a budget; verified.

    Args:
        budget: the most bytes of the arena: a number, text such as "2GiB", or a float, which is a share of the arena of
            the fastest actions without recomputation.
        remat: what may be recomputed to save memory. "off": nothing. "auto": without a budget, what adds at most 1 %
            to the predicted time; with a budget, as little as meets it. Beyond that 1 %, narrow copies of stored values
            are made again where that saves memory.
            Kernel candidates that are slower and need less workspace count as recomputation, but are also used
            with "off". So are copies off the device and back, where the problem has them.
        beside: the bytes that a plan takes beside its arena, of the same memory: a budget in bytes holds for both
            together. None: for the arena alone, as a share always does.
        effort: how long to search.

    All plans within budgets lie on one curve that does not depend on the budget, so a smaller budget never gives a
    larger plan.

    Raises:
        DoesNotFitError: no plan found stays within the budget; has the smallest, and says what fills it.
        PlanError: the problem is not well-formed (`check_problem`), or allows no plan.
        UsageError: a budget or `remat` that cannot be understood.
    """
    check_problem(problem)
    allowed = _allowed(budget, remat)
    costs = free_costs(problem) if allowed is None else costs_of(problem, "nanoseconds")
    lean = merge_candidates(problem, costs)
    base = find_base(lean.problem, effort)
    once = Curve(lean.problem, base, (), effort)
    if allowed is None:
        most = free_cost(base, lean.costs)
        found = once if remat == "off" else free_curve(lean.problem, base, lean.costs, most, effort)
        return choose_candidates(lean, costs, found, most).lowest(most)
    curve = choose_candidates(lean, costs, once)
    if isinstance(allowed, float):
        allowed, beside = min(int(Fraction(allowed) * curve.base.arena), MOST), None
    if _exceeds(curve, allowed, beside) and (remat != "off" or problem.copies):
        whole = whole_curve(lean.problem, base, lean.costs, effort, again=remat != "off")
        curve = choose_candidates(lean, costs, whole)
    try:
        return curve.within(allowed, beside)
    except DoesNotFitError as error:
        assert isinstance(error.plan, Plan)
        raise _does_not_fit(error, error.plan, problem, curve.base, remat) from None


def _exceeds(curve: Curve, allowed: int, beside: Beside | None) -> bool:
    """Whether the plan without recomputation is beyond a budget."""
    return curve.base.arena > allowed or (beside is not None and whole_bytes(curve.plan(0), beside) > allowed)


def plan_curve(problem: Problem, cost: str = "nanoseconds", *, thorough: bool = True, effort: Effort = USUAL) -> Curve:
    """All plans from no recomputation to the least bytes found.

    Args:
        cost: what recomputation should add little of: predicted "nanoseconds", from which budgets choose, or "flops". A
            copy off the device counts as the average number of flops that run in its time.
        thorough: search as long as for a budget; else a tenth of it or less, for plans some percent larger.
        effort: limits of all searches.

    Raises:
        PlanError: the problem is not well-formed (`check_problem`).
        UsageError: another cost.
    """
    check_problem(problem)
    costs = costs_of(problem, cost)
    lean = merge_candidates(problem, costs)
    base = find_base(lean.problem, effort)
    curve = whole_curve(lean.problem, base, lean.costs, effort, thorough=thorough)
    return choose_candidates(lean, costs, curve)


def _allowed(budget: object, remat: str) -> int | float | None:
    """A budget in bytes, or as a share if it is a float.

    Raises:
        UsageError: the budget is neither, or `remat` has no such value.
    """
    choice("remat", remat, REMAT)
    return None if budget is None else min(parse_budget(budget), MOST)


def find_base(problem: Problem, effort: Effort = USUAL) -> Base:
    """The best schedule and layout over all orders, and the arena after each improvement, from program order on.

    Orders are laid out by ascending bound, as long as that is below the best arena so far.
    """
    graph = dependences(problem)
    candidates: list[Schedule] = []
    seen: set[tuple[int, ...]] = set()
    for name, heuristic in HEURISTICS.items():
        order = tuple(heuristic(problem, graph))
        if order not in seen:
            seen.add(order)
            candidates.append(schedule(problem, name, order))
    start = min(candidates, key=lambda candidate: candidate.bound)
    better = improve(problem, graph, start.order, effort.order)
    if better is not None and better.nbytes < start.bound:
        candidates.append(schedule(problem, f"{start.name}, searched", better.order))
    best, others = candidates[0], candidates[1:]
    layout = lay_out(problem, best, effort.placement)
    arena = arena_bytes(problem, layout.heights)
    stages = [(best.name, arena)]
    for candidate in sorted(others, key=lambda other: other.bound):
        if candidate.bound >= arena:
            break
        trial = lay_out(problem, candidate, effort.placement)
        if (height := arena_bytes(problem, trial.heights)) < arena:
            best, layout, arena = candidate, trial, height
            stages.append((best.name, arena))
    return Base(best, layout, tuple(stages))


def _does_not_fit(error: DoesNotFitError, found: Plan, problem: Problem, base: Base, remat: str) -> DoesNotFitError:
    """The error of a curve, with what fills the peak of its smallest plan, and what to try."""
    needed, allowed = error.needed, error.capacity
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
        hopeless = f"; no schedule of these actions needs less than {format_bytes(found.order_lower_bound_bytes)}"
    price = _price(found, problem, base)
    larger = f"a budget of {format_bytes(needed)} or more, the least found{price}"
    advice = (*(("recomputing activations (remat='auto')",) if remat == "off" else ()), larger)
    return DoesNotFitError(
        f"needs {format_bytes(needed)} ({needed} bytes){price}, allowed are "
        f"{format_bytes(allowed)} ({allowed} bytes); this schedule's lower bound is {format_bytes(bound)}{hopeless}. "
        f"The peak is at step {peak} ({name}); largest there: {largest}. Try {', or '.join(advice)}.",
        needed=needed,
        capacity=allowed,
        lower_bound=bound,
        plan=found,
        advice=advice,
    )


def _price(found: Plan, problem: Problem, base: Base) -> str:
    """How much more the smallest plan costs than the one without recomputation, for people."""
    order = tuple(step.action for step in found.steps)
    if sorted(order) == sorted(base.schedule.order):
        return ""
    copies = any(action in problem.copies for action in order)
    longer = len(order) > len(base.schedule.order)
    what = "copies and recomputation" if copies else "recomputation" if longer else "kernels with less workspace"
    found_costs = totals(problem, [order])[0]
    priced = f" at {found_costs.extra_seconds_ratio:+.1%} of predicted time for {what}"
    return priced if found_costs.base_nanoseconds else f" with {what}"

"""What to try next when a step does not fit, in its mode and on its target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from foreplan.base.errors import DoesNotFitError
from foreplan.base.units import format_bytes
from foreplan.graph import Kind
from foreplan.lower import Program, engine_info
from foreplan.lower.program import HOST
from foreplan.planner import Beside, Plan, Problem, buffers, plan


def explained(error: DoesNotFitError, problem: Problem, first: tuple[str, ...] = ()) -> DoesNotFitError:
    """The planner's error, with a table of the bytes and, for a program, with what else can be tried. Without a plan
    the error stays as it is.

    Args:
        first: what to try before all else.
    """
    if error.plan is None:
        return error
    *own, budget = error.advice
    others = advice_for(problem) if isinstance(problem, Program) else ()
    return _told(error, problem, (*first, *own, *others, budget))


def keeping_less(error: DoesNotFitError, problem: Problem, fits: Callable[[Problem], bool]) -> tuple[str, ...]:
    """To keep less, where a budget fails only because of what is kept.

    Args:
        fits: whether a problem can be planned within the budget.
    """
    found = error.plan
    if not isinstance(found, Plan) or not any(value.kept for value in problem.values):
        return ()
    if not fits(replace(problem, values=tuple(replace(value, kept=False) for value in problem.values))):
        return ()
    peak = found.certificate.peak_step
    live = [b.value for b in buffers(found, problem) if b.value >= 0 and b.lower <= peak < b.upper]
    held = sum(problem.values[v].nbytes for v in live if problem.values[v].kept)
    return (f"keeping less: what is kept by name holds {format_bytes(held)} there, and without it this budget is met",)


def of_halves(body: DoesNotFitError, update: Program | None, beside: Beside | None = None) -> DoesNotFitError:
    """The error when a step, or its first half, does not fit. If the second half needs even more, the error has that
    half's peak and budget, and advice for both.

    Args:
        beside: the bytes that a plan of the second half takes beside its arena, where these count.
    """
    if update is None:
        return body
    try:
        plan(update, body.capacity, "auto", beside=beside)
    except DoesNotFitError as other:
        own = explained(other, update)
        if other.needed > body.needed and other.plan is not None:
            return _told(other, update, tuple(dict.fromkeys((*body.advice[:-1], *own.advice))))
    return body


def _told(error: DoesNotFitError, problem: Problem, advice: tuple[str, ...]) -> DoesNotFitError:
    from foreplan.report.memory import Memory, does_not_fit

    return DoesNotFitError(
        does_not_fit(Memory(problem, error.plan), error.needed, error.capacity, advice),
        needed=error.needed,
        capacity=error.capacity,
        lower_bound=error.lower_bound,
        plan=error.plan,
        advice=advice,
    )


def advice_for(program: Program) -> tuple[str, ...]:
    """What to change in the options, a line each."""
    trains, kinds = program.loss is not None, {slot.kind for slot in program.stored}
    advice = []
    if trains or Kind.ACCUMULATOR not in kinds:  # else it is the update, and its memory does not depend on the batch
        parts = " (accumulate=k takes k of them a step)" if trains and program.step_count else ""
        advice.append(f"a smaller batch{parts} or shorter sequences")
    if _has_optimizer_state(program):
        advice.append("an optimizer with less state")
    if trains and engine_info(program.target).on_card and len(program.regions) <= HOST:
        advice.append("copying activations to host memory (offload=True)")
    return tuple(advice)


def _has_optimizer_state(program: Program) -> bool:
    """Whether a tensor is kept for each parameter, as momentum is."""
    trained = {slot.name for slot in program.stored if slot.kind is Kind.PARAMETER}
    return any(slot.kind is Kind.STATE and slot.name.rpartition("/")[0] in trained for slot in program.stored)

"""What to try next where a step does not fit: what its mode and its target have."""

from __future__ import annotations

from foreplan.errors import DoesNotFitError
from foreplan.graph import Kind
from foreplan.lower import Program
from foreplan.lower.program import HOST
from foreplan.planner import Problem


def explained(error: DoesNotFitError, problem: Problem) -> DoesNotFitError:
    """What the planner says, with where the bytes are, and with what else can be tried where it is known what runs."""
    *first, budget = error.advice
    return _told(error, problem, (*first, *(advice_for(problem) if isinstance(problem, Program) else ()), budget))


def with_update(body: DoesNotFitError, update: DoesNotFitError, program: Program) -> DoesNotFitError:
    """Of two halves that both do not fit, the second needing more: its peak and budget, and what helps either half."""
    return _told(update, program, tuple(dict.fromkeys((*body.advice[:-1], *update.advice))))


def _told(error: DoesNotFitError, problem: Problem, advice: tuple[str, ...]) -> DoesNotFitError:
    from foreplan.views.memory import Memory, does_not_fit

    return DoesNotFitError(
        does_not_fit(Memory(problem, error.plan), error.capacity, advice),
        needed=error.needed,
        capacity=error.capacity,
        lower_bound=error.lower_bound,
        plan=error.plan,
        advice=advice,
    )


def advice_for(program: Program) -> tuple[str, ...]:
    """What to change in what is compiled, a line each."""
    trains, kinds = program.loss is not None, {slot.kind for slot in program.stored}
    advice = []
    if trains or Kind.ACCUMULATOR not in kinds:  # else it is the update after micro-batches, whatever these hold
        parts = " (accumulate=k takes k of them a step)" if trains and program.step_count else ""
        advice.append(f"a smaller batch{parts} or shorter sequences")
    if _has_optimizer_state(program):
        advice.append("an optimizer with less state")
    if trains and program.target.startswith("cuda") and len(program.regions) <= HOST:
        advice.append("copying activations to host memory (offload=True)")
    return tuple(advice)


def _has_optimizer_state(program: Program) -> bool:
    """Whether a tensor is kept for each parameter, as momentum is."""
    trained = {slot.name for slot in program.stored if slot.kind is Kind.PARAMETER}
    return any(slot.kind is Kind.STATE and slot.name.rpartition("/")[0] in trained for slot in program.stored)

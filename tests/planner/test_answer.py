"""Whether a right plan is an answer to the question: all plans that the planner finds are, and edited ones are not."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreplan.base.errors import DoesNotFitError, VerificationError
from foreplan.base.units import parse_budget
from foreplan.planner import Action, Plan, Problem, Role, Step, Value, plan, verify
from foreplan.planner.answer import check_answer
from foreplan.planner.memory.bounds import live_bytes
from tests.planner.problems import priced, random_problem, training_chain, with_round_trips
from tests.profile import pick


@settings(max_examples=pick(10, 20, 150), deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(1, 14),
    st.booleans(),
    st.sampled_from(["auto", "off"]),
    st.sampled_from([None, 0.95, 0.8, 0.6, "least"]),
)
def test_all_that_the_planner_finds_is_an_answer(
    seed: int, actions: int, trips: bool, remat: str, budget: float | str | None
) -> None:
    problem = priced(random_problem(seed, actions), seed)
    problem = with_round_trips(problem, seed) if trips else problem
    try:
        if budget == "least":
            budget = max(plan(problem, None, remat).arena_bytes - 64, 1)
        found = plan(problem, budget, remat)
    except DoesNotFitError:
        return
    check_answer(found, problem, None if budget is None else parse_budget(budget), remat, None)


def chain() -> Problem:
    """x -> a -> b -> c -> y, where y reads a as well: a may be made again."""
    names = ("x", "a", "b", "c", "y")
    roles = (Role.INPUT, *[Role.TRANSIENT] * 3, Role.OUTPUT)
    reads = ((0,), (1,), (2,), (3, 1))
    return Problem(
        tuple(Value(name, 1024 * (1 + 9 * (name in "ac")), role=role) for name, role in zip(names, roles)),
        tuple(Action(f"to_{names[i + 1]}", read, (i + 1,), nanoseconds=100) for i, read in enumerate(reads)),
    )


def with_order(found: Plan, problem: Problem, order: list[int]) -> Plan:
    """A right plan of other steps, in which every value lies alone."""
    at = {v: 16384 * v for v in range(len(problem.values))}
    steps = tuple(
        Step(i, *(tuple(at[v] for v in values) for values in (problem.actions[i].reads, problem.actions[i].writes)))
        for i in order
    )
    height, live = 16384 * len(at), live_bytes(problem, order)
    made = replace(
        found,
        steps=steps,
        starts=((0, 0),),
        ends=((4, at[4]),),
        heights=(height,),
        arena_bytes=height,
        lower_bound_bytes=int(live.max()),
        certificate=replace(found.certificate, peak_step=int(live.argmax())),
    )
    verify(made, problem)
    return made


def refused(found: Plan, problem: Problem, message: str, budget: float | None = None, remat: str = "auto") -> None:
    with pytest.raises(VerificationError, match=message):
        check_answer(found, problem, budget, remat, None)


def test_a_budget_is_the_one_that_was_asked_for() -> None:
    problem = chain()
    found = plan(problem)
    check_answer(found, problem, None, "auto", None)
    refused(found, problem, "for a budget of None bytes, not 99999", 99999)
    within = replace(found, budget=99999)
    check_answer(within, problem, 99999, "auto", None)
    refused(within, problem, "for a budget of 99999 bytes, not None")
    refused(within, problem, "for a budget of 99999 bytes, not 99998", 99998)
    refused(found, problem, "names no budget", 1.0)
    check_answer(within, problem, 1.0, "auto", None)


def test_what_lies_beside_the_arena_counts_toward_a_budget() -> None:
    problem = chain()
    found = plan(problem)
    found = replace(found, budget=found.arena_bytes + 100)
    check_answer(found, problem, found.budget, "auto", lambda _: 100)
    with pytest.raises(VerificationError, match=f"needs {found.arena_bytes + 101} bytes, more than its budget"):
        check_answer(found, problem, found.budget, "auto", lambda _: 101)


def test_recomputation_is_what_was_allowed() -> None:
    problem = chain()
    again = with_order(plan(problem), problem, [0, 1, 2, 0, 3])
    refused(again, problem, "its steps cost 500, 400 without recomputation")
    refused(again, problem, re.escape("runs 'to_a' 2 times"), remat="off")
    within = replace(again, budget=again.arena_bytes)
    check_answer(within, problem, within.budget, "auto", None)
    refused(within, problem, re.escape("runs 'to_a' 2 times"), within.budget, remat="off")
    kept = replace(problem, values=tuple(replace(v, kept=v.name == "a") for v in problem.values))
    refused(replace(within, problem_digest=kept.digest), kept, "runs 'to_a' 2 times", within.budget)


def test_another_producer_is_recomputation_too() -> None:
    problem = chain()
    other = replace(problem.actions[0], name="to_a_again", reads=(2,), nanoseconds=1)
    problem = replace(problem, actions=(*problem.actions, other))
    again = with_order(plan(problem), problem, [0, 1, 4, 2, 3])
    again = replace(again, budget=again.arena_bytes)
    check_answer(again, problem, again.budget, "auto", None)
    refused(again, problem, "runs 'to_a_again' 1 times", again.budget, remat="off")


def test_candidates_of_one_action_are_one() -> None:
    problem = chain()
    problem = replace(problem, actions=(*problem.actions, replace(problem.actions[0], name="slower", nanoseconds=200)))
    once = replace(with_order(plan(problem), problem, [4, 1, 2, 3]), budget=1 << 20)
    check_answer(once, problem, 1 << 20, "off", None)
    both = replace(with_order(once, problem, [0, 4, 1, 2, 3]), budget=1 << 20)
    refused(both, problem, "runs 'to_a' 2 times", 1 << 20, remat="off")


def test_no_plan_runs_for_ever() -> None:
    problem = training_chain(2)
    found = replace(plan(problem), budget=1 << 40)
    endless = replace(found, steps=found.steps * 17)
    refused(endless, problem, "steps for", 1 << 40)


def test_what_needs_no_workspace_has_none() -> None:
    found = plan(chain())
    (first, *others) = found.steps
    refused(replace(found, steps=(replace(first, workspace=64), *others)), chain(), "step 0 needs no workspace")

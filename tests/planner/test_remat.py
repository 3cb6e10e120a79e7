"""Recomputation: the model of a schedule against the planner's own, curves on real bytes under poison, and by hand."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreplan.base.errors import DoesNotFitError, UsageError
from foreplan.planner import Plan, Problem, plan, plan_curve, verify
from tests.planner.executor import Machine
from tests.planner.problems import (
    REGIONS,
    chain,
    priced,
    random_problem,
    training_chain,
    training_net,
    with_round_trips,
)
from tests.planner.texts import ARENA
from tests.planner.texts import problem as parsed
from tests.profile import SHORT, pick

seeds = st.integers(0, 2**32)
sizes = st.integers(1, 30)


def extra(found: Plan, problem: Problem) -> int:
    """Nanoseconds beyond those of one run of each action that runs."""
    runs = [step.action for step in found.steps]
    return sum(problem.actions[i].nanoseconds for i in runs) - sum(problem.actions[i].nanoseconds for i in set(runs))


@settings(max_examples=pick(1, 2, 10), deadline=None)
@given(seeds)
def test_budgets_are_kept_and_a_smaller_one_never_gives_a_larger_plan(seed: int) -> None:
    rng = random.Random(seed)
    problem = priced(training_net(rng.randint(1, 6), width=1 << 12, seed=seed), seed)
    curve = plan_curve(problem)
    unbudgeted = curve.plan(0).arena_bytes
    arena, time = unbudgeted, 0
    for budget in sorted((rng.randint(1, unbudgeted) for _ in range(8)), reverse=True):
        try:
            found = curve.within(budget)
        except DoesNotFitError as error:
            assert error.needed > budget and isinstance(error.plan, Plan)
            assert error.needed <= arena
            verify(error.plan, problem)
            continue
        verify(found, problem)
        assert found.arena_bytes <= min(budget, arena) and found.budget == budget
        assert extra(found, problem) >= time
        arena, time = found.arena_bytes, extra(found, problem)
    assert plan(problem, arena) == curve.within(arena)


def test_a_budget_is_met_by_the_plan_of_least_time_where_others_than_the_first_producers_are_faster() -> None:
    problem = parsed(
        """
        a: x 64 input -> a 1024 | ns=5
        b slowly: a -> b 2048 | ns=100; b: a -> b | ns=10
        c: b -> c 1024 | ns=10
        y: a, c -> y 64 output | ns=10
        """
    )
    curve = plan_curve(problem)
    times = [sum(problem.actions[s.action].nanoseconds for s in curve.plan(i).steps) for i in range(len(curve))]
    budgets = [curve.plan(i).arena_bytes for i in range(len(curve))]
    for budget in budgets:
        found = curve.within(budget)
        spent = sum(problem.actions[step.action].nanoseconds for step in found.steps)
        assert spent == min(time for time, arena in zip(times, budgets) if arena <= budget)


def test_a_chain_is_recomputed_in_segments() -> None:
    # Keeping every k-th of n activations and recomputing one segment at a time needs about n / k + k of them.
    width = 1 << 16
    problem = chain([100] * 36, width)
    whole = plan(problem, remat="off")
    assert whole.arena_bytes == 39 * width
    forward = 36 * 100
    found = plan(problem, 16 * width)
    assert found.arena_bytes <= 16 * width and extra(found, problem) <= forward
    with pytest.raises(DoesNotFitError) as caught:
        plan(problem, 1)
    assert caught.value.needed <= 12 * width


def test_a_budget_that_is_met_anyway_recomputes_nothing() -> None:
    problem = training_net(4)
    whole = plan(problem, remat="off")
    assert plan(problem, whole.arena_bytes).steps == whole.steps
    assert plan(problem, 1.0).steps == whole.steps
    with pytest.raises(DoesNotFitError) as caught:
        plan(problem, whole.arena_bytes - 1, remat="off")
    assert caught.value.needed == whole.arena_bytes and "remat='auto'" in str(caught.value)


def test_free_recomputation_adds_at_most_one_percent() -> None:
    problem = parsed(
        f"""
        cheap: x 1024 input -> big {1 << 20} | ns=5
        use: big -> small 64 | ns=1000
        wide: small -> other {1 << 20} | ns=10; narrow: other -> less 64 | ns=10
        end: less, big -> end 64 output | ns=10
        """,
        ARENA,
    )
    assert plan(problem, remat="off").arena_bytes == (2 << 20) + 64  # big, wide, small
    found = plan(problem)
    assert found.arena_bytes < (1 << 20) + 2048 and extra(found, problem) == 5
    assert dict(found.certificate.stages)["recompute"] == found.arena_bytes
    dearer = replace(problem, actions=(replace(problem.actions[0], nanoseconds=50), *problem.actions[1:]))
    assert plan(dearer) == plan(dearer, remat="off")


def test_effects_and_what_they_replace_are_never_run_again() -> None:
    for seed in range(3):
        problem = training_net(5, seed=seed)
        curve = plan_curve(problem, "flops")
        lowest = curve.plan(len(curve) - 1)
        runs = [step.action for step in lowest.steps]
        assert len(runs) > len(set(runs))
        for index in set(runs):
            if problem.actions[index].effect:
                assert runs.count(index) == 1


def test_the_number_of_a_step_outlives_what_depends_on_it() -> None:
    # A mask is drawn from a counter that the step itself moves on: the counter moves last.
    problem = parsed(
        f"""
        state 16 stored
        draw: state -> mask {1 << 20} | ns=1
        next: state -> state' 16 output home=state | state'!state effect
        drop: x {1 << 16} input, mask -> y {1 << 16} | ns=1000
        widen: y -> wide {1 << 20} | ns=1000; narrow: wide -> z 64 | ns=1000
        end: z, mask -> end 64 output | ns=1000
        """,
        REGIONS[:2],
    )
    found = plan(problem)
    assert [step.action for step in found.steps].count(0) == 2
    assert found.arena_bytes < 2 << 20
    Machine(found, problem).run()


def test_costs_are_checked() -> None:
    with pytest.raises(UsageError, match="a cost must be one of 'nanoseconds', 'flops', got 'bytes'"):
        plan_curve(training_chain(1), "bytes")


def test_runs_of_one_value_keep_apart_from_what_overwrites_it() -> None:
    """Two runs that make a value changed places around one that has to overwrite it, and a plan was refused."""
    for problem in (priced(random_problem(38, 50), 38), with_round_trips(random_problem(38, 50), 38)):
        curve = plan_curve(problem, effort=SHORT)
        for index in range(len(curve)):
            verify(curve.plan(index), problem)


@pytest.mark.parametrize(("role", "held"), [("stored", 0), ("input", 1)])
def test_a_narrow_copy_of_what_is_stored_is_made_again_for_free(role: str, held: int) -> None:
    # The copy takes as long as all else together, and 4 units; at the peak it is there only if it is made of something
    # that does not stay anyway.
    unit = 1 << 12
    problem = parsed(
        f"""
        narrow: w {8 * unit} {role} -> narrow {4 * unit} | ns=300
        forward: x {unit} input, narrow -> y {unit} | ns=100
        widen: y -> wide {20 * unit} | ns=100; contract: wide -> z {unit} | ns=100
        backward: z, narrow, w -> g {unit} output | ns=100
        """,
        ARENA,
    )
    assert plan(problem, remat="off").arena_bytes == (8 + 4 + 1 + 20) * unit
    found = plan(problem)
    assert found.arena_bytes == (8 + 4 * held + 1 + 20) * unit
    assert len(found.steps) == 5 + (1 - held)
    Machine(found, problem).run()

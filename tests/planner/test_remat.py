"""Recomputation: the model of a schedule against the planner's own, curves on real bytes under poison, and by hand."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreplan.base.errors import DoesNotFitError, UsageError
from foreplan.planner import Category, Overwrite, Plan, Problem, Role, plan, plan_curve, verify
from tests.planner.executor import Machine
from tests.planner.problems import (
    REGIONS,
    Maker,
    priced,
    random_problem,
    training_chain,
    training_net,
    with_round_trips,
)
from tests.profile import SHORT, pick

seeds = st.integers(0, 2**32)
sizes = st.integers(1, 30)


def chain(layers: int, width: int = 1 << 16) -> Problem:
    """A step whose backward pass reads every activation of the forward pass, and nothing dies in place."""
    make = Maker(REGIONS[1:2])
    x = make.value("x0", width, 0, role=Role.INPUT)
    kept = [x]
    for i in range(1, layers + 1):
        kept.append(make.value(f"x{i}", width, 0))
        make.action(f"f{i}", [kept[-2]], [kept[-1]], nanoseconds=100)
    g = make.value("g", width, 0, category=Category.GRADIENTS)
    make.action("loss", [kept[-1]], [g], nanoseconds=100)
    for i in reversed(range(layers + 1)):
        last = i == 0
        new = make.value(f"g{i}", width, 0, role=Role.OUTPUT if last else Role.TRANSIENT)
        make.action(f"b{i}", [g, kept[i]], [new], nanoseconds=200)
        g = new
    return make.problem()


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
    make = Maker()
    x = make.value("x", 64, role=Role.INPUT)
    a, b, c = make.value("a", 1024), make.value("b", 2048), make.value("c", 1024)
    y = make.value("y", 64, role=Role.OUTPUT)
    make.action("a", [x], [a], nanoseconds=5)
    make.action("b slowly", [a], [b], nanoseconds=100)
    make.action("b", [a], [b], nanoseconds=10)
    make.action("c", [b], [c], nanoseconds=10)
    make.action("y", [a, c], [y], nanoseconds=10)
    problem = make.problem()
    curve = plan_curve(problem)
    times = [sum(problem.actions[s.action].nanoseconds for s in curve.plan(i).steps) for i in range(len(curve))]
    budgets = [curve.plan(i).arena_bytes for i in range(len(curve))]
    for budget in budgets:
        found = curve.within(budget)
        spent = sum(problem.actions[step.action].nanoseconds for step in found.steps)
        assert spent == min(time for time, arena in zip(times, budgets) if arena <= budget)


def test_a_chain_is_recomputed_in_segments() -> None:
    # Keeping every k-th of n activations and recomputing one segment at a time needs about n / k + k of them.
    problem = chain(36)
    width = 1 << 16
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
    make = Maker(REGIONS[1:2])
    x = make.value("x", 1 << 10, 0, role=Role.INPUT)
    big = make.value("big", 1 << 20, 0)
    make.action("cheap", [x], [big], nanoseconds=5)
    small = make.value("small", 64, 0)
    make.action("use", [big], [small], nanoseconds=1000)
    other = make.value("other", 1 << 20, 0)
    make.action("wide", [small], [other], nanoseconds=10)
    less = make.value("less", 64, 0)
    make.action("narrow", [other], [less], nanoseconds=10)
    end = make.value("end", 64, 0, role=Role.OUTPUT)
    make.action("end", [less, big], [end], nanoseconds=10)
    problem = make.problem()
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
    make = Maker(REGIONS[:2])
    state = make.value("state", 16, 0, role=Role.STORED)
    x = make.value("x", 1 << 16, role=Role.INPUT)
    mask = make.value("mask", 1 << 20)
    make.action("draw", [state], [mask], nanoseconds=1)
    after = make.value("state'", 16, 0, role=Role.OUTPUT, home=state)
    make.action("next", [state], [after], Overwrite(0, 0, True), effect=True)
    y = make.value("y", 1 << 16)
    make.action("drop", [x, mask], [y], nanoseconds=1000)
    wide = make.value("wide", 1 << 20)
    make.action("widen", [y], [wide], nanoseconds=1000)
    z = make.value("z", 64)
    make.action("narrow", [wide], [z], nanoseconds=1000)
    end = make.value("end", 64, role=Role.OUTPUT)
    make.action("end", [z, mask], [end], nanoseconds=1000)
    problem = make.problem()
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


@pytest.mark.parametrize(("role", "held"), [(Role.STORED, 0), (Role.INPUT, 1)])
def test_a_narrow_copy_of_what_is_stored_is_made_again_for_free(role: Role, held: int) -> None:
    # The copy takes as long as all else together, and 4 units; at the peak it is there only if it is made of something
    # that does not stay anyway.
    unit = 1 << 12
    make = Maker(REGIONS[1:2])
    x, w = make.value("x", unit, 0, role=Role.INPUT), make.value("w", 8 * unit, 0, role=role)
    narrow, y = make.value("narrow", 4 * unit, 0), make.value("y", unit, 0)
    wide, z, g = make.value("wide", 20 * unit, 0), make.value("z", unit, 0), make.value("g", unit, 0, role=Role.OUTPUT)
    make.action("narrow", [w], [narrow], nanoseconds=300)
    make.action("forward", [x, narrow], [y], nanoseconds=100)
    make.action("widen", [y], [wide], nanoseconds=100)
    make.action("contract", [wide], [z], nanoseconds=100)
    make.action("backward", [z, narrow, w], [g], nanoseconds=100)
    problem = make.problem()
    assert plan(problem, remat="off").arena_bytes == (8 + 4 + 1 + 20) * unit
    found = plan(problem)
    assert found.arena_bytes == (8 + 4 * held + 1 + 20) * unit
    assert len(found.steps) == 5 + (1 - held)
    Machine(found, problem).run()

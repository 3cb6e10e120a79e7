"""Copies to host memory and back beside recomputation: figures by hand, the model of a schedule against the planner's
own, and curves on real bytes."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreplan.base.errors import DoesNotFitError, VerificationError
from foreplan.planner import (
    Action,
    Plan,
    Problem,
    Region,
    Role,
    Value,
    check_problem,
    plan,
    plan_curve,
    verify,
    without_reuse,
)
from foreplan.planner.memory.bounds import live_bytes
from foreplan.planner.memory.order_bound import order_bound
from foreplan.planner.order.dependences import dependences
from foreplan.planner.order.heuristics import HEURISTICS
from foreplan.planner.placement.layout import schedule
from foreplan.planner.recompute.arrays import OFFLOAD, make_gaps
from foreplan.planner.recompute.kernels import generate, make_scratch, measure_above
from foreplan.planner.recompute.schedules import late_updates
from tests.planner.executor import Machine
from tests.planner.problems import chain, priced, random_problem, with_round_trips
from tests.planner.test_verify import with_step
from tests.planner.texts import problem as parsed
from tests.profile import pick

WIDTH = 1 << 16
LAYERS = 36
DEVICE_AND_HOST = (Region("arena"), Region("host", on_device=False))
seeds = st.integers(0, 2**32)
sizes = st.integers(1, 30)


def extra(found: Plan, problem: Problem) -> int:
    """Nanoseconds beyond those of one run of each action but the copies."""
    runs = [step.action for step in found.steps]
    once = sum(problem.actions[i].nanoseconds for i in set(runs) - problem.copies)
    return sum(problem.actions[i].nanoseconds for i in runs) - once


def copied(found: Plan, problem: Problem) -> int:
    return sum(step.action in problem.copies for step in found.steps)


def recomputed(found: Plan, problem: Problem) -> int:
    runs = [step.action for step in found.steps if step.action not in problem.copies]
    return len(runs) - len(set(runs))


@pytest.mark.parametrize("away", [1, 10, 35])
def test_where_recomputation_is_dear_a_budget_is_met_by_copies_alone(away: int) -> None:
    # So many of x1 ... x35 must be away at the peak. Each costs one copy out and one back, and nothing costs less.
    problem = chain([1000] * LAYERS, WIDTH, copy=10)
    assert plan(problem, remat="off").arena_bytes == (LAYERS + 3) * WIDTH
    found = plan(problem, (LAYERS + 3 - away) * WIDTH)
    assert found.arena_bytes == (LAYERS + 3 - away) * WIDTH
    assert extra(found, problem) == 20 * away
    assert (copied(found, problem), recomputed(found, problem)) == (2 * away, 0)
    # All that are away are so at once, and the device's bytes count alone.
    assert found.heights == (found.arena_bytes, away * WIDTH)
    Machine(found, problem).run()


def test_where_the_bus_is_slow_everything_is_recomputed() -> None:
    # A copy there and back takes longer than to run the whole forward pass again.
    problem = chain([100] * LAYERS, WIDTH, copy=5000)
    curve = plan_curve(problem)
    assert len(curve) > 10
    for index in range(len(curve)):
        found = curve.plan(index)
        assert copied(found, problem) == 0 and found.heights[1] == 0
    assert extra(plan(problem, 16 * WIDTH), problem) <= 100 * LAYERS


@pytest.mark.parametrize("copies", [0, 1, 5, 16])
def test_what_is_cheap_is_recomputed_and_what_is_dear_is_copied(copies: int) -> None:
    # Every other action is cheap: its 18 results are recomputed for 1 each, and what else must be away costs 20.
    problem = chain([1, 1000] * (LAYERS // 2), WIDTH, copy=10)
    found = plan(problem, (LAYERS + 3 - 18 - copies) * WIDTH)
    assert extra(found, problem) == 18 + 20 * copies
    assert (copied(found, problem), recomputed(found, problem)) == (2 * copies, 18)
    Machine(found, problem).run()


def test_a_value_that_is_fetched_three_times_is_copied_out_once() -> None:
    text = f"make: x 64 input -> v {WIDTH} | ns=1000; use: v -> y 64 | ns=100"
    for i, last in enumerate(("y", "y0", "y1")):
        text += f"; widen{i}: {last} -> wide{i} {2 * WIDTH} | ns=100; narrow{i}: wide{i} -> narrow{i} 64 | ns=100"
        text += f"; use{i}: v, narrow{i} -> y{i} 64 {'output' * (i == 2)} | ns=100"
    text += f"; save: v -> v/host {WIDTH} @host | ns=10; fetch: v/host -> v | ns=10"
    problem = parsed(text, DEVICE_AND_HOST)
    assert plan(problem, remat="off").arena_bytes == 3 * WIDTH + 64
    found = plan(problem, 3 * WIDTH)
    names = [problem.actions[step.action].name for step in found.steps]
    assert [names.count(name) for name in ("make", "save", "fetch")] == [1, 1, 3]
    assert extra(found, problem) == 10 * (1 + 3) and found.arena_bytes == 2 * WIDTH + 64
    Machine(found, problem).run()


def test_without_recomputation_there_are_copies_alone() -> None:
    problem = chain([1] * LAYERS, WIDTH, copy=10)
    found = plan(problem, 9 * WIDTH, remat="off")
    assert found.arena_bytes == 9 * WIDTH and recomputed(found, problem) == 0
    assert extra(found, problem) == 20 * 30
    with pytest.raises(DoesNotFitError) as caught:
        plan(problem, 1, remat="off")
    assert caught.value.needed == 4 * WIDTH and "of predicted time for copies and recomputation" in str(caught.value)


def test_the_bound_over_all_schedules_holds_with_copies_and_is_reached() -> None:
    # The input cannot be moved; beside it, every action of the backward pass needs three values.
    problem = chain([1000] * LAYERS, WIDTH, copy=10)
    curve = plan_curve(problem)
    assert order_bound(problem) == 4 * WIDTH == curve.plan(len(curve) - 1).arena_bytes


def test_copies_that_cost_next_to_nothing_are_free() -> None:
    problem = chain([1000] * LAYERS, WIDTH, copy=10)
    whole = sum(action.nanoseconds for i, action in enumerate(problem.actions) if i not in problem.copies)
    found = plan(problem)
    away = whole // 100 // 20
    assert found.arena_bytes == (LAYERS + 3 - away) * WIDTH and extra(found, problem) == 20 * away


def test_by_flops_a_copy_counts_as_many_as_run_in_its_time() -> None:
    problem = chain([1000] * LAYERS, WIDTH, copy=10)  # 2 flops a nanosecond
    points = plan_curve(problem, "flops").points
    assert points[0].cost == 2 * (10 + 10) and points[9].cost == 10 * points[0].cost


def test_what_is_a_round_trip() -> None:
    def trips(*, effect: bool = False, region: int = 1, role: Role = Role.TRANSIENT, reader: bool = False) -> list[int]:
        values = (
            Value("x", 64, role=Role.INPUT),
            Value("v", 64),
            Value("h", 64, region=region, role=role),
            Value("y", 64, role=Role.OUTPUT),
        )
        actions = [Action("make", (0,), (1,)), Action("out", (1,), (2,), effect=effect), Action("back", (2,), (1,))]
        actions.append(Action("use", (1, 2) if reader else (1,), (3,)))
        problem = Problem(values, tuple(actions), DEVICE_AND_HOST)
        check_problem(problem)
        return sorted(problem.round_trips.items())  # type: ignore[arg-type]

    assert trips() == [(1, (1, 2))]
    assert not trips(effect=True) and not trips(region=0) and not trips(role=Role.OUTPUT) and not trips(reader=True)


def test_a_plan_that_fetches_something_else_is_refused() -> None:
    problem = chain([1000] * 8, WIDTH, copy=10)
    found = plan(problem, 6 * WIDTH)
    fetches = [i for i, s in enumerate(found.steps) if problem.actions[s.action].name.startswith("fetch")]
    assert len(fetches) == 5

    own, other = (found.steps[i].reads[0] for i in fetches[:2])
    with pytest.raises(VerificationError, match=r"is needed, but 'x\d/host'"):
        verify(with_step(found, fetches[0], reads=(other,)), problem)
    save = next(i for i, s in enumerate(found.steps) if s.action in problem.copies and s.writes == (own,))
    with pytest.raises(VerificationError, match="not within region 'host'"):
        verify(with_step(found, save, writes=(found.heights[1],)), problem)
    with pytest.raises(VerificationError, match="the device's heights come to"):
        verify(replace(found, arena_bytes=sum(found.heights)), problem)
    steps = tuple(s for i, s in enumerate(found.steps) if i != save)
    with pytest.raises(VerificationError, match="is needed, but nothing"):
        verify(replace(found, steps=steps), problem)


@settings(max_examples=pick(30, 60, 300), deadline=None)
@given(seeds, sizes, st.booleans())
def test_any_state_is_a_schedule_whose_bytes_are_those_that_live(seed: int, actions: int, copies: bool) -> None:
    problem, rng = random_problem(seed, actions), random.Random(seed)
    if copies:
        problem = with_round_trips(problem, seed)
    heuristic = rng.choice(sorted(HEURISTICS))
    order = late_updates(problem, HEURISTICS[heuristic](problem, dependences(problem)))
    cost = [rng.randrange(100) if copies else 1 for _ in problem.actions]
    gaps = make_gaps(problem, order, cost, 1)
    scratch = make_scratch(gaps)
    ways = [[0, 1, 2, OFFLOAD, OFFLOAD] if gaps.save[v] >= 0 else [0, 0, 1, 2] for v in gaps.gap_value]
    tails = gaps.gap_last == len(order)
    state = np.array([rng.choice(way[:3] if tail else way) for way, tail in zip(ways, tails)], np.int64)
    length, extra_cost = generate(gaps, scratch, state)
    if length < 0:
        return
    steps = scratch.counting.steps[:length].tolist()
    found = schedule(problem, heuristic, steps)  # which refuses what reads a value that is not there
    live = live_bytes(problem, steps)
    peak, at, above = measure_above(gaps, scratch, length, found.bound - 1)
    assert (peak, at) == (live.max(), live.argmax()) and above >= 1
    assert extra_cost == sum(cost[i] for i in steps) - sum(cost[i] for i in order)
    assert copies or set(order) >= set(steps)  # where all costs are equal, nothing else makes a value
    assert all(steps.count(out) <= 1 for out, _ in problem.round_trips.values())


@settings(max_examples=pick(4, 8, 30), deadline=None)
@given(seeds, st.integers(1, 30), st.booleans())
def test_every_plan_of_a_curve_computes_the_right_bytes(seed: int, actions: int, copies: bool) -> None:
    problem = priced(random_problem(seed, actions), seed)
    if copies:
        problem = with_round_trips(problem, seed)
    curve = plan_curve(problem)
    bound = order_bound(problem)
    for index in range(len(curve)):
        found = curve.plan(index)
        assert bound <= found.lower_bound_bytes
        outcome = Machine(found, problem).run()
        assert Machine(without_reuse(found, problem), problem).run() == outcome
    costs = [point.cost for point in curve.points]
    bounds = [point.bound for point in curve.points]
    assert costs == sorted(set(costs)) and bounds == sorted(set(bounds), reverse=True)


@settings(max_examples=pick(1, 2, 8), deadline=None)
@given(seeds)
def test_a_smaller_budget_never_gives_a_larger_plan(seed: int) -> None:
    rng = random.Random(seed)
    forward = [rng.choice([1, 30, 1000]) for _ in range(rng.randint(2, 12))]
    problem = chain(forward, WIDTH, copy=rng.choice([1, 10, 100]))
    curve = plan_curve(problem)
    arena, time = curve.plan(0).arena_bytes, 0
    for budget in sorted((rng.randint(1, arena) for _ in range(6)), reverse=True):
        try:
            found = curve.within(budget)
        except DoesNotFitError as error:
            assert budget < error.needed <= arena
            continue
        assert found.arena_bytes <= min(budget, arena) and extra(found, problem) >= time
        arena, time = found.arena_bytes, extra(found, problem)

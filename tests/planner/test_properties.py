"""Random problems: plans verify, lie between bound and sum, compute the right bytes, and depend on nothing else."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreplan.base.units import align_up
from foreplan.planner import (
    Plan,
    Problem,
    buffers,
    bytes_by_category,
    category_series,
    check_problem,
    plan,
    plan_curve,
    verify,
    without_reuse,
)
from foreplan.planner.candidates import merge_candidates
from foreplan.planner.memory.bounds import live_bytes
from foreplan.planner.order.dependences import dependences
from foreplan.planner.order.heuristics import program_order
from foreplan.planner.placement.layout import arena_bytes, lay_out, schedule
from tests.planner.executor import Machine, contents
from tests.planner.problems import joined_problem, random_problem, training_net
from tests.planner.strategies import problems
from tests.planner.training_graphs import random_training
from tests.profile import SHORT, pick, searching_by

seeds = st.integers(0, 2**32)
sizes = st.integers(1, 30)


def everything(problem: Problem) -> int:
    """Bytes of all device values and workspaces, each apart, with the alignment that each can need."""
    on_device = [region.on_device for region in problem.regions]
    unit = max([64, *(value.alignment for value in problem.values)])
    total = sum(align_up(v.nbytes, unit) for v in problem.values if on_device[v.region])
    total += sum(align_up(a.workspace, unit) for a in problem.actions if on_device[a.workspace_region])
    return total + unit * len(problem.regions)


@settings(max_examples=pick(20, 30, 150), deadline=None)
@given(seeds, sizes)
def test_plan_lies_between_bounds_and_sum(seed: int, actions: int) -> None:
    problem = random_problem(seed, actions)
    check_problem(problem)
    found = plan(problem)
    verify(found, problem)
    assert found.order_lower_bound_bytes is not None
    assert found.order_lower_bound_bytes <= found.lower_bound_bytes <= found.arena_bytes <= everything(problem)
    assert found.certificate.stages[0][0] == "program order"
    arenas = [arena for _, arena in found.certificate.stages]
    assert arenas == sorted(arenas, reverse=True) and arenas[-1] == found.arena_bytes


@settings(max_examples=pick(10, 20, 100), deadline=None)
@given(seeds, sizes)
def test_plan_and_its_twin_compute_the_same_bytes(seed: int, actions: int) -> None:
    problem = random_problem(seed, actions)
    found = plan(problem)
    twin = without_reuse(found, problem)
    assert [step.action for step in twin.steps] == [step.action for step in found.steps]
    assert Machine(found, problem).run() == Machine(twin, problem).run()


@settings(max_examples=pick(10, 20, 100), deadline=None)
@given(seeds, sizes)
def test_what_a_plan_holds_lies_between_the_live_set_and_the_arena(seed: int, actions: int) -> None:
    problem = random_problem(seed, actions)
    for found in (plan(problem), without_reuse(plan(problem), problem)):
        held = sum(category_series(found, problem).values())
        live = live_bytes(problem, [step.action for step in found.steps])
        assert live.max() == found.lower_bound_bytes and live.argmax() == found.certificate.peak_step
        assert (live <= held).all() and held.max() <= found.arena_bytes
        shared = sum(
            sum(min(problem.values[v].nbytes for v in (action.writes[p.write], action.reads[p.read])) for p in pairs)
            for action in problem.actions
            if (pairs := (*action.overwrites, *action.parts))
        )
        assert shared or held.max() == live.max()
        peak = bytes_by_category(found, problem, found.certificate.peak_step)
        assert sum(peak.values()) == held[found.certificate.peak_step]
        listed = buffers(found, problem)
        for i, one in enumerate(listed):
            for other in listed[:i]:
                together = one.region == other.region and one.lower < other.upper and other.lower < one.upper
                low = max(one.offset, other.offset)
                assert not together or low >= min(one.offset + one.nbytes, other.offset + other.nbytes)


@pytest.mark.whole_search
@settings(max_examples=pick(3, 5, 50), deadline=None)
@given(problems())
def test_plans_of_drawn_problems(problem: Problem) -> None:
    check_problem(problem)
    found = plan(problem, remat="off")
    verify(found, problem)
    assert found.order_lower_bound_bytes is not None
    assert found.order_lower_bound_bytes <= found.lower_bound_bytes <= found.arena_bytes <= everything(problem)
    lean = merge_candidates(problem, [0] * len(problem.actions)).problem  # faster candidates may take more
    usual = schedule(lean, "program order", program_order(lean, dependences(lean)))
    assert plan(lean, remat="off").arena_bytes <= arena_bytes(lean, lay_out(lean, usual).heights)
    outcome = Machine(found, problem).run()
    right = contents(problem)
    assert all(content == right[v] for v, content in outcome.items())
    assert Machine(without_reuse(found, problem), problem).run() == outcome


@settings(max_examples=pick(1, 2, 8), deadline=None)
@given(problems())
def test_curves_of_drawn_problems(problem: Problem) -> None:
    curve = plan_curve(problem)
    arena = cost = None
    outcome = Machine(plan(problem, remat="off"), problem).run()
    for index in sorted({*range(0, len(curve), 1 + len(curve) // 6), len(curve) - 1}):
        found = curve.plan(index)
        verify(found, problem)
        assert found.order_lower_bound_bytes is not None
        assert found.order_lower_bound_bytes <= found.lower_bound_bytes <= found.arena_bytes
        assert Machine(found, problem).run() == outcome
        assert Machine(without_reuse(found, problem), problem).run() == outcome
        within = curve.within(found.arena_bytes)
        assert within.arena_bytes <= found.arena_bytes
        spent = sum(problem.actions[step.action].nanoseconds for step in within.steps)
        if arena is not None and cost is not None and found.arena_bytes < arena:
            assert spent >= cost
        if arena is None or found.arena_bytes < arena:
            arena, cost = found.arena_bytes, spent


def test_parts_made_in_their_places_give_what_copied_ones_give() -> None:
    placed = 0
    for seed in range(30):
        problem = joined_problem(seed)
        check_problem(problem)
        found = plan(problem)
        assert Machine(found, problem).run() == Machine(without_reuse(found, problem), problem).run()
        for step in found.steps:
            parts = problem.actions[step.action].parts
            placed += sum(step.reads[part.read] == step.writes[part.write] + part.offset for part in parts)
    assert placed >= 30


def _print(found: Plan, problem: Problem) -> str:
    return hashlib.sha256(f"{found.as_text(problem)}{found.certificate}{problem.digest}".encode()).hexdigest()


@pytest.mark.whole_search
def test_plans_do_not_depend_on_the_hash_seed_or_on_what_was_planned_before() -> None:
    script = "from tests.planner.test_properties import prints; print(*prints())"
    root = Path(__file__).parents[2]
    here = prints()
    for seed in pick(("1",), ("1",), ("1", "2")):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        out = subprocess.run(
            [sys.executable, "-c", script], env=env, cwd=root, capture_output=True, text=True, check=True
        )
        assert out.stdout.split() == here


def prints() -> list[str]:
    """Of plans by short searches, in which everything that a search does is done a few times."""
    with searching_by(SHORT):
        return _prints()


def _prints() -> list[str]:
    some = [random_problem(seed, 40) for seed in range(5)] + [training_net(6)]
    some += [make(seed) for make in (joined_problem, lambda seed: random_training(seed, 5)) for seed in range(3)]
    curves = [plan_curve(random_training(seed, 6)) for seed in range(3)]
    last = [_print(curve.plan(len(curve) - 1), curve.problem) for curve in curves]
    return [_print(plan(problem), problem) for problem in some] + last

"""One count of live bytes: compiled for the searches, in Python for one schedule, and by the verifier's replay."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreplan.planner import Plan, Problem, Role
from foreplan.planner.memory.arrays import problem_arrays
from foreplan.planner.memory.bounds import live_bytes, reserved_bytes
from foreplan.planner.memory.kernels import make_count, measure
from foreplan.planner.memory.liveness import live_ranges
from foreplan.planner.memory.outlines import outlines
from foreplan.planner.order.arrays import order_arrays
from foreplan.planner.order.dependences import dependences
from foreplan.planner.order.heuristics import HEURISTICS
from foreplan.planner.order.kernels import begin, make_state, run, weigh
from foreplan.planner.placement.layout import Schedule, assemble, lay_out, schedule
from foreplan.planner.recompute.arrays import make_gaps
from foreplan.planner.recompute.kernels import generate, make_scratch
from foreplan.planner.report import category_series
from foreplan.planner.verify.verifier import verify
from tests.planner.problems import joined_problem, random_problem, training_net
from tests.profile import pick

KINDS = {
    "any": lambda seed: random_problem(seed, 1 + seed % 40),
    "joined": joined_problem,
    "training": lambda seed: training_net(1 + seed % 4, width=1 << 12, seed=seed),
}


def schedules(problem: Problem, seed: int) -> list[list[int]]:
    """An order by each heuristic, and what some state of each recomputes."""
    rng, graph, found = random.Random(seed), dependences(problem), []
    for heuristic in HEURISTICS.values():
        order = list(heuristic(problem, graph))
        found.append(order)
        gaps = make_gaps(problem, order, [1] * len(problem.actions), 1)
        scratch = make_scratch(gaps)
        state = np.array([rng.choice([0, 0, 1, 2]) for _ in gaps.gap_value], np.int64)
        length, _ = generate(gaps, scratch, state)
        if length >= 0:
            found.append(scratch.counting.steps[:length].tolist())
    return found


def plans(problem: Problem, seed: int) -> Iterator[tuple[list[int], Schedule, Plan]]:
    """What `schedules` gives, and each as it is laid out."""
    for steps in schedules(problem, seed):
        found = schedule(problem, "", steps)
        yield steps, found, assemble(problem, found, lay_out(problem, found, quick=True), None)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=pick(8, 15, 40), deadline=None)
@given(seed=st.integers(0, 2**32))
def test_the_compiled_count_is_what_lives_and_solid_alias_sets_take_no_less(kind: str, seed: int) -> None:
    problem = KINDS[kind](seed)
    arrays = problem_arrays(problem)
    for steps in schedules(problem, seed):
        count = make_count(arrays, len(steps))
        count.steps[:] = steps
        highest, at = measure(arrays, count, len(steps))
        live, found = live_bytes(problem, steps), schedule(problem, "", steps)
        assert count.level.tolist() == live.tolist()[: len(steps)]
        assert (highest, at) == (live.max(), live.argmax()) and highest == found.bound
        assert np.all(live <= reserved_bytes(problem, steps, found.ranges, found.alias_sets))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=pick(8, 15, 40), deadline=None)
@given(seed=st.integers(0, 2**32))
def test_outlines_hold_what_lives(kind: str, seed: int) -> None:
    """But where a part cannot lie where it should, or alignment leaves room."""
    problem = KINDS[kind](seed)
    for steps in schedules(problem, seed):
        ranges = live_ranges(problem, steps)
        found = outlines(problem, steps, ranges)
        stored = [v for v in problem.values if v.role is Role.STORED and problem.regions[v.region].on_device]
        held = np.full(len(steps), sum(v.nbytes for v in stored))
        for boxes, region in zip(found.boxes, found.alias_sets.region):
            assert not any(a.meets(b) for a, b in itertools.combinations(boxes, 2))
            for box in boxes:
                held[max(box.lower, 0) : box.upper] += (box.high - box.low) * problem.regions[region].on_device
        for step, index in enumerate(steps):
            action = problem.actions[index]
            held[step] += action.workspace * problem.regions[action.workspace_region].on_device
        live = live_bytes(problem, steps)
        copied = any(
            found.alias_sets.of[ranges.reads[step][part.read]] != found.alias_sets.of[ranges.writes[step][part.write]]
            for step, index in enumerate(steps)
            for part in problem.actions[index].parts
        )
        assert copied or np.all(held[1:] <= live[1:])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=pick(5, 10, 20), deadline=None)
@given(seed=st.integers(0, 2**32))
def test_what_lives_is_what_the_verifier_sees(kind: str, seed: int) -> None:
    """Its replay, which shares no code with the planner, refuses a plan whose lower bound is another."""
    problem = KINDS[kind](seed)
    for steps, _, made in plans(problem, seed):
        assert made.lower_bound_bytes == live_bytes(problem, steps).max()
        verify(made, problem)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=pick(5, 10, 20), deadline=None)
@given(seed=st.integers(0, 2**32))
def test_what_a_report_adds_up_is_between_what_lives_and_what_is_reserved(kind: str, seed: int) -> None:
    problem = KINDS[kind](seed)
    for steps, found, made in plans(problem, seed):
        held = np.sum(list(category_series(made, problem).values()), axis=0)
        reserved = reserved_bytes(problem, steps, found.ranges, found.alias_sets)
        assert np.all(live_bytes(problem, steps) <= held) and np.all(held <= reserved)
        if not found.alias_sets.wholes:
            assert held.tolist() == reserved.tolist()


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=pick(10, 20, 60), deadline=None)
@given(seed=st.integers(0, 2**32))
def test_what_the_search_weighs_node_by_node_is_what_lives(kind: str, seed: int) -> None:
    problem = KINDS[kind](seed)
    graph = dependences(problem)
    arrays = order_arrays(problem, graph)
    assert arrays is not None
    for heuristic in HEURISTICS.values():
        order = list(heuristic(problem, graph))
        live, state = live_bytes(problem, order), make_state(arrays)
        level = begin(arrays, state)
        for step, index in enumerate(order):
            node = graph.actions.index(index)
            hill, growth = weigh(arrays, state, node)
            needs = max(level + hill, 0 if step else level + arrays.unread)
            assert needs == live[step]
            run(arrays, state, node)
            level += growth

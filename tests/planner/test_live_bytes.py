"""One count of live bytes: compiled for the searches, in Python for one schedule, and by the verifier's replay."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreplan.planner import Plan, Problem
from foreplan.planner.memory.arrays import problem_arrays
from foreplan.planner.memory.bounds import live_bytes, reserved_bytes
from foreplan.planner.memory.kernels import make_count, measure
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
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_the_compiled_count_is_what_is_reserved_and_no_less_than_what_lives(kind: str, seed: int) -> None:
    problem = KINDS[kind](seed)
    arrays = problem_arrays(problem)
    for steps in schedules(problem, seed):
        count = make_count(arrays, len(steps))
        count.steps[:] = steps
        highest, at = measure(arrays, count, len(steps))
        found = schedule(problem, "", steps)
        reserved = reserved_bytes(problem, steps, found.ranges, found.alias_sets)
        assert count.level.tolist() == reserved.tolist()[: len(steps)]
        assert (highest, at) == (reserved.max(), reserved.argmax()) and highest == found.bound
        assert np.all(live_bytes(problem, steps) <= reserved)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_what_lives_is_what_the_verifier_sees(kind: str, seed: int) -> None:
    """Its replay, which shares no code with the planner, refuses a plan whose lower bound is another."""
    problem = KINDS[kind](seed)
    for steps, _, made in plans(problem, seed):
        assert made.lower_bound_bytes == live_bytes(problem, steps).max()
        verify(made, problem)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_what_a_report_adds_up_is_what_is_reserved(kind: str, seed: int) -> None:
    """But for inputs that nobody reads, and for what has no part yet of a whole whose bytes are set aside."""
    problem = KINDS[kind](seed)
    for steps, found, made in plans(problem, seed):
        held = np.sum(list(category_series(made, problem).values()), axis=0)
        reserved = reserved_bytes(problem, steps, found.ranges, found.alias_sets)
        assert np.all(live_bytes(problem, steps) <= held) and np.all(held <= reserved)
        if not found.alias_sets.wholes:
            assert held[1:].tolist() == reserved[1:].tolist()


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_what_the_search_weighs_node_by_node_is_what_is_reserved(seed: int) -> None:
    """Where every write that may be in place is as large as what it takes; of others it knows the least."""
    problem = KINDS["any"](seed)
    graph = dependences(problem)
    arrays = order_arrays(problem, graph)
    assert arrays is not None
    for heuristic in HEURISTICS.values():
        order = list(heuristic(problem, graph))
        found, state = schedule(problem, "", order), make_state(arrays)
        reserved = reserved_bytes(problem, order, found.ranges, found.alias_sets)
        level, exact = begin(arrays, state), not arrays.loose.any()
        for step, index in enumerate(order):
            node = graph.actions.index(index)
            hill, growth = weigh(arrays, state, node)
            needs = level + hill + (arrays.unread if step == 0 else 0)
            assert needs == reserved[step] if exact else needs <= reserved[step]
            run(arrays, state, node)
            level += growth

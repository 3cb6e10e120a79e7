"""Sequences of runs: changed at random they stay schedules, with the planner's bytes and costs; and by hand."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from foreplan.base.errors import PlanError
from foreplan.planner import Problem, plan_curve
from foreplan.planner.order.dependences import dependences
from foreplan.planner.order.heuristics import HEURISTICS
from foreplan.planner.placement.layout import schedule
from foreplan.planner.recompute.anneal import Sequences, change, make_sequences, tidy, weigh
from foreplan.planner.recompute.arrays import Gaps, make_gaps
from foreplan.planner.recompute.kernels import Scratch, make_scratch
from foreplan.planner.recompute.runs import free_actions
from tests.planner.problems import priced, random_problem
from tests.planner.texts import ARENA
from tests.planner.texts import problem as parsed
from tests.profile import pick

seeds = st.integers(0, 2**32)


def start(problem: Problem, order: list[int]) -> tuple[Gaps, Scratch, Sequences]:
    gaps = make_gaps(problem, order, [a.nanoseconds for a in problem.actions], 1)
    sequences = make_sequences(gaps, free_actions(problem), 3 * len(order) + 64)
    sequences.now[: len(order)] = order
    return gaps, make_scratch(gaps), sequences


@settings(max_examples=pick(20, 40, 100), deadline=None)
@given(seeds, st.integers(2, 30))
def test_changed_at_random_they_are_schedules_with_the_bytes_of_the_planner(seed: int, actions: int) -> None:
    problem, rng = priced(random_problem(seed, actions), seed), random.Random(seed)
    order = HEURISTICS[rng.choice(sorted(HEURISTICS))](problem, dependences(problem))
    if len(order) < 2:
        return
    gaps, scratch, sequences = start(problem, order)
    length, random_seed = len(order), np.uint64(seed + 1)
    for _ in range(60):
        sequences.trial[:length] = sequences.now[:length]
        _, size, random_seed = change(gaps, scratch, sequences, length, 0, np.uint64(random_seed))
        size = tidy(gaps, scratch, sequences, size)
        if size < 2:
            continue
        length = size
        sequences.now[:length] = sequences.trial[:length]
        found = schedule(problem, "", sequences.trial[:length].tolist())
        peak, above, cost = weigh(gaps, scratch, sequences, length, found.bound - 1)
        assert peak == found.bound and above >= 1
        assert cost == sum(problem.actions[i].nanoseconds for i in found.order)
        for index in set(order):
            if problem.actions[index].effect:
                assert found.order.count(index) == 1


@settings(max_examples=100, deadline=None)
@given(seeds, st.integers(2, 12))
def test_what_reads_nothing_that_is_there_is_refused(seed: int, actions: int) -> None:
    problem, rng = random_problem(seed, actions), random.Random(seed)
    order = HEURISTICS["program order"](problem, dependences(problem))
    if len(order) < 2:
        return
    gaps, scratch, sequences = start(problem, order)
    shuffled = rng.sample(order, len(order))
    sequences.trial[: len(order)] = shuffled
    size = tidy(gaps, scratch, sequences, len(order))
    try:
        schedule(problem, "", shuffled)
    except PlanError:
        assert size < 0 or list(sequences.trial[:size]) != shuffled


def test_a_value_is_computed_again_before_what_takes_up_the_room_for_it() -> None:
    # `a` must be gone beside `huge`. What it is made of, `big`, has no room beside `wide`, so `a` comes before `wide`.
    problem = parsed(
        """
        big: x 64 input -> big 6400 | ns=1; a: big -> a 640 | ns=1
        first: a -> first 64 | ns=100; huge: first -> huge 12800 | ns=100; narrow: huge -> narrow 64 | ns=100
        wide: narrow -> wide 6400 | ns=100; end: wide, a -> y 64 output | ns=100
        """,
        ARENA,
    )
    curve = plan_curve(problem)
    assert curve.plan(0).arena_bytes == 12800 + 640 + 64
    found = curve.within(12800 + 64 + 64)
    assert [step.action for step in found.steps] == [0, 1, 2, 3, 4, 0, 1, 5, 6]

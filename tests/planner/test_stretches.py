"""Large irregular graphs, placed from their busiest stretches of time outward."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from foreplan.planner import place
from foreplan.planner.effort import PlacementEffort
from foreplan.planner.placement.offsets import _lower_bound
from foreplan.planner.placement.problem import PlacementProblem, checked
from foreplan.planner.placement.stretches import _busiest, outward
from tests.planner.problems import wiring
from tests.planner.test_mending import height, overlap, push, stacked

QUICK = replace(PlacementEffort(), stretch=4_000_000, chains=1_000_000, chains_pair=0)


def grown(problem: PlacementProblem, most: int, effort: PlacementEffort = QUICK) -> np.ndarray | None:
    return outward(problem, most, _lower_bound(problem)[0], effort, stacked, push)


def test_busy_stretches_first_lie_lower_than_all_at_once() -> None:
    """With the same work."""
    problem = checked(*wiring(2, 1200, window=150), 64, None)
    tall = height(problem, stacked(problem))
    outwards, at_once = (grown(problem, tall, effort) for effort in (QUICK, replace(QUICK, stretches=(97, 0))))
    found = grown(problem, tall)
    assert outwards is not None and at_once is not None and found is not None
    assert not overlap(problem, outwards) and not (outwards % 64).any() and (outwards == found).all()
    assert _lower_bound(problem)[0] <= height(problem, outwards) < height(problem, at_once)


def test_a_placement_that_is_no_lower_is_given_up() -> None:
    problem = checked(*wiring(2, 300, window=60), 64, None)
    assert grown(problem, _lower_bound(problem)[0]) is None


def test_too_many_pairs_for_the_work_of_a_level_are_left_alone() -> None:
    problem = checked(*wiring(2, 300, window=60), 64, None)
    tall = height(problem, stacked(problem))
    assert grown(problem, tall) is not None and grown(problem, tall, replace(QUICK, chains_pair=10_000)) is None


def test_where_all_steps_are_busy_nothing_is_placed_first() -> None:
    problem = checked([0, 0, 5, 5], [5, 5, 9, 9], [64, 128, 128, 64], 64, None)
    assert grown(problem, 1000) is None


def test_busiest_is_the_highest_live_set_of_each_life() -> None:
    lower, upper, size = wiring(3, 200, window=40)
    problem = checked(lower, upper, size, 64, None)
    live = [int(size[(lower <= t) & (t < upper)].sum()) for t in range(200)]
    assert _busiest(problem).tolist() == [max(live[a:b]) for a, b in zip(lower, upper)]


def test_large_irregular_graphs_begin_with_their_busiest_stretches() -> None:
    lower, upper, size = wiring(1, 1500, window=150)
    effort = replace(QUICK, dives=0, shaking=0, ejected=0, largest=(), mending=4_000_000)
    found, without = (
        place(lower, upper, size, 64, effort=replace(effort, stretches=levels)) for levels in (QUICK.stretches, (0,))
    )
    assert found.lower_bound <= found.height < without.height
    assert not overlap(checked(lower, upper, size, 64, None), found.offsets)

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreplan.planner import place
from foreplan.planner.effort import PlacementEffort
from foreplan.planner.placement.mending import mended
from foreplan.planner.placement.offsets import NO_LIMIT, _greedy
from foreplan.planner.placement.problem import PlacementProblem, checked
from tests.planner.problems import rectangles, wiring
from tests.profile import pick

EFFORT = PlacementEffort()
FREE_LISTS = replace(EFFORT, quadratic=0, pairs=0, skyline=0)  # what a large problem gets beside mending


def push(some: PlacementProblem, order: np.ndarray, offsets: np.ndarray) -> int:
    return _greedy(some, order, False, NO_LIMIT, offsets)[1]


def overlap(problem: PlacementProblem, offsets: np.ndarray) -> bool:
    """By the bytes of every step, one after the other: shares no code with the placer."""
    for t in np.unique(problem.lower):
        alive = np.flatnonzero((problem.lower <= t) & (t < problem.upper) & (problem.size > 0))
        alive = alive[np.argsort(offsets[alive], kind="stable")]
        if (offsets[alive][1:] < (offsets + problem.size)[alive][:-1]).any():
            return True
    return False


def height(problem: PlacementProblem, offsets: np.ndarray) -> int:
    return int((offsets + problem.size).max())


def stacked(problem: PlacementProblem) -> np.ndarray:
    """Every buffer above all before it."""
    ends = np.cumsum(-(-problem.size // problem.alignment.max()) * problem.alignment.max())
    return np.concatenate([[0], ends[:-1]])


def live_peak(problem: PlacementProblem, grain: int) -> int:
    size = -(-problem.size // grain) * grain
    return max(int(size[(problem.lower <= t) & (t < problem.upper)].sum()) for t in np.unique(problem.lower))


buffers = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12), st.integers(1, 900)), min_size=1, max_size=50)


@settings(max_examples=40, deadline=None)
@given(buffers, st.lists(st.sampled_from([1, 8, 64]), min_size=50, max_size=50))
def test_what_is_mended_lies_apart_and_aligned_between_the_bound_and_where_it_began(
    drawn: list[tuple[int, int, int]], alignments: list[int]
) -> None:
    lower, life, size = (np.array(column) for column in zip(*drawn))
    problem = checked(lower, lower + life, size, np.array(alignments[: len(drawn)]), None)
    grain = int(problem.alignment.min())
    start, bound = stacked(problem), live_peak(problem, grain)
    found = mended(problem, start, bound, 1000, 2_000_000, EFFORT, push)
    assert not overlap(problem, found) and not (found % problem.alignment).any()
    assert bound - grain < height(problem, found) <= height(problem, start)


@pytest.mark.parametrize("seed", range(6))
def test_pieces_of_a_rectangle_with_some_room_reach_its_height(seed: int) -> None:
    """Cut from a rectangle of 64 units, with five pieces taken out: a placement of 64 exists."""
    pieces = rectangles(random.Random(seed), 40, 64, 40)[5:]
    lower, upper, low, high = (np.array(column) for column in zip(*pieces))
    problem = checked(lower, upper, high - low, 1, None)
    found = mended(problem, stacked(problem), 64, 500, 20_000_000, EFFORT, push)
    assert height(problem, found) <= 66 and not overlap(problem, found)


@pytest.mark.parametrize("seed", pick((1,), (1, 2), (1, 2, 3)))
def test_more_work_never_gives_a_higher_placement(seed: int) -> None:
    problem = checked(*wiring(seed, 300, window=60), 64, None)
    start = place(problem.lower, problem.upper, problem.size, 64, work=0, effort=FREE_LISTS)
    heights = []
    for work in (1, 300_000, 1_000_000, 4_000_000, 15_000_000):
        found = mended(problem, start.offsets, start.lower_bound, 10_000, work, replace(EFFORT, chains=1_000_000), push)
        assert not overlap(problem, found)
        heights.append(height(problem, found))
    assert heights == sorted(heights, reverse=True)
    assert heights[-1] < heights[0] <= start.height


@pytest.mark.parametrize(("window", "most"), [(40, 1.005), (150, 1.035)])
def test_irregular_wiring_lies_near_its_bound_where_free_lists_leave_holes(window: int, most: float) -> None:
    """Each action reads one to three of the last values, whose sizes are lognormal."""
    lower, upper, size = wiring(1, 4000, window)
    plain = place(lower, upper, size, 64, work=0, effort=FREE_LISTS)
    found = place(lower, upper, size, 64, effort=FREE_LISTS)
    assert plain.height > 1.05 * plain.lower_bound
    assert found.lower_bound <= found.height <= most * found.lower_bound
    assert not overlap(checked(lower, upper, size, 64, None), found.offsets)
    again = place(lower, upper, size, 64, effort=FREE_LISTS)
    assert (again.offsets == found.offsets).all()


def test_mixed_alignments_are_mended_too() -> None:
    lower, upper, size = wiring(4, 300, window=40)
    alignment = 64 << np.random.default_rng(1).integers(0, 3, len(size))
    problem = checked(lower, upper, size, alignment, None)
    start = place(lower, upper, size, alignment, work=0, effort=FREE_LISTS)
    found = mended(problem, start.offsets, start.lower_bound, 1000, 5_000_000, EFFORT, push)
    assert height(problem, found) < start.height and not overlap(problem, found) and not (found % alignment).any()

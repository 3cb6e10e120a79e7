from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreplan.planner import place
from foreplan.planner.placement import offsets as placer
from foreplan.planner.placement.core import outside_core
from tests.planner.problems import rectangles
from tests.profile import pick

Buffer = tuple[int, int, int, int]  # lower, upper, size, alignment


def arrays(buffers: list[Buffer]) -> list[np.ndarray]:
    return [np.array(column, np.int64) for column in zip(*buffers)]


def free(buffers: list[Buffer], offsets: dict[int, int], i: int, capacity: int) -> list[int]:
    """All aligned offsets at which buffer i meets none of those that lie, looked at one by one."""
    lower, upper, size, alignment = buffers[i]
    others = [(at, buffers[j]) for j, at in offsets.items() if buffers[j][2]]
    near = [(at, at + other[2]) for at, other in others if other[0] < upper and lower < other[1]]
    return [
        at
        for at in range(0, capacity - size + 1, alignment)
        if all(at + size <= low or high <= at for low, high in near)
    ]


buffer = st.tuples(st.integers(0, 9), st.integers(1, 5), st.integers(0, 9), st.sampled_from([1, 2, 4])).map(
    lambda b: (b[0], b[0] + b[1], b[2], b[3])
)


@settings(max_examples=pick(30, 60, 300), deadline=None)
@given(st.lists(buffer, min_size=1, max_size=12), st.integers(8, 60), st.integers(0, 1 << 30), st.sampled_from([1, 4]))
def test_what_is_set_aside_finds_a_place_wherever_the_others_lie(
    buffers: list[Buffer], capacity: int, seed: int, unit: int
) -> None:
    """The core anywhere within the capacity, at random, and the others one by one at random places still free."""
    buffers = [(lower, upper, size, alignment * unit) for lower, upper, size, alignment in buffers]
    rng = random.Random(seed)
    grain = min(b[3] for b in buffers)
    capacity = capacity // grain * grain * unit
    order = outside_core(*arrays(buffers), capacity)
    assert len(set(order.tolist())) == len(order)
    rounded = [(low, up, -(-size // grain) * grain, alignment) for low, up, size, alignment in buffers]
    offsets: dict[int, int] = {}
    core = [i for i in range(len(buffers)) if i not in set(order.tolist())]
    rng.shuffle(core)
    for i in core:
        places = free(rounded, offsets, i, capacity)
        if not places:  # this core has no placement, or these choices led to none
            return
        offsets[i] = rng.choice(places)
    for i in order.tolist():
        places = free(rounded, offsets, i, capacity)
        assert places
        offsets[i] = rng.choice(places)


def test_the_core_of_some_buffers() -> None:
    # Of the 15 offsets that 4 bytes have within 18, two others of 4 bytes deny 7 each.
    three = [(0, 1, 4, 1)] * 3
    assert len(outside_core(*arrays(three), 18)) == 3
    assert len(outside_core(*arrays(three), 17)) == 0
    # A tower of two that need all the room, and a small one beside them: it is set aside, they are not.
    tower = [(0, 2, 8, 1), (0, 2, 8, 1), (2, 3, 1, 1), (3, 4, 0, 1)]
    assert sorted(outside_core(*arrays(tower), 16).tolist()) == [2, 3]


def test_placing_the_core_first_reaches_bounds_that_all_together_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rectangles that fill all bytes for a time, and before it many small buffers, more than can be searched."""

    def problem(seed: int) -> list[Buffer]:
        rng = random.Random(seed)
        pieces = rectangles(rng, 400, 1 << 16, 60)
        large = [(a + 400, b + 400, d - c, 1) for a, b, c, d in pieces]
        early = [(t := rng.randint(0, 390), t + rng.randint(1, 10), rng.randint(1, 1000), 1) for _ in range(640)]
        return large + early

    problems = [problem(seed) for seed in range(6)]

    def reached() -> int:
        found = [place(*arrays(buffers)[:3], work=0) for buffers in problems]
        return sum(one.height == one.lower_bound for one in found)

    def all_together(problem, best, capacity, goal, work, effort, by_parts):  # type: ignore[no-untyped-def]
        return placer._at_length(problem, best, capacity, goal, work, effort, effort.ejections, by_parts=by_parts)

    with_core = reached()
    monkeypatch.setattr(placer, "_by_core", all_together)
    assert reached() < with_core

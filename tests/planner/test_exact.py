from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from foreplan.planner import place
from foreplan.planner.placement.exact import descend, fit
from foreplan.planner.placement.sections import sections_of

Piece = tuple[int, int, int, int]  # from and to in time, from and to in memory
Buffer = tuple[int, int, int, int, int]  # lower, upper, size, alignment, fixed offset or -1

WORK = 400_000_000


def overlap(columns: list[np.ndarray], offsets: np.ndarray) -> bool:
    lower, upper, size = columns
    for i in range(len(size)):
        meets = (
            (lower < upper[i]) & (lower[i] < upper) & (offsets < offsets[i] + size[i]) & (offsets[i] < offsets + size)
        )
        if meets.sum() > 1:
            return True
    return False


def perfect(rng: random.Random, n: int, width: int, height: int, across: float) -> list[Piece]:
    """Cut a rectangle of time and memory until there are n pieces: they fit into its height, without a byte to spare.

    A cut goes through time with probability `across`; large pieces are cut more often.
    """
    pieces = [(0, width, 0, height)]
    while len(pieces) < n:
        a, b, c, d = pieces.pop(
            max(
                range(len(pieces)),
                key=lambda k: (pieces[k][1] - pieces[k][0]) * (pieces[k][3] - pieces[k][2]) * rng.random() ** 2,
            )
        )
        if b - a > 1 and (rng.random() < across or d - c == 1):
            t = rng.randint(a + 1, b - 1)
            pieces += [(a, t, c, d), (t, b, c, d)]
        else:
            y = rng.randint(c + 1, d - 1)
            pieces += [(a, b, c, y), (a, b, y, d)]
    rng.shuffle(pieces)
    return pieces


def columns_of(pieces: list[Piece], unit: int = 1) -> list[np.ndarray]:
    return [np.array(column) for column in zip(*[(a, b, (d - c) * unit) for a, b, c, d in pieces])]


@pytest.mark.parametrize("across", [0.3, 0.5, 0.7])
@pytest.mark.parametrize("n", [30, 100, 250])
def test_perfect_packings_are_found(n: int, across: float) -> None:
    for seed in range(4):
        columns = columns_of(perfect(random.Random(f"{seed} {n} {across}"), n, 500, 1024, across), 1024)
        found = place(*columns, capacity=1 << 20, work=WORK)
        assert found.height == found.lower_bound == 1 << 20
        assert not overlap(columns, found.offsets)


def test_packings_with_holes_are_found() -> None:
    for seed in range(6):
        pieces = perfect(random.Random(seed), 120, 500, 1024, 0.5)[12:]
        found = place(*columns_of(pieces), capacity=1024, work=WORK)
        assert found.height <= 1024 and not overlap(columns_of(pieces), found.offsets)


def lowest(buffers: list[Buffer]) -> int:
    """Try all orders of the free buffers, each put at the lowest place above those before it that it lives with, and
    clear of the fixed ones: one of them is an optimum's order by offset, whose buffers this can only lower."""
    fixed = [b for b in buffers if b[4] >= 0]
    free = [b for b in buffers if b[4] < 0]
    best = 1 << 60
    for order in itertools.permutations(free):
        tops: list[tuple[int, int, int]] = []
        for lower, upper, size, alignment, _ in order:
            at = max((top for low, up, top in tops if low < upper and lower < up), default=0)
            at = -(-at // alignment) * alignment
            while hit := [f for f in fixed if f[0] < upper and lower < f[1] and f[4] < at + size and at < f[4] + f[2]]:
                at = max(f[4] + f[2] for f in hit)
                at = -(-at // alignment) * alignment
            tops.append((lower, upper, at + size))
        best = min(best, max((top for _, _, top in tops), default=0))
    return max([best, *(f[4] + f[2] for f in fixed)])


def sections(buffers: list[Buffer]):  # type: ignore[no-untyped-def]
    return sections_of(*[np.array(column, np.int64) for column in zip(*buffers)])


life = st.tuples(st.integers(0, 6), st.integers(1, 4)).map(lambda x: (x[0], x[0] + x[1]))
aligned = st.tuples(life, st.integers(1, 9), st.sampled_from([1, 1, 2, 4])).map(lambda x: (*x[0], x[1], x[2], -1))
coarse = st.tuples(life, st.integers(1, 9), st.sampled_from([2, 4])).map(lambda x: (*x[0], x[1], x[2], -1))


# Of few lives and sizes, many may be exchanged.
alike = st.tuples(st.sampled_from([(0, 1), (0, 2), (1, 2)]), st.sampled_from([1, 3]), st.sampled_from([1, 1, 4])).map(
    lambda x: (*x[0], x[1], x[2], -1)
)


@settings(max_examples=300, deadline=None)
@example([(0, 1, 1, 4, -1)] * 2 + [(0, 2, 1, 1, -1)] * 2 + [(0, 2, 3, 1, -1)], [-1] * 6)
@given(
    st.one_of(*(st.lists(each, min_size=1, max_size=6) for each in (aligned, coarse, alike))),
    st.one_of(st.just([-1] * 6), st.lists(st.integers(-8, 8), min_size=6, max_size=6)),
)
def test_the_least_capacity_that_fits_is_that_of_brute_force(buffers: list[Buffer], wanted: list[int]) -> None:
    """Around buffers that are fixed, or with none of them."""
    taken: list[Buffer] = []
    for lower, upper, size, alignment, _ in buffers:
        at = wanted[len(taken)] * alignment
        clear = all(f[4] < 0 or f[1] <= lower or upper <= f[0] or f[4] + f[2] <= at or at + size <= f[4] for f in taken)
        taken.append((lower, upper, size, alignment, at if at >= 0 and clear else -1))
    least = lowest(taken)
    found = fit(sections(taken), least, WORK)
    assert found.offsets is not None
    lower, upper, size, alignment, fixed = [np.array(column) for column in zip(*taken)]
    assert not overlap([lower, upper, size], found.offsets)
    assert (found.offsets + size).max() <= least and not (found.offsets % alignment).any()
    assert (found.offsets == fixed)[fixed >= 0].all()
    assert fit(sections(taken), least - 1, WORK).proved


def test_a_descent_ends_with_the_optimum_and_its_proof() -> None:
    rng = random.Random(8)
    raised = 0
    for _ in range(30):
        lives = [(t := rng.randint(0, 6), t + rng.randint(1, 5)) for _ in range(6)]
        buffers = [(*life, rng.randint(1, 7), rng.choice([1, 2, 4]), -1) for life in lives]
        live = [sum(b[2] for b in buffers if b[0] <= t < b[1]) for t in range(12)]
        result = descend(sections(buffers), np.arange(6) * 8, max(live), max(live), WORK)
        assert result.height == result.bound == lowest(buffers)
        raised += result.bound > max(live)
    assert raised


def test_the_same_instance_gives_the_same_offsets() -> None:
    columns = columns_of(perfect(random.Random(3), 90, 200, 4096, 0.5)[9:])
    first, second = (place(*columns, work=20_000_000) for _ in range(2))
    assert (first.offsets == second.offsets).all()
    assert (first.height, first.lower_bound) == (second.height, second.lower_bound)


def test_a_search_follows_its_guide() -> None:
    pieces = perfect(random.Random(5), 200, 500, 1024, 0.35)
    given = sections([(a, b, d - c, 1, -1) for a, b, c, d in pieces])
    offsets = np.array([c for _, _, c, _ in pieces])
    assert fit(given, 1024, 30_000_000).offsets is None
    found = fit(given, 1024, 30_000_000, guide=offsets).offsets
    assert found is not None and (found + given.size).max() == 1024 and not overlap(columns_of(pieces), found)


def test_more_work_never_gives_a_higher_placement() -> None:
    pieces = perfect(random.Random(7), 200, 300, 1024, 0.5)[20:]
    heights = [place(*columns_of(pieces), work=work).height for work in (0, 50_000_000, 400_000_000)]
    assert heights[0] > heights[1] >= heights[2] >= place(*columns_of(pieces), work=0).lower_bound


def test_work_is_bounded() -> None:
    columns = columns_of(perfect(random.Random(1), 300, 500, 1 << 30, 0.5)[30:])
    arrays = [*columns, np.ones_like(columns[0]), -np.ones_like(columns[0])]
    assert fit(sections_of(*arrays), int(columns[2].max()), 10_000_000).work < 40_000_000

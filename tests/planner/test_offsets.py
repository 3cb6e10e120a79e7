from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreplan.base.errors import PlanError
from foreplan.planner import place
from foreplan.planner.effort import PlacementEffort
from foreplan.planner.placement import offsets as placer
from foreplan.planner.placement.problem import checked
from tests.profile import pick

Buffers = list[tuple[int, int, int]]  # lower, upper, size


def columns(buffers: Buffers) -> tuple[list[int], list[int], list[int]]:
    return [b[0] for b in buffers], [b[1] for b in buffers], [b[2] for b in buffers]


def overlap(buffers: Buffers, offsets: np.ndarray) -> bool:
    for (a, (la, ua, sa)), (b, (lb, ub, sb)) in itertools.combinations(enumerate(buffers), 2):
        if la < ub and lb < ua and max(offsets[a], offsets[b]) < min(offsets[a] + sa, offsets[b] + sb):
            return True
    return False


def optimum(buffers: Buffers) -> int:
    """Try all orders, each buffer put right above those before it that it lives with: one of them is an optimum's
    order by offset, whose buffers this rule can only lower."""
    best = 1 << 60
    for order in itertools.permutations(range(len(buffers))):
        tops: list[tuple[int, int, int]] = []
        for i in order:
            lower, upper, size = buffers[i]
            at = max((top for low, up, top in tops if low < upper and lower < up), default=0)
            tops.append((lower, upper, at + size))
        best = min(best, max(top for _, _, top in tops))
    return best


def live_peak(buffers: Buffers) -> int:
    times = {lower for lower, _, _ in buffers}
    return max(sum(size for lower, upper, size in buffers if lower <= t < upper) for t in times)


buffer = st.tuples(st.integers(0, 7), st.integers(1, 4), st.integers(1, 6)).map(lambda b: (b[0], b[0] + b[1], b[2]))


@settings(max_examples=60, deadline=None)
@given(st.lists(buffer, min_size=1, max_size=6))
def test_tiny_instances_reach_the_optimum_of_brute_force(buffers: Buffers) -> None:
    found = place(*columns(buffers))
    assert not overlap(buffers, found.offsets)
    assert live_peak(buffers) <= found.lower_bound == found.height == optimum(buffers)


@settings(max_examples=60, deadline=None)
@given(st.lists(buffer, min_size=1, max_size=40), st.lists(st.sampled_from([1, 2, 4, 8]), min_size=40, max_size=40))
def test_every_heuristic_respects_lives_and_alignments(buffers: Buffers, alignments: list[int]) -> None:
    lower, upper, size = columns(buffers)
    alignment = alignments[: len(buffers)]
    problem = checked(lower, upper, size, alignment, None)
    bound, grain = placer._lower_bound(problem)
    ceiling = -(-bound // grain) * grain
    offsets = np.zeros(len(buffers), np.int64)
    for name, attempt in placer._attempts(problem, ceiling, PlacementEffort()):
        height, _ = attempt(placer.NO_LIMIT, offsets)
        assert height == (offsets + problem.size).max() >= bound, name
        assert not overlap(buffers, offsets), name
        assert not (offsets % problem.alignment).any(), name
        assert attempt(height, offsets)[0] == -1, name


def test_a_heuristic_is_named_and_arrays_are_int64() -> None:
    found = place([0, 1], [2, 3], [64, 64], 64)
    assert found.heuristic and found.offsets.dtype == np.int64 and found.height == 128


def test_nothing_and_empty_buffers() -> None:
    assert place([], [], []).height == 0
    found = place([0, 0], [1, 1], [0, 5])
    assert (found.height, list(found.offsets)) == (5, [0, 0])


def test_fixed_buffers_stay() -> None:
    rng = random.Random(0)
    for _ in range(30):
        buffers = [(t := rng.randrange(20), t + rng.randint(1, 8), 4 * rng.randint(1, 30)) for _ in range(25)]
        free = place(*columns(buffers), 4)
        fixed = [int(o) if rng.random() < 0.3 else -1 for o in free.offsets]
        found = place(*columns(buffers), 4, fixed)
        assert not overlap(buffers, found.offsets)
        assert all(o == f for o, f in zip(found.offsets, fixed) if f >= 0)


def test_fixed_buffers_that_overlap_are_refused() -> None:
    with pytest.raises(PlanError, match=r"buffers 0 and 1 .* overlap, at 4"):
        place([0, 1], [2, 3], [8, 8], 4, [0, 4])


def test_a_capacity_that_will_do_ends_the_search() -> None:
    buffers = [(t, t + 1 + t % 5, 10 + t * 7 % 90) for t in range(60)]
    first = place(*columns(buffers), capacity=10**6)
    assert first.heuristic == "online forward, best fit"
    assert place(*columns(buffers)).height <= first.height


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0], [0], [1]), r"life \[0, 0\)"),
        (([0], [1], [-1]), "size -1"),
        (([0], [1], [1], [3]), "alignment 3"),
        (([0], [1], [1], 4, [2]), "fixed offset"),
        (([0, 1], [1], [1]), "lengths"),
    ],
)
def test_bad_arguments_are_named(arguments: tuple, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        place(*arguments)


def test_nested_and_staircase_lives_reach_the_bound() -> None:
    n = 300
    rng = random.Random(3)
    size = [64 * rng.randint(1, 500) for _ in range(n)]
    nested = [(i, 2 * n - i, size[i]) for i in range(n)]
    assert place(*columns(nested)).height == sum(size)
    chain = [(i, i + 2, size[i]) for i in range(n)]
    assert place(*columns(chain)).height == max(a + b for a, b in itertools.pairwise(size))


def test_ten_thousand_buffers_of_a_training_shape() -> None:
    rng = random.Random(5)
    n = 5000
    saved = [(i, 2 * n - i, 64 * rng.randint(1, 5000)) for i in range(n)]
    passing = [(i, i + 1, 64 * rng.randint(1, 50000)) for i in range(2 * n)]
    found = place(*columns(saved + passing), 64)
    assert found.height <= 1.02 * live_peak_sweep(saved + passing)


def live_peak_sweep(buffers: Buffers) -> int:
    change = np.zeros(max(upper for _, upper, _ in buffers) + 1, np.int64)
    for lower, upper, size in buffers:
        change[lower] += size
        change[upper] -= size
    return int(np.cumsum(change).max())


def cut(rng: random.Random, n: int) -> Buffers:
    """A rectangle of 40 steps by 64 bytes, cut across at random until there are n pieces: they fit without a hole."""
    pieces = [(0, 40, 0, 64)]
    while len(pieces) < n:
        a, b, c, d = pieces.pop(max(range(len(pieces)), key=lambda k: rng.random() * (pieces[k][1] - pieces[k][0])))
        if b - a > 1 and (d - c == 1 or rng.random() < 0.5):
            t = rng.randint(a + 1, b - 1)
            pieces += [(a, t, c, d), (t, b, c, d)]
        else:
            y = rng.randint(c + 1, d - 1) if d - c > 1 else d
            pieces += [(a, b, c, y), (a, b, y, d)] if y < d else [(a, b, c, d)]
    return [(a, b, d - c) for a, b, c, d in pieces]


def test_shaken_orders_reach_bounds_that_plain_ones_miss() -> None:
    problems = [cut(random.Random(seed), 30) for seed in range(40)]
    shaken = sum(place(*columns(buffers), work=0).height == 64 for buffers in problems)
    unshaken = PlacementEffort(shaking=0)
    plain = sum(place(*columns(buffers), work=0, effort=unshaken).height == 64 for buffers in problems)
    assert plain < shaken >= 36


def test_the_largest_by_themselves_reach_bounds_that_all_together_miss() -> None:
    """More buffers than can be searched: some large and short-lived, the rest small and in the way."""

    def problem(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rng = np.random.default_rng(seed)
        n = 700
        lower, large = rng.integers(0, 400, n), rng.random(n) < 0.35
        upper = lower + 1 + np.where(large, rng.integers(1, 25, n), rng.integers(1, 120, n))
        return lower, upper, np.where(large, rng.integers(5, 40, n) * 65536, rng.integers(1, 40, n) * 64)

    by_parts = PlacementEffort(dives=0, ejections=())
    for seed in pick((11,), (11,), (11, 13, 15)):
        lower, upper, size = problem(seed)
        found = place(lower, upper, size, alignment=64, effort=by_parts)
        assert "largest" in found.heuristic and found.height <= 1.0002 * found.lower_bound
        buffers = list(zip(lower.tolist(), upper.tolist(), size.tolist()))
        assert not overlap(buffers, found.offsets)
        at_once = place(lower, upper, size, alignment=64, effort=replace(by_parts, largest=()))
        assert at_once.height > found.height


def test_large_instances_whose_lives_are_short_are_placed_greedily() -> None:
    """30,000 buffers of random lives and sizes, of which free lists alone make some percent more than the live set."""
    rng = np.random.default_rng(3)
    n = 30_000
    lower = rng.integers(0, 2 * n, n)
    upper = lower + 1 + (rng.exponential(1, n) * rng.choice([3, 30, 300], n)).astype(np.int64)
    size = 64 * np.maximum(1, rng.lognormal(6, 1.5, n)).astype(np.int64)
    found = place(lower, upper, size, alignment=64)
    assert found.height <= 1.001 * found.lower_bound
    at = np.argsort(lower, kind="stable")
    alive: list[int] = []
    for i in at.tolist():
        alive = [j for j in alive if upper[j] > lower[i]]
        start, end = found.offsets[i], found.offsets[i] + size[i]
        assert all(found.offsets[j] + size[j] <= start or end <= found.offsets[j] for j in alive)
        alive.append(i)

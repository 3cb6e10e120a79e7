from __future__ import annotations

import random

import numpy as np
import pytest

from foreplan.planner import place
from foreplan.planner.effort import PlacementEffort
from foreplan.planner.placement.ejection import eject
from foreplan.planner.placement.sections import together
from tests.planner.problems import rectangles
from tests.profile import pick


def columns(seed: int, n: int = 60, holes: int = 6) -> list[np.ndarray]:
    """Lower, upper and size of pieces cut from a rectangle of 1,024 units of 64 bytes, some of them taken out."""
    rng = random.Random(seed)
    pieces = rectangles(rng, 200, 1024, n)
    rng.shuffle(pieces)
    return [np.array(column) for column in zip(*[(a, b, 64 * (d - c)) for a, b, c, d in pieces[holes:]])]


def run(
    given: list[np.ndarray], capacity: int, offsets: np.ndarray, alignment: np.ndarray, budget: int = 5_000_000
) -> tuple[int, int]:
    lower, upper, size = given
    rank = np.argsort(np.argsort(-size, kind="stable"))
    return eject(rank, False, *together(lower, upper), size, alignment, capacity, budget, np.uint64(7), offsets)


def clear(given: list[np.ndarray], offsets: np.ndarray) -> bool:
    lower, upper, size = given
    placed = np.flatnonzero(offsets >= 0)
    return not any(
        lower[i] < upper[j]
        and lower[j] < upper[i]
        and max(offsets[i], offsets[j]) < min(offsets[i] + size[i], offsets[j] + size[j])
        for i in placed
        for j in placed
        if i < j
    )


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("budget", [2_000, 5_000_000])
def test_what_lies_never_overlaps_and_keeps_to_capacity_and_alignment(seed: int, budget: int) -> None:
    given = columns(seed)
    rng = np.random.default_rng(seed)
    alignment = 64 << rng.integers(0, 3, len(given[0]))
    offsets = np.full(len(alignment), -1)
    left, _ = run(given, 80 * 1024, offsets, alignment, budget)
    assert left == (offsets < 0).sum()
    assert clear(given, offsets)
    placed = offsets >= 0
    assert not (offsets % alignment)[placed].any() and (offsets + given[2])[placed].max() <= 80 * 1024


def test_most_packings_with_some_room_are_found() -> None:
    found = 0
    for seed in range(12):
        given = columns(seed)
        offsets = np.full(len(given[0]), -1)
        found += run(given, 70 * 1024, offsets, np.full(len(offsets), 64))[0] == 0
    assert found >= 9


def test_what_lies_at_first_stays_where_nothing_needs_its_place() -> None:
    given = [np.array(column) for column in ([0, 0, 5], [4, 4, 9], [64, 128, 64])]
    offsets = np.array([640, -1, 320])
    assert run(given, 1024, offsets, np.full(3, 64))[0] == 0
    assert offsets.tolist() == [640, 0, 320]


def test_work_is_bounded_where_nothing_fits() -> None:
    given = [np.array(column) for column in ([0, 0, 0], [1, 1, 1], [64, 64, 64])]
    offsets = np.full(3, -1)
    left, work = run(given, 128, offsets, np.full(3, 64), 10_000)
    assert left == 1 and 10_000 <= work < 10_100


def test_ejection_reaches_bounds_that_the_other_placers_miss() -> None:
    """More buffers than can be searched: some large and short-lived, the rest small and in the way."""

    def heights(effort: PlacementEffort) -> list[float]:
        found = []
        for seed in pick((11,), (11,), (11, 13, 15)):
            rng = np.random.default_rng(seed)
            lower, large = rng.integers(0, 400, 700), rng.random(700) < 0.35
            upper = lower + 1 + np.where(large, rng.integers(1, 25, 700), rng.integers(1, 120, 700))
            size = np.where(large, rng.integers(5, 40, 700) * 65536, rng.integers(1, 40, 700) * 64)
            placed = place(lower, upper, size, alignment=64, effort=effort)
            found.append(placed.height / placed.lower_bound)
        return found

    with_ejection = heights(PlacementEffort(dives=0, largest=()))
    assert sum(with_ejection) < sum(heights(PlacementEffort(dives=0, largest=(), ejections=())))

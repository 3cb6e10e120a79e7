"""Dives: training plans at odd batches, of more buffers than the long search takes, reach their bound."""

from __future__ import annotations

import random

import numpy as np
import pytest

import foreplan as fp
from foreplan.planner import place
from foreplan.planner.driver import find_base
from foreplan.planner.effort import WITHOUT, PlacementEffort
from foreplan.planner.placement.layout import arena_bytes, assemble, lay_out, schedule
from foreplan.planner.verify.verifier import verify
from tests.planner.problems import rectangles

# All that comes behind dives is cut short; without layout_work there are no dives either.
LITTLE = {"shaking": 0, "ejections": (), "ejections_of_parts": (), "fewer": (), "largest": (), "mending": 1}


@pytest.mark.parametrize(
    ("model", "in_place"),
    [
        ("resnet18:batch=1", False),
        ("resnet18:batch=7", True),
        ("mobilenet_v2:batch=1", True),
        ("resnet50:batch=1", True),
        ("resnet50:batch=1", False),
    ],
)
def test_plans_above_their_bound_reach_it(model: str, in_place: bool) -> None:
    graph = fp.models.build(model)
    problem = fp.lower(fp.differentiate(graph, fp.losses.cross_entropy, fp.optim.Nesterov(0.1)))
    base = find_base(problem, WITHOUT["placement search"])
    given = schedule(problem, "the same", base.schedule.order, in_place=in_place)
    without = lay_out(problem, given, PlacementEffort(**LITTLE, layout_work=0))
    assert arena_bytes(problem, without.heights) > given.bound
    layout = lay_out(problem, given, PlacementEffort(**LITTLE, layout_work=1))
    assert arena_bytes(problem, layout.heights) == given.bound
    assert layout.placement == "dives"
    verify(assemble(problem, given, layout, None), problem)


def peaked(seed: int) -> list[np.ndarray]:
    """Lower, upper and size: all pieces of a rectangle that live at its middle, and most others."""
    rng = random.Random(seed)
    pieces = [p for p in rectangles(rng, 200, 1024, 150) if p[0] <= 100 < p[1] or rng.random() < 0.7]
    return [np.array(column) for column in zip(*[(a, b, 64 * (d - c) - rng.randrange(64)) for a, b, c, d in pieces])]


def test_what_dives_place_overlaps_nothing() -> None:
    reached = 0
    for seed in range(12):
        lower, upper, size = peaked(seed)
        n = np.arange(len(size))
        placed = place(lower, upper, size, 64, work=0)
        found = place(lower, upper, size, 64, work=1, effort=PlacementEffort(**LITTLE))
        reached += found.heuristic == "dives"
        assert placed.lower_bound <= found.lower_bound <= found.height <= -(-placed.height // 64) * 64
        assert found.height == (found.offsets + size).max() and not (found.offsets % 64).any()
        for i in n:
            meets = (lower < upper[i]) & (lower[i] < upper) & (n != i)
            meets &= (found.offsets < found.offsets[i] + size[i]) & (found.offsets[i] < found.offsets + size)
            assert not meets.any()
        again = place(lower, upper, size, 64, work=1, effort=PlacementEffort(**LITTLE))
        assert (again.offsets == found.offsets).all()
    assert reached >= 2

"""Loosened chains: what could be written in place lies elsewhere where that is free, and placement gets its way."""

from __future__ import annotations

from dataclasses import replace

import pytest

import foreplan as fp
from foreplan.planner import plan, verify
from foreplan.planner.driver import find_base
from foreplan.planner.placement.layout import arena_bytes, assemble, lay_out, loosened, schedule, settle
from tests.planner.problems import training_net
from tests.planner.training_graphs import random_training


def test_a_placement_above_its_bound_reaches_it_with_chains_cut() -> None:
    graph = fp.models.build("resnet18:batch=3")
    step = fp.compile(graph, fp.losses.cross_entropy, fp.optim.Nesterov(0.1), remat="off")
    base = find_base(step.program)
    assert base.arena > base.schedule.bound  # the placers by themselves do not get there
    assert step.plan.arena_bytes == step.plan.lower_bound_bytes == base.schedule.bound
    assert step.plan.certificate.stages[-1] == ("loosened", step.plan.arena_bytes)


@pytest.mark.parametrize("seed", range(12))
def test_cut_chains_hold_no_more_at_the_peak(seed: int) -> None:
    for problem in (random_training(seed, 6), training_net(4 + seed)):
        given = schedule(problem, "as listed", [step.action for step in plan(problem, remat="off").steps])
        for least in (0, 64, given.bound // 50):
            loose = loosened(problem, given, least)
            if loose is None:
                continue
            assert len(loose.region) > len(given.alias_sets.region)
            cut = replace(given, alias_sets=loose)
            verify(assemble(problem, cut, lay_out(problem, cut), None), problem)
        layout = lay_out(problem, given)
        settled, better = settle(problem, given, layout)
        heights = arena_bytes(problem, settled.heights), arena_bytes(problem, layout.heights)
        assert heights[0] < heights[1] if better else settled is layout

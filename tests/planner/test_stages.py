from __future__ import annotations

from foreplan.planner import explain, plan
from tests.planner.problems import random_problem, training_chain, training_net
from tests.profile import pick


def test_each_stage_of_a_chain_by_hand() -> None:
    """Ten layers; the peak is in the backward of the last one."""
    width, weight, scratch = 1 << 20, 1 << 18, 1 << 16
    problem = training_chain(10)
    found = plan(problem, remat="off")
    told = explain(problem, found)
    rows = {stage.name: stage for stage in told.stages}
    assert list(rows) == ["program order", "order", "alias", "updates", "remat", "placement"]
    stored = 20 * weight
    # In the relu's backward: the input, ten activations, the gradient before and, out of place, after it; the loss.
    # In place, then, in the weight gradient: one activation fewer, the gradients of the layer's result and input.
    assert rows["program order"].live_bytes == stored + 13 * width + 64
    assert rows["alias"].live_bytes == stored + 12 * width + weight + scratch + 64
    assert rows["updates"].live_bytes == rows["remat"].live_bytes == rows["placement"].live_bytes
    assert rows["placement"].arena_bytes == found.arena_bytes
    assert told.each_once_bytes == found.lower_bound_bytes


def test_stages_of_recomputing_plans() -> None:
    problem = training_net(6)
    found = plan(problem)
    rows = explain(problem, found).stages
    assert rows[4].live_bytes == found.lower_bound_bytes <= rows[3].live_bytes <= rows[2].live_bytes
    assert all(row.live_bytes <= row.arena_bytes for row in rows)


def test_random_problems_have_stages() -> None:
    for seed in range(pick(3, 6, 40)):
        problem = random_problem(seed, 20)
        told = explain(problem, plan(problem))
        assert told.each_once_bytes <= told.stages[3].live_bytes

from __future__ import annotations

import pytest

from foreplan.base.errors import DoesNotFitError, UsageError
from foreplan.planner import check_problem, plan
from tests.planner.problems import REGIONS, training_chain, training_net
from tests.planner.texts import problem
from tests.profile import pick


def test_a_plan_as_text() -> None:
    asked = problem(
        """
        w 100 stored; step 8 stored
        double: x 256 input -> a 256 | a?x
        mix: a, w -> b 256 | ws=32
        sum: b -> y 64 output
        count: step -> step' 8 output home=step | step'!step
        """,
        REGIONS[:2],
    )
    # In the arena: x and a in place, b beside a, 64 bytes of scratch; y takes bytes of a or the scratch.
    found = plan(asked)
    lines = found.as_text(asked).splitlines()
    assert lines[:4] == [
        "plan arena=768 (768 B) lower_bound=768 order_lower_bound=768 heights=[192, 576]",
        "start w@0",
        "start step@128",
        f"start x@{found.starts[2][1]}",
    ]
    order = [line.split()[1].rstrip(":") for line in lines[4:8]]
    assert sorted(order) == ["count", "double", "mix", "sum"]
    assert f"double: a@{found.starts[2][1]} = x@{found.starts[2][1]}" in found.as_text(asked)
    assert "count: step'@128 = step@128" in found.as_text(asked)
    assert lines[8:] == ["end w@0", f"end y@{found.ends[1][1]}", "end step'@128"]


def test_stored_values_lie_as_listed_in_every_program_of_a_model() -> None:
    training, inference = training_chain(6), training_chain(3)
    offsets = [dict(plan(problem).starts) for problem in (training, inference)]
    assert [offsets[0][i] for i in range(3)] == [offsets[1][i] for i in range(3)] == [i << 18 for i in range(3)]


@pytest.mark.parametrize("blocks", [2, 5, 8, 16, 24])
def test_training_nets_reach_the_bound(blocks: int) -> None:
    for seed in range(pick(2, 2, 4)):
        problem = training_net(blocks, seed=seed)
        for remat in ("off", "auto"):
            found = plan(problem, remat=remat)
            assert found.arena_bytes <= 1.005 * found.lower_bound_bytes


def test_a_chain_by_hand() -> None:
    """In the last layer's backward: the input, four activations and two gradients of that size, the scratch of one
    action, the loss; all weights and momenta; and one weight's gradient, since its update must await the data's."""
    width, weight = 1 << 20, 1 << 18
    found = plan(training_chain(5))
    assert found.arena_bytes == found.lower_bound_bytes
    assert found.lower_bound_bytes == 7 * width + (1 << 16) + 64 + 11 * weight


def test_budgets() -> None:
    problem = training_chain(4)
    free = plan(problem, remat="off")
    for budget in (free.arena_bytes, f"{free.arena_bytes}", "1GiB", 1.0, 2.5):
        found = plan(problem, budget)
        assert found.steps == free.steps and found.budget is not None and found.budget >= free.arena_bytes
    with pytest.raises(DoesNotFitError) as caught:
        plan(problem, 0.5, remat="off")
    error = caught.value
    assert (error.needed, error.capacity) == (free.arena_bytes, free.arena_bytes // 2)
    assert error.lower_bound == free.lower_bound_bytes and error.exit_code == 3
    message = str(error)
    peak = free.certificate.peak_step
    assert f"step {peak} ({problem.actions[free.steps[peak].action].name})" in message
    assert "1.00 MiB" in message and "recomputing activations" in message
    with pytest.raises(DoesNotFitError, match="no schedule of these actions needs less than"):
        plan(problem, 1000)


@pytest.mark.parametrize("budget", [-1, "lots", True, 0.0, -0.5, float("nan"), float("inf")])
def test_bad_budgets(budget: object) -> None:
    with pytest.raises(UsageError):
        plan(training_chain(1), budget)  # type: ignore[arg-type]


def test_remat_is_checked() -> None:
    problem = training_chain(2)
    assert plan(problem, remat="auto") == plan(problem)
    with pytest.raises(UsageError, match="there is no remat 'yes'; choose one of off, auto"):
        plan(problem, remat="yes")


def test_problems_without_steps_or_values() -> None:
    assert plan(problem("")).arena_bytes == 0
    asked = problem("w 100 stored; x 100 input")
    check_problem(asked)
    found = plan(asked)
    assert (found.arena_bytes, found.heights) == (256, (128, 128, 0))
    assert found.ends == ((0, 0),)


def test_updates_listed_last_are_moved_where_gradients_would_pile_up() -> None:
    problem = training_chain(20, width=1 << 14, weight=1 << 20)
    found = plan(problem)
    stages = dict(found.certificate.stages)
    assert stages["program order"] - found.arena_bytes >= 17 << 20
    assert found.arena_bytes == found.lower_bound_bytes


def test_many_actions() -> None:
    blocks = pick(56, 100, 2800)
    problem = training_net(blocks)
    found = plan(problem)
    assert len(found.steps) > 18 * blocks - 100
    assert found.arena_bytes <= 1.001 * found.lower_bound_bytes

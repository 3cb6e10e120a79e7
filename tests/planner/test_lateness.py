from __future__ import annotations

import pytest

from foreplan.planner import Action, Problem, Region, Role, Value, explain, plan
from foreplan.planner.recompute.lateness import as_late
from tests.planner.problems import training_net


def chain(*actions: Action) -> Problem:
    """x → a → b → c → y, where y is computed from a as well."""
    roles = (Role.INPUT, Role.TRANSIENT, Role.TRANSIENT, Role.TRANSIENT, Role.OUTPUT)
    values = tuple(Value(name, 64, role=role) for name, role in zip("xabcy", roles))
    return Problem(values, actions, (Region("arena"),))


A, B, C, Y = Action("a", (0,), (1,)), Action("b", (1,), (2,)), Action("c", (2,), (3,)), Action("y", (3, 1), (4,))


def test_runs_again_are_put_right_ahead_of_what_needs_them() -> None:
    problem = chain(A, B, C, Y)
    late = as_late(problem, (0, 1, 0, 2, 3), [(0, 1, 2, 3)])
    assert late is not None and late.order == (0, 1, 3, 2, 4)
    assert [action.name for action in late.problem.actions] == ["a#0", "b#1", "a#2", "c#3", "y#4"]


def test_steps_that_are_late_already_have_nothing_to_undo() -> None:
    assert as_late(chain(A, B, C, Y), (0, 1, 2, 0, 3), [(0, 1, 2, 3)]) is None
    assert as_late(chain(A, B, C, Y), (0, 1, 2, 3), [(0, 1, 2, 3)]) is None


def test_orders_that_replace_what_is_needed_again_do_not_count() -> None:
    """a is computed from a weight, which u replaces."""
    values = (
        Value("w", 64, role=Role.STORED),
        Value("next w", 64, home=0),
        Value("a", 64),
        Value("b", 64),
        Value("y", 64, role=Role.OUTPUT),
    )
    actions = (
        Action("a", (0,), (2,)),
        Action("b", (2,), (3,)),
        Action("u", (3,), (1,), effect=True),
        Action("y", (2,), (4,)),
    )
    problem = Problem(values, actions, (Region("arena"),))
    steps, before, after = (0, 1, 0, 2, 3), (0, 1, 2, 3), (0, 1, 3, 2)
    assert as_late(problem, steps, [before]) is None
    late = as_late(problem, steps, [before, after])
    assert late is not None and [late.problem.actions[run].name[0] for run in late.order] == ["a", "y", "a", "b", "u"]


@pytest.mark.whole_search
def test_a_plan_within_a_tight_budget_tells_what_the_new_order_brought() -> None:
    problem = training_net(6)
    found = plan(problem, 0.55)
    rows = {stage.name: stage for stage in explain(problem, found).stages}
    assert list(rows)[4:] == ["remat", "reorder", "placement"]
    assert rows["reorder"].live_bytes == found.lower_bound_bytes < rows["remat"].live_bytes
    assert rows["remat"].live_bytes <= rows["updates"].live_bytes
    assert "as late as something needs them" in rows["remat"].detail

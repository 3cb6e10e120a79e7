"""A malformed problem, given to any public function: an error that says what is wrong and where."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import foreplan as fp
from foreplan import planner
from foreplan.base.errors import PlanError, UsageError
from foreplan.planner import Action, Plan, Problem, Role, Value, plan
from tests.planner.malformed import DAMAGES, Damage, malformed

GOOD = Problem(
    (Value("x", 64, role=Role.INPUT), Value("y", 64, role=Role.OUTPUT)), (Action("f", reads=(0,), writes=(1,)),)
)
PLAN = plan(GOOD)
# What the functions take besides a problem, by the names of their parameters.
OTHERS: dict[str, Any] = {"plan": PLAN, "step": 0, "orders": [[0]]}


def takers() -> dict[str, Callable[..., Any]]:
    """Every public function that takes a Problem, those of `foreplan` itself among them."""
    named = {name: getattr(planner, name) for name in planner.__all__} | {"fp.plan": fp.plan, "fp.verify": fp.verify}
    return {
        name: found
        for name, found in named.items()
        if inspect.isfunction(found) and "problem" in inspect.signature(found).parameters
    }


def call(function: Callable[..., Any], problem: Any) -> Any:
    wanted = inspect.signature(function).parameters
    needed = {name: OTHERS[name] for name, each in wanted.items() if each.default is each.empty and name != "problem"}
    return function(problem=problem, **needed)


@pytest.mark.parametrize("name", takers())
def test_the_good_one_is_taken(name: str) -> None:
    call(takers()[name], GOOD)


def test_the_functions_are_those_that_there_are() -> None:
    assert {"plan", "plan_curve", "verify", "explain", "buffers", "totals", "without_reuse", "fp.plan"} <= set(takers())


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__.strip("_"))
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_what_is_wrong_is_said_by_each(damage: Damage, data: st.DataObject) -> None:
    wrong = data.draw(malformed(damage))
    said = set()
    for function in takers().values():
        with pytest.raises(PlanError) as caught:
            call(function, wrong.problem)
        assert type(caught.value) is PlanError
        said.add(str(caught.value))
    (message,) = said
    assert any(name in message for name in wrong.names), (message, wrong.names)
    assert len(message) < 500


@pytest.mark.parametrize("thing", [None, 3, "problem", [], (), {}, object(), GOOD.values])
@pytest.mark.parametrize("name", takers())
def test_what_is_no_problem_is_said(name: str, thing: Any) -> None:
    with pytest.raises(UsageError, match="Problem"):
        call(takers()[name], thing)


OF_A_PLAN = [name for name, function in takers().items() if "plan" in inspect.signature(function).parameters]


@pytest.mark.parametrize("name", OF_A_PLAN)
def test_a_plan_of_another_problem_is_refused(name: str) -> None:
    other = Problem((*GOOD.values, Value("z", 128, role=Role.OUTPUT)), (Action("f", reads=(0,), writes=(1, 2)),))
    with pytest.raises(PlanError, match=re.escape(f"answers problem {GOOD.digest[:12]}, not this one")):
        call(takers()[name], other)


@pytest.mark.parametrize("name", OF_A_PLAN)
def test_what_is_no_plan_is_said(name: str) -> None:
    function = takers()[name]
    needed = {key: OTHERS[key] for key in inspect.signature(function).parameters if key in OTHERS}
    with pytest.raises(UsageError, match="a Plan is needed, got list"):
        function(problem=GOOD, **(needed | {"plan": [0]}))


@pytest.mark.parametrize("function", [planner.live_at, planner.bytes_by_category])
@pytest.mark.parametrize("step", [-1, 1, None, 0.0, 10**30])
def test_a_step_that_is_not_there(function: Callable[[Plan, Problem, Any], Any], step: Any) -> None:
    with pytest.raises(UsageError, match=r"step must be an int from 0 to 0, got"):
        function(PLAN, GOOD, step)


@pytest.mark.parametrize("orders", [[[1]], [[-1]], [[None]], [[0.0]], [None], None, 3, [["f"]]])
def test_an_order_of_actions_that_are_not_there(orders: Any) -> None:
    with pytest.raises(UsageError, match="an order is a sequence of indices of actions, each from 0 to 0"):
        planner.totals(GOOD, orders)

"""The one base of added flops and time: the fastest candidates, each value computed once, whatever a plan chose."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from foreplan.base.errors import UsageError
from foreplan.planner import Overwrite, Problem, Role, plan, plan_curve, totals
from foreplan.planner.costs import costs_of, fastest
from tests.planner.problems import REGIONS, Maker


def two_kernels() -> Problem:
    """A chain of three, each by a fast kernel with scratch and a slow one without, of more flops; and a copy."""
    make = Maker(REGIONS)
    last = make.value("x", 1 << 12, role=Role.INPUT)
    for i, role in enumerate((Role.TRANSIENT, Role.TRANSIENT, Role.OUTPUT)):
        new = make.value(f"y{i}", 1 << 12, role=role)
        make.action(f"slow{i}", [last], [new], nanoseconds=30, flops=200, workspace_region=1)
        make.action(f"fast{i}", [last], [new], nanoseconds=10, flops=100, workspace=1 << 14, workspace_region=1)
        last = new
    away = make.value("away", 1 << 12, 2)
    make.action("save", [1], [away], nanoseconds=1)
    make.action("fetch", [away], [1], nanoseconds=1)
    return make.problem()


def test_the_base_is_the_fastest_of_each_once() -> None:
    assert fastest(two_kernels()) == (1, 3, 5)


@pytest.mark.parametrize(
    ("order", "time", "flops"), [((1, 3, 5), 0, 0), ((0, 2, 4), 2, 1), ((1, 3, 1, 5), 1 / 3, 1 / 3)]
)
def test_ratios_by_hand(order: tuple[int, ...], time: float, flops: float) -> None:
    (costs,) = totals(two_kernels(), [order])
    assert (costs.extra_seconds_ratio, costs.extra_flops_ratio) == pytest.approx((time, flops))


def test_every_plan_of_either_curve_is_held_against_one_base() -> None:
    problem = two_kernels()
    for found in plans(problem):
        (costs,) = totals(problem, [found])
        assert (costs.base_nanoseconds, costs.base_flops) == (30, 300)
        assert costs.extra_seconds_ratio == pytest.approx(sum(problem.actions[i].nanoseconds for i in found) / 30 - 1)


def plans(problem: Problem) -> Iterator[list[int]]:
    for cost in ("nanoseconds", "flops"):
        curve = plan_curve(problem, cost)
        for index in range(len(curve)):
            yield [step.action for step in curve.plan(index).steps]
    yield [step.action for step in plan(problem, budget=3 << 12).steps]


def test_totals_add_up() -> None:
    whole, part = totals(two_kernels(), [(0, 2, 4), (1,)])
    both = whole * 3 + part
    assert (both.nanoseconds, both.flops) == (3 * 90 + 10, 3 * 600 + 100)
    assert (both.base_nanoseconds, both.base_flops) == (4 * 30, 4 * 300)


def test_what_an_action_costs() -> None:
    """By hand: a byte in 64 counts as an operation, and a copy as the operations that run in its time."""
    make = Maker(REGIONS)
    x, y = make.value("x", 64, role=Role.INPUT), make.value("y", 64)
    z, away = make.value("z", 64, role=Role.OUTPUT), make.value("away", 64, 2)
    make.action("f", [x], [y], flops=1000, nbytes=640, nanoseconds=30)  # 1010 operations
    make.action("save", [y], [away], nanoseconds=20, nbytes=128)
    make.action("fetch", [away], [y], nanoseconds=40, nbytes=127)
    make.action("g", [y], [z], flops=500, nbytes=63, nanoseconds=70)  # 500
    problem = make.problem()
    assert problem.copies == {1, 2}
    assert costs_of(problem, "nanoseconds") == [30, 20, 40, 70]
    assert costs_of(problem, "flops") == [1010, 2 + 20 * 1510 // 100, 1 + 40 * 1510 // 100, 500]
    partly = replace(problem, actions=(replace(problem.actions[0], nanoseconds=0), *problem.actions[1:]))
    assert costs_of(partly, "nanoseconds") == [0, 20, 40, 70]
    free = replace(problem, actions=tuple(replace(action, nanoseconds=0) for action in problem.actions))
    assert costs_of(free, "nanoseconds") == costs_of(free, "flops") == [1010, 2, 1, 500]
    unknown = replace(free, actions=tuple(replace(action, flops=0, nbytes=0) for action in free.actions))
    assert costs_of(unknown, "nanoseconds") == costs_of(unknown, "flops") == [1, 1, 1, 1]
    (costs,) = totals(unknown, [(0, 1, 2, 3)])
    assert (costs.extra_seconds_ratio, costs.extra_flops_ratio) == (0.0, 0.0)
    with pytest.raises(UsageError, match="a cost must be one of 'nanoseconds', 'flops', got 'seconds'"):
        costs_of(problem, "seconds")


def test_without_times_flops_decide_and_nothing_divides_by_zero() -> None:
    make = Maker(REGIONS[:2])
    x, y = make.value("x", 64, role=Role.INPUT), make.value("y", 64, role=Role.OUTPUT)
    make.action("many", [x], [y], Overwrite(0, 0), flops=20)
    make.action("few", [x], [y], Overwrite(0, 0), flops=10)
    problem = make.problem()
    assert costs_of(problem, "nanoseconds") == [20, 10] and fastest(problem) == (1,)
    (costs,) = totals(problem, [(0,)])
    assert (costs.extra_seconds_ratio, costs.extra_flops_ratio) == (0.0, 1.0)

"""Efforts: every limit is described, and with less of them plans are valid, and no lower than is proved."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

import pytest

from foreplan.planner import Curve, plan, plan_curve
from foreplan.planner.effort import USUAL, WITHOUT, Effort
from tests.planner.problems import training_net
from tests.profile import cases, pick

pytestmark = pytest.mark.whole_search

BLOCKS = pick(3, 3, 4)


def kinds(effort: Any) -> Iterator[Any]:
    yield effort
    for each in fields(effort):
        if is_dataclass(value := getattr(effort, each.name)):
            yield from kinds(value)


@pytest.mark.parametrize("kind", [type(each) for each in kinds(USUAL)], ids=lambda kind: kind.__name__)
def test_every_limit_is_described_in_the_order_of_the_fields(kind: type) -> None:
    said = re.findall(r"^        (\w+): .*", kind.__doc__ or "", flags=re.M)
    assert said == [each.name for each in fields(kind)]


@cache
def curve_by(effort: Effort) -> Curve:
    return plan_curve(training_net(BLOCKS), effort=effort)


@pytest.mark.parametrize("name", cases(WITHOUT, slow=("order search",), thorough=("placement search", "annealing")))
def test_plans_of_less_effort_are_valid(name: str) -> None:
    """Which `plan` verifies; each search takes part in a problem as small as this one."""
    problem = training_net(BLOCKS)
    found = plan(problem, remat="off", effort=WITHOUT[name])
    assert found.arena_bytes >= plan(problem, remat="off").lower_bound_bytes
    curve = curve_by(WITHOUT[name])
    assert curve.effort is WITHOUT[name]
    assert curve.plan(len(curve) - 1).arena_bytes <= found.arena_bytes


@pytest.mark.thorough
def test_without_annealing_a_curve_is_no_lower() -> None:
    usual, without = curve_by(USUAL), curve_by(WITHOUT["annealing"])
    assert usual.points != without.points
    assert usual.points[-1].bound <= without.points[-1].bound

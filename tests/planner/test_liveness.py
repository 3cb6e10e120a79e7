from __future__ import annotations

import pytest

from foreplan.base.errors import PlanError
from foreplan.planner import Role
from foreplan.planner.memory.liveness import live_ranges
from tests.planner.problems import Maker


def test_lives_of_every_role() -> None:
    make = Maker()
    w = make.value("w", 64, 0, role=Role.STORED)
    x = make.value("x", 64, role=Role.INPUT)
    unread = make.value("unread", 64, role=Role.INPUT)
    a, dead, y, b = (make.value(n, 64, role=r) for n, r in zip("adyb", map(Role, (0, 0, 2, 0))))
    make.action("f", [x, w], [a, dead])
    make.action("g", [a], [y])
    make.action("h", [x, a], [b])
    make.action("i", [b], [make.value("z", 64, role=Role.OUTPUT)])
    ranges = live_ranges(make.problem(), [0, 1, 2, 3])
    lives = {v: (ranges.lower[i], ranges.upper[i]) for i, v in enumerate(ranges.values)}
    assert lives == {w: (0, 4), x: (0, 3), unread: (0, 0), a: (0, 3), dead: (0, 1), y: (1, 4), b: (2, 4), 7: (3, 4)}
    assert [ranges.kept[ranges.values.index(v)] for v in (w, x, y, b)] == [True, False, True, False]


def test_a_value_written_twice_has_two_lives_and_readers_take_the_latest() -> None:
    make = Maker()
    x = make.value("x", 64, role=Role.INPUT)
    a, y, z = make.value("a", 64), make.value("y", 64, role=Role.OUTPUT), make.value("z", 64, role=Role.OUTPUT)
    make.action("f", [x], [a])
    make.action("g", [a], [y])
    make.action("h", [a], [z])
    ranges = live_ranges(make.problem(), [0, 1, 0, 2])
    lives = [(ranges.lower[i], ranges.upper[i]) for i, v in enumerate(ranges.values) if v == a]
    assert lives == [(0, 2), (2, 4)]
    assert ranges.upper[0] == 3  # x is read again


def test_reading_what_is_not_there_is_an_error() -> None:
    make = Maker()
    a, y = make.value("a", 64), make.value("y", 64, role=Role.OUTPUT)
    make.action("f", [], [a])
    make.action("g", [a], [y])
    with pytest.raises(PlanError, match=r"step 0 \('g'\) reads 'a' before"):
        live_ranges(make.problem(), [1, 0])
    with pytest.raises(PlanError, match="'y' must be there at the end"):
        live_ranges(make.problem(), [0])


def test_no_steps() -> None:
    make = Maker()
    make.value("w", 64, 0, role=Role.STORED)
    ranges = live_ranges(make.problem(), [])
    assert (ranges.steps, ranges.lower, ranges.upper) == (1, [0], [1])

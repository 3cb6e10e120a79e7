from __future__ import annotations

import pytest

from foreplan.base.errors import PlanError
from foreplan.planner.memory.liveness import live_ranges
from tests.planner.texts import problem


def test_lives_of_every_role() -> None:
    asked = problem(
        """
        w 64 stored; x 64 input; unread 64 input
        f: x, w -> a 64, dead 64
        g: a -> y 64 output
        h: x, a -> b 64
        i: b -> z 64 output
        """
    )
    ranges = live_ranges(asked, [0, 1, 2, 3])
    names = [asked.values[v].name for v in ranges.values]
    assert dict(zip(names, zip(ranges.lower, ranges.upper))) == {
        "w": (0, 4),
        "x": (0, 3),
        "unread": (0, 0),
        "a": (0, 3),
        "dead": (0, 1),
        "y": (1, 4),
        "b": (2, 4),
        "z": (3, 4),
    }
    assert [ranges.kept[names.index(name)] for name in "wxyb"] == [True, False, True, False]


def test_a_value_written_twice_has_two_lives_and_readers_take_the_latest() -> None:
    asked = problem("f: x 64 input -> a 64; g: a -> y 64 output; h: a -> z 64 output")
    ranges = live_ranges(asked, [0, 1, 0, 2])
    lives = [(ranges.lower[i], ranges.upper[i]) for i, v in enumerate(ranges.values) if asked.values[v].name == "a"]
    assert lives == [(0, 2), (2, 4)]
    assert ranges.upper[0] == 3  # x is read again


def test_reading_what_is_not_there_is_an_error() -> None:
    asked = problem("f: -> a 64; g: a -> y 64 output")
    with pytest.raises(PlanError, match=r"step 0 \('g'\) reads 'a' before"):
        live_ranges(asked, [1, 0])
    with pytest.raises(PlanError, match="'y' must be there at the end"):
        live_ranges(asked, [0])


def test_no_steps() -> None:
    ranges = live_ranges(problem("w 64 stored"), [])
    assert (ranges.steps, ranges.lower, ranges.upper) == (1, [0], [1])

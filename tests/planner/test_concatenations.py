"""Concatenations in place: which parts are made where they will lie, and what that holds."""

from __future__ import annotations

import pytest

from foreplan.planner import Plan, Problem, plan, verify
from foreplan.planner.memory.bounds import reserved_bytes
from foreplan.planner.placement.layout import schedule
from tests.planner.texts import problem


def in_place(found: Plan, asked: Problem) -> list[str]:
    """Names of the parts that lie within the whole when they are joined."""
    names = []
    for step in found.steps:
        action = asked.actions[step.action]
        for part in action.parts:
            if step.reads[part.read] == step.writes[part.write] + part.offset:
                names.append(asked.values[action.reads[part.read]].name)
    return names


# What is planned, which parts lie within the whole when they are joined, and the arena.
IN_PLACE: dict[str, tuple[str, list[str], int]] = {
    "both halves of a table are made in their places": (
        """
        a: x 64 input -> a 1024; b: x -> b 1024
        join: a, b -> t 2048 | t[0]?a t[1024]?b
        y: t -> y 64 output
        """,
        ["a", "b"],
        2048 + 64,  # the table, and x or y
    ),
    "a part made long before is copied and the last one made in its place": (
        """
        early: x 64 input -> early 1024
        wide: early -> wide 8192; narrow: wide -> narrow 64; late: narrow -> late 1024
        join: early, late -> t 2048 | t[0]?early t[1024]?late
        y: t -> y 64 output
        """,
        ["late"],
        1024 + 8192 + 64,  # with `early` in the table, the table's 2,048 bytes would be held beside `wide`
    ),
    "a part takes its place with what it was made over": (
        """
        a: x 64 input -> a 1024; better: a -> a' 1024 | a'?a; b: x -> b 1024
        join: b, a' -> t 2048 | t[0]?b t[1024]?a'
        y: t -> y 64 output
        """,
        ["b", "a'"],
        2048 + 64,
    ),
    "a part in the place of an input lies beside inputs that nothing reads": (
        """
        unread 128 input
        a: x 64 input -> a 64 | a?x; b: x -> b 64 | b?x
        join: a, b -> y 128 output | y[0]?a y[64]?b
        """,
        ["a", "b"],
        192,
    ),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_parts_are_made_in_their_places(name: str) -> None:
    text, parts, arena = IN_PLACE[name]
    asked = problem(text)
    found = plan(asked)
    verify(found, asked)
    assert in_place(found, asked) == parts
    assert found.arena_bytes == found.lower_bound_bytes == arena


def test_a_table_of_tables_is_made_in_one_place() -> None:
    """As in a densely connected block: each table is the one before and one part more."""
    text = "t0: x 64 input -> t0 1024"
    for i in range(1, 4):
        text += f"; p{i}: t{i - 1} -> p{i} 1024"
        text += f"; join{i}: t{i - 1}, p{i} -> t{i} {1024 * (i + 1)} | t{i}[0]?t{i - 1} t{i}[{1024 * i}]?p{i}"
    asked = problem(text + "; y: t3 -> y 64 output")
    found = plan(asked)
    assert in_place(found, asked) == ["t0", "p1", "t1", "p2", "t2", "p3"]
    assert found.arena_bytes == 4096 + 64
    last = next(step for step in found.steps if asked.actions[step.action].name == "join3")
    first = next(step for step in found.steps if asked.actions[step.action].name == "t0")
    assert first.writes == last.writes


def test_what_is_read_again_or_lies_askew_is_copied() -> None:
    asked = problem(
        """
        a: x 64 input -> a 1000; b: x -> b 1024
        join: a, b -> t 2024 | t[0]?a t[1000]?b
        y: t, a -> y 64 output
        """
    )
    found = plan(asked)
    assert in_place(found, asked) == []
    verify(found, asked)


def test_a_computation_that_runs_again_places_its_parts_again() -> None:
    asked = problem(
        """
        a: x 64 input -> a 1024; b: x -> b 1024
        join: a, b -> t 2048 | t[0]?a t[1024]?b
        y: t -> y 64 output; z: t -> z 64 output
        """
    )
    twice = schedule(asked, "by hand", [0, 1, 2, 3, 0, 1, 2, 4])
    assert sorted(twice.alias_sets.wholes) == [3, 7]
    assert twice.alias_sets.within() == {1, 2, 5, 6}
    assert twice.bound == 2048 + 64 + 64  # the table, the first result, and x or the second
    reserved = reserved_bytes(asked, twice.order, twice.ranges, twice.alias_sets)
    # x until it is read last, both tables whole from their first parts on, and each result from its step on.
    assert reserved.tolist() == [2112, 2112, 2112, 2176, 2176, 2176, 2112, 2176]

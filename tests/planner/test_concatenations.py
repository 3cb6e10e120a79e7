"""Concatenations in place: which parts are made where they will lie, and what that holds."""

from __future__ import annotations

from foreplan.planner import Overwrite, Part, Plan, Problem, Role, plan, verify
from foreplan.planner.memory.bounds import reserved_bytes
from foreplan.planner.placement.layout import schedule
from tests.planner.problems import Maker


def in_place(found: Plan, problem: Problem) -> list[str]:
    """Names of the parts that lie within the whole when they are joined."""
    names = []
    for step in found.steps:
        action = problem.actions[step.action]
        for part in action.parts:
            if step.reads[part.read] == step.writes[part.write] + part.offset:
                names.append(problem.values[action.reads[part.read]].name)
    return names


def test_both_halves_of_a_table_are_made_in_their_places() -> None:
    make = Maker()
    x = make.value("x", 64, role=Role.INPUT)
    a, b, table = make.value("a", 1024), make.value("b", 1024), make.value("t", 2048)
    make.action("a", [x], [a])
    make.action("b", [x], [b])
    make.action("join", [a, b], [table], parts=(Part(0, 0, 0), Part(0, 1, 1024)))
    make.action("y", [table], [make.value("y", 64, role=Role.OUTPUT)])
    problem = make.problem()
    found = plan(problem)
    assert in_place(found, problem) == ["a", "b"]
    assert found.arena_bytes == found.lower_bound_bytes == 2048 + 64  # the table, and x or y


def test_a_part_made_long_before_is_copied_and_the_last_one_made_in_its_place() -> None:
    make = Maker()
    x = make.value("x", 64, role=Role.INPUT)
    early, wide, narrow = make.value("early", 1024), make.value("wide", 8192), make.value("narrow", 64)
    late, table = make.value("late", 1024), make.value("t", 2048)
    make.action("early", [x], [early])
    make.action("wide", [early], [wide])
    make.action("narrow", [wide], [narrow])
    make.action("late", [narrow], [late])
    make.action("join", [early, late], [table], parts=(Part(0, 0, 0), Part(0, 1, 1024)))
    make.action("y", [table], [make.value("y", 64, role=Role.OUTPUT)])
    problem = make.problem()
    found = plan(problem)
    # With `early` in the table, the table's 2,048 bytes would be held beside `wide`.
    assert in_place(found, problem) == ["late"]
    assert found.arena_bytes == found.lower_bound_bytes == 1024 + 8192 + 64


def test_a_table_of_tables_is_made_in_one_place() -> None:
    """As in a densely connected block: each table is the one before and one part more."""
    make = Maker()
    x = make.value("x", 64, role=Role.INPUT)
    table = make.value("t0", 1024)
    make.action("t0", [x], [table])
    for i in range(1, 4):
        more, whole = make.value(f"p{i}", 1024), make.value(f"t{i}", 1024 * (i + 1))
        make.action(f"p{i}", [table], [more])
        make.action(f"join{i}", [table, more], [whole], parts=(Part(0, 0, 0), Part(0, 1, 1024 * i)))
        table = whole
    make.action("y", [table], [make.value("y", 64, role=Role.OUTPUT)])
    problem = make.problem()
    found = plan(problem)
    assert in_place(found, problem) == ["t0", "p1", "t1", "p2", "t2", "p3"]
    assert found.arena_bytes == 4096 + 64
    last = next(step for step in found.steps if problem.actions[step.action].name == "join3")
    first = next(step for step in found.steps if problem.actions[step.action].name == "t0")
    assert first.writes == last.writes


def test_a_part_takes_its_place_with_what_it_was_made_over() -> None:
    make = Maker()
    x = make.value("x", 64, role=Role.INPUT)
    a, better, b, table = make.value("a", 1024), make.value("a'", 1024), make.value("b", 1024), make.value("t", 2048)
    make.action("a", [x], [a])
    make.action("better", [a], [better], Overwrite(0, 0))
    make.action("b", [x], [b])
    make.action("join", [b, better], [table], parts=(Part(0, 0, 0), Part(0, 1, 1024)))
    make.action("y", [table], [make.value("y", 64, role=Role.OUTPUT)])
    problem = make.problem()
    found = plan(problem)
    assert in_place(found, problem) == ["b", "a'"]
    assert found.arena_bytes == 2048 + 64


def test_what_is_read_again_or_lies_askew_is_copied() -> None:
    make = Maker()
    x = make.value("x", 64, role=Role.INPUT)
    a, b, table = make.value("a", 1000), make.value("b", 1024), make.value("t", 2024)
    make.action("a", [x], [a])
    make.action("b", [x], [b])
    make.action("join", [a, b], [table], parts=(Part(0, 0, 0), Part(0, 1, 1000)))
    make.action("y", [table, a], [make.value("y", 64, role=Role.OUTPUT)])
    problem = make.problem()
    found = plan(problem)
    assert in_place(found, problem) == []
    verify(found, problem)


def test_a_computation_that_runs_again_places_its_parts_again() -> None:
    make = Maker()
    x = make.value("x", 64, role=Role.INPUT)
    a, b, table = make.value("a", 1024), make.value("b", 1024), make.value("t", 2048)
    first, second = make.value("y", 64, role=Role.OUTPUT), make.value("z", 64, role=Role.OUTPUT)
    make.action("a", [x], [a])
    make.action("b", [x], [b])
    make.action("join", [a, b], [table], parts=(Part(0, 0, 0), Part(0, 1, 1024)))
    make.action("y", [table], [first])
    make.action("z", [table], [second])
    problem = make.problem()
    twice = schedule(problem, "by hand", [0, 1, 2, 3, 0, 1, 2, 4])
    assert sorted(twice.alias_sets.wholes) == [3, 7]
    assert twice.alias_sets.within() == {1, 2, 5, 6}
    assert twice.bound == 2048 + 64 + 64  # the table, the first result, and x or the second
    reserved = reserved_bytes(problem, twice.order, twice.ranges, twice.alias_sets)
    # x until it is read last, both tables whole from their first parts on, and each result from its step on.
    assert reserved.tolist() == [2112, 2112, 2112, 2176, 2176, 2176, 2112, 2176]


def test_a_part_in_the_place_of_an_input_lies_beside_inputs_that_nothing_reads() -> None:
    make = Maker()
    make.value("unread", 128, role=Role.INPUT)
    x = make.value("x", 64, role=Role.INPUT)
    a, b, whole = make.value("a", 64), make.value("b", 64), make.value("y", 128, role=Role.OUTPUT)
    make.action("a", [x], [a], Overwrite(0, 0))
    make.action("b", [x], [b], Overwrite(0, 0))
    make.action("join", [a, b], [whole], parts=(Part(0, 0, 0), Part(0, 1, 64)))
    problem = make.problem()
    found = plan(problem)
    verify(found, problem)
    assert found.arena_bytes == found.lower_bound_bytes == 192

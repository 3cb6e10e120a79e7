from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreplan.base.errors import PlanError
from foreplan.planner import Overwrite, Problem, Role, plan
from foreplan.planner.order.dependences import dependences
from foreplan.planner.order.heuristics import (
    HEURISTICS,
    depth_first,
    frees_first,
    least_memory_first,
    program_order,
    updates_first,
)
from tests.planner.problems import Maker, random_problem, training_chain


def names(problem: Problem, order: list[int]) -> list[str]:
    return [problem.actions[i].name for i in order]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 40))
def test_every_order_is_legal(seed: int, actions: int) -> None:
    problem = random_problem(seed, actions)
    graph = dependences(problem)
    for name, heuristic in HEURISTICS.items():
        order = heuristic(problem, graph)
        assert sorted(order) == list(graph.actions), name
        there = {v for v, value in enumerate(problem.values) if value.role in (Role.INPUT, Role.STORED)}
        gone: set[int] = set()
        for index in order:
            action = problem.actions[index]
            assert there.issuperset(action.reads) and gone.isdisjoint(action.reads), name
            gone |= {action.reads[p.read] for p in action.overwrites if p.required}
            gone |= {problem.values[v].home for v in action.writes}
            there.update(action.writes)
        assert there.issuperset(v for v, value in enumerate(problem.values) if value.role is Role.OUTPUT)


def test_updates_run_right_behind_the_last_reader() -> None:
    problem = training_chain(3)
    order = names(problem, updates_first(problem, dependences(problem)))
    assert order[:7] == ["linear0", "relu0", "linear1", "relu1", "linear2", "relu2", "loss"]
    assert order[7:] == [
        *("relu2'", "linear2'x", "linear2'w", "sgd2"),
        *("relu1'", "linear1'x", "linear1'w", "sgd1"),
        *("relu0'", "linear0'w", "sgd0"),
    ]


def test_weight_gradient_comes_before_data_gradient() -> None:
    problem = training_chain(3)
    order = names(problem, frees_first(problem, dependences(problem)))
    assert order.index("linear2'w") < order.index("linear2'x")
    assert order.index("linear1'w") < order.index("linear1'x")
    assert order.index("sgd2") < order.index("linear1'w")


def test_program_order_keeps_the_list_where_it_may() -> None:
    problem = training_chain(4)
    assert program_order(problem, dependences(problem)) == list(range(len(problem.actions)))


def test_program_order_puts_an_overwrite_behind_the_readers() -> None:
    make = Maker()
    w = make.value("w", 64, 0, role=Role.STORED)
    new = make.value("w'", 64, 0, role=Role.OUTPUT, home=w)
    make.action("update", [w], [new], Overwrite(0, 0, True), effect=True)
    make.action("read", [w], [make.value("y", 64, role=Role.OUTPUT)])
    problem = make.problem()
    assert names(problem, program_order(problem, dependences(problem))) == ["read", "update"]


def test_least_memory_first_takes_the_smaller_result_first() -> None:
    make = Maker()
    x = make.value("x", 64, role=Role.INPUT)
    big, small = make.value("big", 6400), make.value("small", 640)
    make.action("make big", [x], [big])
    make.action("make small", [x], [small])
    make.action("join", [big, small], [make.value("y", 64, role=Role.OUTPUT)])
    problem = make.problem()
    assert names(problem, least_memory_first(problem, dependences(problem)))[0] == "make small"


def test_depth_first_makes_the_larger_operand_first_and_nothing_early() -> None:
    make = Maker()
    x = make.value("x", 64, role=Role.INPUT)
    a, b, c, d = (make.value(n, size) for n, size in (("a", 640), ("b", 128), ("c", 6400), ("d", 64)))
    make.action("a", [x], [a])
    make.action("b", [a], [b])
    make.action("c", [x], [c])
    make.action("d", [c], [d])
    make.action("y", [b, d], [make.value("y", 64, role=Role.OUTPUT)])
    problem = make.problem()
    assert names(problem, depth_first(problem, dependences(problem))) == ["a", "b", "c", "d", "y"]


def test_dead_actions_are_dropped_effects_kept_and_the_first_producer_taken() -> None:
    make = Maker()
    x = make.value("x", 64, role=Role.INPUT)
    a, y = make.value("a", 64), make.value("y", 64, role=Role.OUTPUT)
    make.action("dead", [x], [make.value("unused", 64)])
    make.action("effect", [x], [make.value("ignored", 64)], effect=True)
    make.action("first", [x], [a])
    make.action("second", [x], [a])
    make.action("y", [a], [y])
    problem = make.problem()
    assert names(problem, list(dependences(problem).actions)) == ["effect", "first", "y"]


@pytest.mark.parametrize("case", ["cycle", "two", "output", "stored", "home read"])
def test_contradictions_are_named(case: str) -> None:
    make = Maker()
    w = make.value("w", 64, 0, role=Role.STORED)
    x = make.value("x", 64, role=Role.INPUT)
    a, b, c = make.value("a", 64), make.value("b", 64), make.value("c", 64, role=Role.OUTPUT)
    must = Overwrite(0, 0, True)
    if case == "cycle":
        make.action("f", [x], [a])
        make.action("g", [a], [b], must)
        make.action("h", [a, b], [c])
        message = r"\['g', 'h'\]|\['h', 'g'\]"
    elif case == "two":
        make.action("f", [x], [a], must)
        make.action("g", [x], [b], must)
        make.action("h", [a, b], [c])
        message = "'f' and 'g' both must take the bytes of 'x'"
    elif case == "output":
        make.action("f", [x], [c])
        make.action("g", [c], [b], must, effect=True)
        message = "'g' must overwrite 'c'"
    elif case == "stored":
        in_place = make.value("w2", 64, 0, role=Role.OUTPUT)
        make.action("f", [x], [c])
        make.action("g", [w], [in_place], must)
        message = "'g' must write 'w2' over 'w'"
    else:
        new = make.value("w'", 64, 0, role=Role.OUTPUT, home=w)
        make.action("f", [x], [c])
        make.action("g", [w], [new])
        message = "'g' writes \"w'\" into the bytes of 'w', which it reads and may not overwrite"
    with pytest.raises(PlanError, match=message):
        plan(make.problem())

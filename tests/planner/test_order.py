from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreplan.base.errors import PlanError
from foreplan.planner import Problem, Role, plan
from foreplan.planner.order.dependences import dependences
from foreplan.planner.order.heuristics import (
    HEURISTICS,
    Heuristic,
    depth_first,
    frees_first,
    least_memory_first,
    program_order,
    updates_first,
)
from tests.planner.problems import random_problem, training_chain
from tests.planner.texts import problem


def names(asked: Problem, order: list[int]) -> list[str]:
    return [asked.actions[i].name for i in order]


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


# What an order makes of a problem.
ORDERS: dict[str, tuple[Heuristic, str, list[str]]] = {
    "program order puts an overwrite behind the readers": (
        program_order,
        "w 64 stored; update: w -> w' 64 output home=w | w'!w effect; read: w -> y 64 output",
        ["read", "update"],
    ),
    "least memory first takes the smaller result first": (
        least_memory_first,
        "x 64 input; make big: x -> big 6400; make small: x -> small 640; join: big, small -> y 64 output",
        ["make small", "make big", "join"],
    ),
    "depth first makes the larger operand first and nothing early": (
        depth_first,
        """
        x 64 input; a: x -> a 640; b: a -> b 128; c: x -> c 6400; d: c -> d 64
        y: b, d -> y 64 output
        """,
        ["a", "b", "c", "d", "y"],
    ),
    "dead actions are dropped, effects kept and the first producer taken": (
        lambda problem, graph: list(graph.actions),
        """
        dead: x 64 input -> unused 64; effect: x -> ignored 64 | effect
        first: x -> a 64; second: x -> a
        y: a -> y 64 output
        """,
        ["effect", "first", "y"],
    ),
}


@pytest.mark.parametrize("name", ORDERS)
def test_orders_by_hand(name: str) -> None:
    heuristic, text, order = ORDERS[name]
    asked = problem(text)
    assert names(asked, heuristic(asked, dependences(asked))) == order


CONTRADICTIONS = {
    "f: x -> a; g: a -> b | b!a; h: a, b -> c": r"\['g', 'h'\]|\['h', 'g'\]",
    "f: x -> a | a!x; g: x -> b | b!x; h: a, b -> c": "'f' and 'g' both must take the bytes of 'x'",
    "f: x -> c; g: c -> b | b!c effect": "'g' must overwrite 'c'",
    "f: x -> c; g: w -> w2 64 output @persistent | w2!w": "'g' must write 'w2' over 'w'",
    "f: x -> c; g: w -> w' 64 output home=w": (
        "'g' writes \"w'\" into the bytes of 'w', which it reads and may not overwrite"
    ),
}


@pytest.mark.parametrize("text", CONTRADICTIONS)
def test_contradictions_are_named(text: str) -> None:
    with pytest.raises(PlanError, match=CONTRADICTIONS[text]):
        plan(problem(f"w 64 stored; x 64 input; a 64; b 64; c 64 output; {text}"))

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from foreplan.planner import Problem
from foreplan.planner.effort import OrderEffort
from foreplan.planner.memory.kernels import make_count
from foreplan.planner.order.arrays import order_arrays
from foreplan.planner.order.best import improve
from foreplan.planner.order.dependences import Dependences, dependences
from foreplan.planner.order.heuristics import HEURISTICS, program_order
from foreplan.planner.order.kernels import begin, live_bytes, make_state, run, undo, weigh
from foreplan.planner.placement.layout import schedule
from tests.planner.problems import random_problem, training_chain, training_net
from tests.planner.texts import problem as parsed
from tests.profile import pick

EFFORTS = {True: OrderEffort(), False: OrderEffort(search_work=0, window_work=0)}  # with exact searches and without


def how_many(graph: Dependences) -> int:
    """Orders that the dependences allow."""
    n = len(graph.actions)
    before = [sum(1 << i for i in set(nodes)) for nodes in graph.before]

    @cache
    def count(ran: int) -> int:
        if ran == (1 << n) - 1:
            return 1
        return sum(count(ran | 1 << i) for i in range(n) if not ran >> i & 1 and before[i] & ran == before[i])

    return count(0)


def orders(graph: Dependences, head: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    if len(head) == len(graph.actions):
        yield tuple(graph.actions[node] for node in head)
    for node, before in enumerate(graph.before):
        if node not in head and set(head).issuperset(before):
            yield from orders(graph, (*head, node))


def optimum(problem: Problem, graph: Dependences) -> int:
    return min(schedule(problem, "", order).bound for order in orders(graph))


def check_optimal(seed: int, actions: int, most: int) -> None:
    problem = random_problem(seed, actions)
    graph = dependences(problem)
    assume(0 < len(graph.actions) <= 9 and how_many(graph) <= most)
    best = optimum(problem, graph)
    for start in (program_order(problem, graph), next(orders(graph))):
        found = improve(problem, graph, start)
        assert found is not None and sorted(found.order) == sorted(start)
        assert found.nbytes == schedule(problem, "", found.order).bound == best
        assert found.least == best


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 9))
def test_small_problems_get_the_best_of_all_orders(seed: int, actions: int) -> None:
    check_optimal(seed, actions, 300)


@pytest.mark.slow
@settings(max_examples=pick(50, 100, 300), deadline=None)
@given(st.integers(0, 2**32), st.integers(4, 9))
def test_small_problems_with_many_orders(seed: int, actions: int) -> None:
    check_optimal(seed, actions, 10_000)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 60))
def test_the_search_counts_bytes_as_the_schedule_does(seed: int, actions: int) -> None:
    problem = random_problem(seed, actions)
    graph = dependences(problem)
    arrays = order_arrays(problem, graph)
    assert arrays is not None
    for heuristic in HEURISTICS.values():
        order = heuristic(problem, graph)
        if order:
            nodes = np.array([graph.actions.index(index) for index in order])
            live = np.zeros(len(order), np.int64)
            assert (
                live_bytes(arrays, make_count(arrays.problem, len(order)), nodes, live)
                == max(live)
                == schedule(problem, "", order).bound
            )


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(10, 60), st.booleans(), st.booleans())
def test_larger_problems_get_no_worse(seed: int, actions: int, search: bool, moves: bool) -> None:
    problem = random_problem(seed, actions)
    graph = dependences(problem)
    start = program_order(problem, graph)
    assume(start)
    effort = replace(EFFORTS[search], move_work=OrderEffort().move_work * moves)
    found = improve(problem, graph, start, effort)
    assert found is not None and found == improve(problem, graph, start, effort)
    assert found.least <= found.nbytes == schedule(problem, "", found.order).bound
    assert found.nbytes <= schedule(problem, "", start).bound
    at = {index: step for step, index in enumerate(found.order)}
    assert sorted(at) == list(graph.actions)
    for index, before in zip(graph.actions, graph.before):
        assert all(at[graph.actions[earlier]] < at[index] for earlier in before)


def test_what_has_run_can_be_taken_back() -> None:
    problem = random_problem(3, 40)
    graph = dependences(problem)
    arrays = order_arrays(problem, graph)
    assert arrays is not None
    state = make_state(arrays)
    begin(arrays, state)
    begun = [array.copy() for array in state[:-1]]  # all but the room for `shared`
    order = [graph.actions.index(index) for index in program_order(problem, graph)]
    places, grown = [], []
    for node in order:
        grown.append(weigh(arrays, state, node))
        places.append(int(state.place[node]))
        run(arrays, state, node)
    for node, place, growth in zip(order[::-1], places[::-1], grown[::-1]):
        undo(arrays, state, node, place)
        assert weigh(arrays, state, node) == growth
    ready = int(state.ready_count[0])
    assert list(state.ready[:ready]) == list(begun[3][:ready])
    for i in (0, 1, 2, 5, 6):
        assert np.array_equal(state[i], begun[i])


@pytest.mark.parametrize("layers", [3, 12])
def test_a_training_chain_is_solved(layers: int) -> None:
    problem = training_chain(layers)
    graph = dependences(problem)
    found = improve(problem, graph, program_order(problem, graph))
    assert found is not None and found.nbytes == found.least


def test_a_move_alone_lowers_the_peak() -> None:
    """Three results are made first and read last, one after the other; each had better be made when it is read."""
    problem = parsed(
        """
        make 0: x 64 input -> p0 64000; make 1: x -> p1 64000; make 2: x -> p2 64000
        read 0: p0 -> t0 64; read 1: p1, t0 -> t1 64 | t1?t0; read 2: p2, t1 -> t2 64 output | t2?t1
        """
    )
    graph = dependences(problem)
    start = program_order(problem, graph)
    assert schedule(problem, "", start).bound == 3001 * 64 + 64 - 64
    for effort in (EFFORTS[False], OrderEffort(move_work=0)):
        found = improve(problem, graph, start, effort)
        assert found is not None and found.nbytes == 1002 * 64


def test_two_writers_of_one_value_are_left_alone() -> None:
    problem = parsed("x 64 input; other 64 output; one: x -> y 64 output; both: x -> y, other")
    graph = dependences(problem)
    assert len(graph.actions) == 2
    assert improve(problem, graph, program_order(problem, graph)) is None


def test_nets_with_branches_are_closed_in_on() -> None:
    for seed in range(3):
        problem = training_net(8, seed=seed)
        graph = dependences(problem)
        start = min((h(problem, graph) for h in HEURISTICS.values()), key=lambda o: schedule(problem, "", o).bound)
        found = improve(problem, graph, start)
        assert found is not None and found.nbytes <= schedule(problem, "", start).bound
        assert found.least >= found.nbytes * 0.99

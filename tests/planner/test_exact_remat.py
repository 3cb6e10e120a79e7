"""The oracle of recomputation against a search of all schedules that it permits, and by hand."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence

import pytest

from foreplan.planner import Action, Overwrite, Problem, Role, plan
from foreplan.planner.placement.layout import schedule
from tests.planner.exact_remat import Formulation, device_bytes, may_take, runs_once
from tests.planner.problems import priced, random_problem
from tests.planner.texts import ARENA
from tests.planner.texts import problem as parsed
from tests.planner.training_graphs import nothing_in_place, random_training
from tests.profile import few


def matchings(problem: Problem, action: Action) -> Iterator[list[Overwrite]]:
    """Choices of overwrites: the required ones, and any optional ones that share no read and no write with another."""
    required = [
        pair for pair in action.overwrites if pair.required and problem.values[action.writes[pair.write]].home < 0
    ]
    optional = [pair for pair in action.overwrites if not pair.required and may_take(problem, action, pair)]
    for count in range(len(optional) + 1):
        for chosen in itertools.combinations(optional, count):
            pairs = [*required, *chosen]
            if len({p.read for p in pairs}) == len({p.write for p in pairs}) == len(pairs):
                yield pairs


def cheapest(problem: Problem, line: Sequence[int], needed: set[int], budget: int, cost: Sequence[int]) -> int | None:
    """The least cost by Dijkstra's algorithm over what is there, the stage, and how far the stage's runs have come."""
    size, workspace, stored = device_bytes(problem)
    values = problem.values
    begin = frozenset(v for v, value in enumerate(values) if value.role in (Role.INPUT, Role.STORED))
    end = {v for v, value in enumerate(values) if value.role is Role.OUTPUT}
    queue = [(0, 0, begin, 0, 0)]
    seen = set()
    number = itertools.count(1)
    while queue:
        spent, _, there, stage, position = heapq.heappop(queue)
        if (there, stage, position) in seen:
            continue
        seen.add((there, stage, position))
        if stage == len(line):
            if there >= end:
                return spent
            continue
        for v in there:
            if values[v].role is not Role.STORED and stage + position:
                heapq.heappush(queue, (spent, next(number), there - {v}, stage, position))
        index = line[position]
        following = (stage, position + 1) if position < stage else (stage + 1, 0)
        if position < stage or index not in needed:
            heapq.heappush(queue, (spent, next(number), there, *following))
        action = problem.actions[index]
        if (position < stage and runs_once(problem, action)) or not there.issuperset(action.reads):
            continue
        gone = {action.reads[p.read] for p in action.overwrites if p.required} | {values[v].home for v in action.writes}
        together = sum(size[v] for v in there.union(action.writes)) + workspace[index] + stored
        for pairs in matchings(problem, action):
            if together - sum(size[action.writes[p.write]] for p in pairs) <= budget:
                left = there.union(action.writes) - gone - {action.reads[p.read] for p in pairs}
                heapq.heappush(queue, (spent + cost[index], next(number), left, *following))
    return None


def agree(problem: Problem, shares: Sequence[int]) -> int:
    """Compare on one problem at budgets in 16ths of what it needs; how many of them need recomputation."""
    whole = plan(problem, remat="off")
    order = [step.action for step in whole.steps]
    cost = [action.nanoseconds for action in problem.actions]
    usual = sum(cost[index] for index in order)
    count = 0
    for share in shares:
        budget = whole.lower_bound_bytes * share // 16
        formulation = Formulation(problem, order, budget)
        if not order or formulation.line[0] != order[0]:
            return 0
        found = formulation.solve(cost, 60)
        assert found.proved
        assert found.cost == cheapest(problem, formulation.line, set(order), budget, cost), budget
        if found.order is None:
            break
        assert schedule(problem, "", found.order).bound <= budget
        assert formulation.runs_of(found.order) is not None
        count += found.cost != usual
    return count


def small(problem: Problem, values: int) -> bool:
    return sum(value.role is not Role.STORED for value in problem.values) <= values


@pytest.mark.parametrize("seed", few(range(40), range(12)))
def test_all_schedules_of_random_problems(seed: int) -> None:
    problem = priced(random_problem(seed, 6), seed)
    if small(problem, 12):
        agree(problem, (16, 15, 13, 10))


TINY = [nothing_in_place(random_training(seed, 2)) for seed in range(24)]
TINY += [random_training(seed, 2) for seed in range(24)]


def test_all_schedules_of_tiny_training_steps() -> None:
    assert sum(agree(problem, (15, 13, 11, 9)) for problem in TINY if small(problem, 12)) >= 5


@pytest.mark.thorough
def test_all_schedules_of_larger_training_steps() -> None:
    assert sum(agree(random_training(seed, 3), (15, 13, 11, 9)) for seed in range(14)) >= 8


def test_one_activation_is_computed_twice() -> None:
    problem = parsed(
        """
        a: x 64 input -> a 640 | ns=7; b: a -> b 640 | ns=1; c: b -> c 640 | ns=1
        d: c -> d 64 | ns=1; y: d, a -> y 64 output | ns=1
        """,
        ARENA,
    )
    cost = [action.nanoseconds for action in problem.actions]
    with_a, without = 3 * 640 + 64, 2 * 640 + 64
    assert Formulation(problem, range(5), with_a).solve(cost, 9).cost == 11
    found = Formulation(problem, range(5), without).solve(cost, 9)
    assert (found.cost, found.order) == (18, (0, 1, 2, 3, 0, 4))
    assert Formulation(problem, range(5), without - 64).solve(cost, 9).order is None

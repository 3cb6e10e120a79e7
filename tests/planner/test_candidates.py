"""Candidates: the choice among actions of more or less workspace, against all choices that there are."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from foreplan.base.errors import DoesNotFitError
from foreplan.planner import Plan, Problem, Role, plan, plan_curve, verify
from foreplan.planner.candidates import merge_candidates
from foreplan.planner.memory.order_bound import order_bound
from foreplan.planner.placement.layout import schedule
from tests.planner.problems import REGIONS, Maker, priced, random_problem, training_net
from tests.profile import few


def with_kernels(problem: Problem, seed: int, most: int = 3) -> Problem:
    """Every action of a problem with up to `most` candidates: workspaces and times at random, the first listed any."""
    rng = random.Random(seed)
    actions = []
    for action in problem.actions:
        ways = 1 if action.effect else rng.randint(1, most)
        for way in range(ways):
            workspace = rng.choice([0, 64, 1000, 4096, 1 << 16, 1 << 20])
            name = f"{action.name}@{way}"
            actions.append(replace(action, name=name, workspace=workspace, nanoseconds=rng.choice([10, 20, 50, 90])))
    return replace(problem, actions=tuple(actions))


def bare_chain(length: int) -> Problem:
    """A chain of actions of which each reads what the one before wrote, of different sizes: one order alone."""
    make = Maker(REGIONS[:2])
    values = [make.value("x", 1 << 19, role=Role.INPUT)]
    for i in range(length):
        role = Role.OUTPUT if i == length - 1 else Role.TRANSIENT
        values.append(make.value(f"y{i}", (1 << 20, 1 << 17, 1 << 19)[i % 3], role=role))
        make.action(f"a{i}", values[-2:-1], values[-1:], workspace_region=1)
    return make.problem()


def groups(problem: Problem) -> list[list[int]]:
    """Candidates by what they write, in the order of a chain."""
    found: dict[tuple[int, ...], list[int]] = {}
    for index, action in enumerate(problem.actions):
        found.setdefault(action.writes, []).append(index)
    return list(found.values())


def seconds(problem: Problem, found: Plan) -> int:
    return sum(problem.actions[step.action].nanoseconds for step in found.steps)


def all_choices(problem: Problem) -> list[tuple[int, int]]:
    """Highest live set and time of every choice."""
    choices = itertools.product(*groups(problem))
    return [
        (schedule(problem, "", order).bound, sum(problem.actions[i].nanoseconds for i in order)) for order in choices
    ]


@pytest.mark.parametrize("seed", range(6))
def test_every_budget_takes_the_fastest_kernels_that_fit(seed: int) -> None:
    problem = with_kernels(bare_chain(5), seed)
    every = all_choices(problem)
    for budget in sorted({bound for bound, _ in every}):
        found = plan(problem, budget, remat="off")
        assert found.arena_bytes <= budget
        assert seconds(problem, found) == min(time for bound, time in every if bound <= budget)
    with pytest.raises(DoesNotFitError):
        plan(problem, min(bound for bound, _ in every) - 64, remat="off")


@pytest.mark.parametrize("seed", range(6))
def test_without_a_budget_slower_kernels_take_one_percent_at_most(seed: int) -> None:
    problem = with_kernels(bare_chain(5), seed)
    every = all_choices(problem)
    most = min(time for _, time in every) * 101 // 100
    found = plan(problem, remat="off")
    assert found.arena_bytes == min(bound for bound, time in every if time <= most)


@pytest.mark.parametrize("seed", few(range(2)))
def test_smaller_budgets_give_smaller_and_slower_plans(seed: int) -> None:
    problem = with_kernels(training_net(2, width=1 << 18, seed=seed), seed)
    curve = plan_curve(problem)
    most, least = curve.plan(0).arena_bytes, min(curve.plan(i).arena_bytes for i in range(len(curve)))
    before = None
    for k in range(21):
        found = curve.within(most - (most - least) * k // 20)
        if before is not None:
            assert found.arena_bytes <= before.arena_bytes or seconds(problem, found) <= seconds(problem, before)
            assert seconds(problem, found) >= seconds(problem, before)
        before = found
    fastest = sum(min(problem.actions[i].nanoseconds for i in own) for own in groups(problem))
    assert seconds(problem, curve.plan(0)) == fastest


@pytest.mark.parametrize("seed", few(range(40), range(12)))
def test_plans_of_random_problems_verify_and_stay_above_the_bound(seed: int) -> None:
    problem = with_kernels(priced(random_problem(seed), seed), seed)
    for remat in ("off", "auto"):
        found = plan(problem, remat=remat)
        verify(found, problem)
        assert order_bound(problem) <= found.lower_bound_bytes <= found.arena_bytes
        assert found.order_lower_bound_bytes == order_bound(problem)


def test_what_is_alike_but_for_workspace_and_time_is_rivals() -> None:
    problem = bare_chain(2)
    first = problem.actions[0]
    slow = replace(first, name="slow", workspace=0, nanoseconds=90)
    fast = replace(first, name="fast", workspace=4096, nanoseconds=10)
    other = replace(first, name="two reads", reads=(*first.reads, *problem.actions[1].writes))
    both = replace(problem, actions=(fast, slow, other, *problem.actions[1:]))
    lean = merge_candidates(both, [a.nanoseconds for a in both.actions])
    assert [a.name for a in lean.problem.actions[:2]] == ["slow", "two reads"]
    assert (lean.sets[0], lean.costs[0], lean.problem.actions[0].nanoseconds) == ((1, 0), 10, 10)
    assert merge_candidates(problem, [1] * len(problem.actions)).problem is problem

"""Values that must be kept: no plan makes one twice or copies it away, and a plan is no lower than they let it be."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreplan.base.errors import DoesNotFitError
from foreplan.planner import Curve, Plan, Problem, Region, Role, Value, plan, plan_curve, totals
from tests.planner.executor import Machine
from tests.planner.problems import Maker, chain, priced, random_problem, with_round_trips
from tests.profile import pick

WIDTH = 1 << 12
LAYERS = 12


def with_kept(problem: Problem, kept: set[int]) -> Problem:
    return replace(problem, values=tuple(replace(value, kept=v in kept) for v, value in enumerate(problem.values)))


@pytest.mark.parametrize("count", [6, 9, LAYERS - 1])
def test_the_least_of_a_chain_holds_what_is_kept(count: int) -> None:
    # At the last layer's backward pass: the input, which nothing can make again, what is kept, the layer's own
    # result, and two gradients. All else is made again from the last value that is kept, two at once.
    problem = with_kept(chain([100] * LAYERS, WIDTH), set(range(1, 1 + count)))
    curve = plan_curve(problem)
    least = curve.plan(len(curve) - 1)
    assert least.arena_bytes == (1 + count + 3) * WIDTH
    with pytest.raises(DoesNotFitError):
        plan(problem, (1 + count + 3) * WIDTH - 64)


@settings(max_examples=pick(3, 5, 40), deadline=None)
@given(st.integers(0, 2**32), st.integers(4, 40), st.booleans())
def test_what_is_kept_is_made_once_and_never_copied(seed: int, count: int, copies: bool) -> None:
    problem = priced(random_problem(seed, count), seed)
    problem = with_round_trips(problem, seed) if copies else problem
    rng = random.Random(seed)
    free = [v for v, value in enumerate(problem.values) if value.role is Role.TRANSIENT]
    kept = set(rng.sample(free, rng.randint(0, len(free))))
    found = with_kept(problem, kept)
    curve = plan_curve(found)
    plans = [curve.plan(index) for index in range(len(curve))]
    for each in [*plans, plan(found), plan(found, remat="off")]:
        Machine(each, found).run()
        made = [v for step in each.steps for v in found.actions[step.action].writes if v in kept]
        assert len(made) == len(set(made))
        away = {found.round_trips[v][0] for v in kept if v in found.round_trips}
        assert away.isdisjoint(step.action for step in each.steps)
    check_monotone(found, curve, plans)


def check_monotone(problem: Problem, curve: Curve, plans: list[Plan]) -> None:
    """A smaller budget never gives a larger plan."""
    sizes = [each.arena_bytes for each in plans]
    budgets = sorted({*sizes, *(size + 64 for size in sizes)}, reverse=True)
    given_bytes = []
    for budget in budgets[:6]:
        try:
            given_bytes.append(curve.within(budget).arena_bytes)
        except DoesNotFitError:
            break
    assert given_bytes == sorted(given_bytes, reverse=True)


def test_what_is_kept_and_what_is_made_again_are_part_of_the_problem() -> None:
    problem = chain([100] * LAYERS, WIDTH)
    other = with_kept(problem, {1})
    assert problem.digest != other.digest and " kept" in other.as_text() and " kept" not in problem.as_text()
    again = replace(problem, values=(*problem.values[:3], replace(problem.values[3], copy_of=2), *problem.values[4:]))
    assert again.digest != problem.digest and "copy=v2" in again.as_text()


def test_what_the_problem_has_again_counts_as_recomputation() -> None:
    make = Maker((Region("arena"),))
    make.values = [
        Value("x", 64, role=Role.INPUT),
        Value("a", 64),
        Value("b", 64, copy_of=1),
        Value("y", 64, role=Role.OUTPUT),
    ]
    make.action("first", [0], [1], flops=3, nanoseconds=10)
    make.action("again", [0], [2], flops=3, nanoseconds=10)
    make.action("use", [1, 2], [3], flops=4, nanoseconds=20)
    problem = make.problem()
    assert problem.repeats == {1}
    (found,) = totals(problem, [[0, 1, 2]])
    assert (found.flops, found.base_flops, found.nanoseconds, found.base_nanoseconds) == (10, 7, 40, 30)

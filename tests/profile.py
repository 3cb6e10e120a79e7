"""How much the tests do: little (`make test-fast`), what every change needs (`make test`), or all (`make test-all`).

The environment says which, as FOREPLAN_TESTS=fast, usual or all; without it, `usual`. Tests that are marked `slow` run
from `usual` on, those that are marked `thorough` in `all` alone.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Hashable, Iterable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from itertools import combinations, product
from typing import Any, TypeVar

import pytest
from _pytest.mark import ParameterSet

from foreplan.planner import driver
from foreplan.planner.effort import Effort, OrderEffort, PlacementEffort, RecomputeEffort, SequenceEffort

Amount = TypeVar("Amount")


class Profile(IntEnum):
    """One amount of testing."""

    FAST = 0
    USUAL = 1
    ALL = 2


PROFILE = Profile[os.environ.get("FOREPLAN_TESTS", "usual").upper()]
# Where there is no time for all: after how many seconds no test begins any more, and what draws the order of the files.
SECONDS = float(os.environ.get("FOREPLAN_TESTS_SECONDS", "inf"))
SEED = os.environ.get("FOREPLAN_TESTS_SEED")


# How long the planner searches in tests that are not marked `whole_search`.
SHORT = Effort(
    order=OrderEffort(search_work=200_000, window_work=40_000, move_work=600_000),
    recompute=RecomputeEffort(
        descent_work=200_000,
        short_work=50_000,
        reordered=200,
        polish_work=500_000,
        polish_pair=300,
        patience=4,
        sequences=SequenceEffort(trials=4, work=500_000),
    ),
    placement=PlacementEffort(
        layout_work=10_000,
        parts_work=10_000,
        fewer=(40, 100, 200),
        largest=(400, 200),
        shaking=6_000_000,
        ejection=200_000,
        ejection_pair=1,
        ejections=(2_000_000, 500_000, 500_000),
        ejections_of_parts=(200_000,),
        dive_pair=1_600,
        dive_work=20_000_000,
        mending=10_000_000,
        mending_large=80_000_000,
        stretch=4_000_000,
        stretch_large=10_000_000,
        chains=2_000_000,
        chains_pair=2,
        chains_most=15_000_000,
        pushed=5_000_000,
    ),
)


@contextmanager
def searching_by(effort: Effort) -> Iterator[None]:
    """While the body runs, the planner searches by an effort where nothing else is said."""
    functions = (driver.plan, driver.plan_curve)
    before = [function.__kwdefaults__["effort"] for function in functions]
    try:
        for function in functions:
            function.__kwdefaults__["effort"] = effort
        yield
    finally:
        for function, usual in zip(functions, before):
            function.__kwdefaults__["effort"] = usual


def pick(fast: Amount, usual: Amount, everything: Amount) -> Amount:
    """What the profile asks for, such as a number of drawn cases."""
    return (fast, usual, everything)[PROFILE]


def pairs(*axes: Iterable[Hashable]) -> list[pytest.ParameterSet]:
    """All combinations of some axes, a value of each. Those that run from `usual` on have every pair of values of two
    axes among them, which is what most faults take (Kuhn, Wallace and Gallo, "Software fault interactions", IEEE
    Transactions on Software Engineering 2004); the others run in `all` alone.
    """
    return _covered(axes, 2)


def values(*axes: Iterable[Hashable]) -> list[pytest.ParameterSet]:
    """As `pairs`, but those that run from `usual` on have each value of every axis among them, and no more."""
    return _covered(axes, 1)


def _covered(axes: Iterable[Iterable[Hashable]], together: int) -> list[pytest.ParameterSet]:
    rows = list(product(*map(tuple, axes)))
    covers = [set(combinations(enumerate(row), together)) for row in rows]
    left, usual = set().union(*covers), set[int]()
    while left:
        best = max(range(len(rows)), key=lambda i: len(covers[i] & left))
        usual.add(best)
        left -= covers[best]
    return few([pytest.param(*row) for row in rows], usual)


def few(rows: Iterable[Any], usual: Collection[int] = (0,)) -> list[pytest.ParameterSet]:
    """Parameters, of which those at some places run from `usual` on, the first if nothing is said, and all in `all`."""
    found = []
    for i, row in enumerate(rows):
        given = row if isinstance(row, ParameterSet) else pytest.param(*(row if isinstance(row, tuple) else (row,)))
        marks = [] if i in usual else [pytest.mark.thorough]
        found.append(pytest.param(*given.values, id=given.id, marks=[*given.marks, *marks]))
    return found


def cases(
    models: Iterable[str], slow: Collection[str] = (), thorough: Collection[str] = ()
) -> list[pytest.ParameterSet]:
    """Parameters that are models by name, with the name before the colon as the test's.

    Args:
        slow: of which models tests run from `usual` on.
        thorough: of which they run in `all` alone.
    """
    found = []
    for model in models:
        name = model.partition(":")[0]
        marks = [pytest.mark.thorough] * (name in thorough) + [pytest.mark.slow] * (name in slow)
        found.append(pytest.param(model, id=name, marks=marks))
    return found

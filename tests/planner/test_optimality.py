"""Recomputation within budgets against the exact optimum: at most 1.002 times it on average, and 1.05 at most.

What is compared, and on which graphs, with all figures: `python -m benchmarks.optimality small`.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.planner.near_optimal import SHARES, Comparison, compare
from tests.planner.training_graphs import GRAPHS, JOINED, nothing_in_place
from tests.profile import few, pick

pytestmark = pytest.mark.whole_search

SECONDS = 60
FAST = ("random0", "random3", "random5", "random8")
SHARES_ASKED, LEAST = pick(((0.7, 0.6), 2), ((0.7, 0.6), 2), (SHARES, 12))
# Each graph in one of the two forms.
APART, IN_PLACE = pick((FAST[::2], FAST[1::2]), (FAST[::2], FAST[1::2]), (tuple(GRAPHS)[::4], tuple(GRAPHS)[2::4]))


def comparisons(names: Sequence[str], shares: Sequence[float], in_place: bool) -> dict[tuple[str, float], Comparison]:
    found = {}
    for name in names:
        problem = (GRAPHS | JOINED)[name]()
        for each in compare(problem if in_place else nothing_in_place(problem), SECONDS, shares):
            found[name, each.share] = each
    return found


CONCATENATIONS = tuple(JOINED)[:: pick(6, 4, 1)]


@pytest.mark.parametrize(
    ("names", "in_place"),
    few([(APART, False), (IN_PLACE, True), (CONCATENATIONS, True)], (1,)),
    ids=["apart", "in_place", "concatenations"],
)
def test_no_plan_is_far_from_the_optimum(names: Sequence[str], in_place: bool) -> None:
    found = comparisons(names, SHARES_ASKED, in_place)
    ratios = {case: each.ratio for case, each in found.items() if each.ratio is not None}
    assert len(ratios) >= LEAST
    assert not [case for case, each in found.items() if each.missed]
    assert max(ratios.values()) <= 1.05, {case: ratio for case, ratio in ratios.items() if ratio > 1.05}
    assert sum(ratios.values()) / len(ratios) <= 1.002

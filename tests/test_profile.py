"""Which combinations of values tests run as usual."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.profile import few, pairs, values


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2, 4), (7, 3, 2), (2, 2, 2, 2, 2)])
def test_every_pair_of_values_is_among_what_runs_as_usual(sizes: tuple[int, ...]) -> None:
    axes = [range(10 * at, 10 * at + size) for at, size in enumerate(sizes)]
    found = pairs(*axes)
    assert sorted(each.values for each in found) == sorted(product(*axes))
    usual = [each.values for each in found if not each.marks]
    for one, other in combinations(axes, 2):
        for pair in product(one, other):
            assert any(set(pair) <= set(values) for values in usual), pair
    assert len(usual) < 0.7 * len(found) or len(sizes) == 2


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2, 4), (7, 3, 2), (5,)])
def test_every_value_is_among_what_runs_as_usual(sizes: tuple[int, ...]) -> None:
    axes = [range(10 * at, 10 * at + size) for at, size in enumerate(sizes)]
    found = values(*axes)
    assert sorted(each.values for each in found) == sorted(product(*axes))
    usual = [each.values for each in found if not each.marks]
    assert {value for row in usual for value in row} == {value for axis in axes for value in axis}
    assert len(usual) == max(sizes)


def test_a_few_run_as_usual() -> None:
    rows = [1, (2, 3), pytest.param(4, id="four", marks=pytest.mark.slow)]
    found = few(rows, (1,))
    assert [each.values for each in found] == [(1,), (2, 3), (4,)] and found[2].id == "four"
    assert [sorted(mark.name for mark in each.marks) for each in found] == [["thorough"], [], ["slow", "thorough"]]
    assert [bool(each.marks) for each in few("abc")] == [False, True, True]

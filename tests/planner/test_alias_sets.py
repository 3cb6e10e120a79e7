from __future__ import annotations

import pytest

from foreplan.base.errors import PlanError
from foreplan.planner import Overwrite, Role
from foreplan.planner.memory.alias_sets import AliasSets, merge
from foreplan.planner.memory.liveness import live_ranges
from tests.planner.problems import Maker


def alias_sets(make: Maker, order: list[int], **options: bool) -> tuple[AliasSets, dict[str, int]]:
    problem = make.problem()
    ranges = live_ranges(problem, order)
    found = merge(problem, order, ranges, **options)
    return found, {problem.values[v].name: found.of[i] for i, v in enumerate(ranges.values)}


def test_a_chain_of_in_place_actions_shares_bytes() -> None:
    make = Maker()
    x, a, b = make.value("x", 256, role=Role.INPUT), make.value("a", 256, alignment=256), make.value("b", 256)
    make.action("f", [x], [a], Overwrite(0, 0))
    make.action("g", [a], [b], Overwrite(0, 0))
    make.action("h", [b], [make.value("y", 64, role=Role.OUTPUT)])
    found, of = alias_sets(make, [0, 1, 2])
    assert of["x"] == of["a"] == of["b"] != of["y"]
    assert (found.lower[0], found.upper[0], found.nbytes[0], found.alignment[0]) == (-1, 3, 256, 256)
    found, of = alias_sets(make, [0, 1, 2], optional=False)
    assert len(set(of.values())) == 4


def test_what_is_read_later_or_kept_is_not_overwritten() -> None:
    make = Maker()
    w = make.value("w", 64, 0, role=Role.STORED)
    x, a, b = make.value("x", 64, role=Role.INPUT), make.value("a", 64), make.value("b", 64, role=Role.OUTPUT)
    c = make.value("c", 64, 0, role=Role.OUTPUT)
    d = make.value("d", 64, role=Role.OUTPUT)
    make.action("f", [x], [a], Overwrite(0, 0))
    make.action("g", [x, a], [b], Overwrite(0, 0), Overwrite(0, 1))
    make.action("h", [w], [c], Overwrite(0, 0))
    make.action("i", [b], [d], Overwrite(0, 0))
    _, of = alias_sets(make, [0, 1, 2, 3])
    assert of["b"] == of["x"]  # not `a`: listed second
    assert len({of["w"], of["c"], of["a"], of["b"], of["d"]}) == 5


def test_the_largest_write_gets_a_read_that_could_serve_two() -> None:
    make = Maker()
    x = make.value("x", 256, role=Role.INPUT)
    small, large = make.value("small", 192), make.value("large", 256)
    make.action("f", [x], [small, large], Overwrite(0, 0), Overwrite(1, 0))
    make.action("g", [small, large], [make.value("y", 64, role=Role.OUTPUT)])
    _, of = alias_sets(make, [0, 1])
    assert of["large"] == of["x"] != of["small"]


@pytest.mark.parametrize("later", [0, 3])
def test_a_small_write_does_not_hold_a_large_buffer_for_long(later: int) -> None:
    make = Maker()
    x, mask = make.value("x", 4096, role=Role.INPUT), make.value("mask", 64)
    make.action("mask", [x], [mask], Overwrite(0, 0))
    for i in range(later):
        make.action(f"other{i}", [], [make.value(f"o{i}", 64, role=Role.OUTPUT)])
    if later:
        make.action("use", [mask], [make.value("y", 64, role=Role.OUTPUT)])
    _, of = alias_sets(make, list(range(len(make.actions))))
    assert (of["mask"] == of["x"]) == (later == 0)


def test_next_contents_lie_at_home_and_required_overwrites_are_taken() -> None:
    make = Maker()
    w, v = make.value("w", 64, 0, role=Role.STORED), make.value("v", 64, 0, role=Role.STORED)
    a, b = make.value("a", 64), make.value("b", 64)
    new_w = make.value("w'", 64, 0, role=Role.OUTPUT, home=w)
    new_v = make.value("v'", 64, 0, role=Role.OUTPUT, home=v)
    make.action("a", [v], [a])
    make.action("b", [w, a], [b], Overwrite(0, 1, True))
    make.action("update w", [w, b], [new_w], Overwrite(0, 0), Overwrite(0, 1))
    make.action("set v", [new_w], [new_v])
    found, of = alias_sets(make, [0, 1, 2, 3], optional=False)
    assert of["w'"] == of["w"] and of["v'"] == of["v"] and of["b"] == of["a"] != of["w"]
    assert found.stored[of["w"]] == w and found.stored[of["a"]] == -1


def test_a_required_overwrite_of_what_is_needed_is_an_error() -> None:
    make = Maker()
    x, a = make.value("x", 64, role=Role.INPUT), make.value("a", 64)
    make.action("f", [x], [a], Overwrite(0, 0, True))
    make.action("g", [x, a], [make.value("y", 64, role=Role.OUTPUT)])
    with pytest.raises(PlanError, match="must overwrite 'x', which is needed later"):
        alias_sets(make, [0, 1])

from __future__ import annotations

import itertools

import pytest

from foreplan.planner import Overwrite, Part, Role, plan
from foreplan.planner.bound import live_bytes, order_bound
from foreplan.planner.dependences import dependences
from foreplan.planner.layout import schedule
from tests.planner.problems import Maker, random_problem


def test_live_bytes_by_hand() -> None:
    make = Maker()
    w = make.value("w", 100, 0, role=Role.STORED)  # 128 throughout
    x, a, b = make.value("x", 256, role=Role.INPUT), make.value("a", 512), make.value("b", 500)
    make.action("f", [x, w], [a], workspace=64, workspace_region=1)  # x 256, a 512, scratch 64
    make.action("g", [a], [b], Overwrite(0, 0))  # a or b 512
    make.action("h", [b], [make.value("y", 4, role=Role.OUTPUT)])  # b 512, y 64
    make.action("i", [], [make.value("z", 64, 2, role=Role.OUTPUT)])  # y 64; the host does not count
    problem = make.problem()
    found = schedule(problem, "", [0, 1, 2, 3])
    live = live_bytes(problem, found.order, found.ranges, found.chains)
    assert list(live) == [128 + 256 + 512 + 64, 128 + 512, 128 + 512 + 64, 128 + 64]
    assert (found.bound, found.peak) == (960, 0)


def test_order_bound_by_hand() -> None:
    make = Maker()
    w = make.value("w", 64, 0, role=Role.STORED)
    x, x2 = make.value("x", 256, role=Role.INPUT), make.value("x2", 256, role=Role.INPUT)
    a, b = make.value("a", 512), make.value("b", 512)
    make.action("f", [x, w], [a])  # 64 + 256 + 512
    make.action("g", [a, x2], [b], Overwrite(0, 0), workspace=128, workspace_region=1)  # 64 + 512 + 256 + 128
    make.action("h", [b], [make.value("y", 64, role=Role.OUTPUT)])
    make.action("not needed", [x], [make.value("big", 10**6)])
    assert order_bound(make.problem()) == 960


def test_an_action_with_an_alternative_is_not_unavoidable() -> None:
    make = Maker()
    x, y = make.value("x", 64, role=Role.INPUT), make.value("y", 64, role=Role.OUTPUT)
    make.action("hungry", [x], [y], workspace=10**6, workspace_region=1)
    assert order_bound(make.problem()) > 10**6
    make.action("modest", [x], [y])
    assert order_bound(make.problem()) == 64


def test_parts_of_a_join_do_not_count_beside_it() -> None:
    make = Maker()
    x = make.value("x", 64, role=Role.INPUT)
    a, b, both = (
        make.value("a", 640, role=Role.OUTPUT),
        make.value("b", 640),
        make.value("both", 1280, role=Role.OUTPUT),
    )
    make.action("a", [x], [a])
    make.action("b", [x], [b])
    make.action("join", [a, b], [both], parts=(Part(0, 640), Part(640, 640)))
    make.action("copy", [a, b], [both])
    assert order_bound(make.problem()) == 1280


@pytest.mark.parametrize("seed", range(40))
def test_no_legal_order_of_a_tiny_problem_is_below_the_order_bound(seed: int) -> None:
    problem = random_problem(seed, 4)
    graph = dependences(problem)
    bound = order_bound(problem)
    bounds = []
    for nodes in itertools.permutations(range(len(graph.actions))):
        at = {node: i for i, node in enumerate(nodes)}
        if all(at[earlier] < at[node] for node in nodes for earlier in graph.before[node]):
            bounds.append(schedule(problem, "", [graph.actions[node] for node in nodes]).bound)
    found = plan(problem)
    assert bound <= min(bounds) <= found.lower_bound_bytes

from __future__ import annotations

import heapq
import itertools

import pytest

from foreplan.planner import Overwrite, Part, Problem, Role, plan
from foreplan.planner.bound import granularities, live_bytes, order_bound
from foreplan.planner.dependences import dependences
from foreplan.planner.layout import schedule
from foreplan.units import align_up
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
    make.action("f", [x, w], [a])  # 64 + 256 + 512, and x2 256 is read later
    make.action("g", [a, x2], [b], Overwrite(0, 0), workspace=128, workspace_region=1)  # 64 + 512 + 256 + 128
    make.action("h", [b], [make.value("y", 64, role=Role.OUTPUT)])
    make.action("not needed", [x], [make.value("big", 10**6)])
    assert order_bound(make.problem()) == 1088


def test_an_action_with_an_alternative_is_not_unavoidable() -> None:
    make = Maker()
    x, y = make.value("x", 64, role=Role.INPUT), make.value("y", 64, role=Role.OUTPUT)
    make.action("hungry", [x], [y], workspace=10**6, workspace_region=1)
    assert order_bound(make.problem()) > 10**6
    make.action("modest", [x], [y])
    assert order_bound(make.problem()) == 64


def test_parts_do_not_count_beside_the_whole() -> None:
    make = Maker()
    x = make.value("x", 64, role=Role.INPUT)
    a, b, both = (
        make.value("a", 640, role=Role.OUTPUT),
        make.value("b", 640),
        make.value("both", 1280, role=Role.OUTPUT),
    )
    make.action("a", [x], [a])
    make.action("b", [x], [b])
    make.action("join", [a, b], [both], parts=(Part(0, 0, 0), Part(0, 1, 640)))
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


def least_with_recomputation(problem: Problem) -> int:
    """The lowest highest live set of all schedules, recomputing ones included: least-bottleneck paths (Dijkstra) from
    what is there at the start, over sets of what is there and of what has happened, to what must be at the end."""
    values, actions = problem.values, problem.actions
    grain = granularities(problem)
    size = [
        align_up(v.nbytes, grain[v.region]) if v.home < 0 and problem.regions[v.region].on_device else 0 for v in values
    ]
    roles = [v.role for v in values]
    begin = frozenset(v for v, role in enumerate(roles) if role in (Role.INPUT, Role.STORED))
    end = {v for v, role in enumerate(roles) if role is Role.OUTPUT}
    effects = {i for i, a in enumerate(actions) if a.effect}
    queue = [(sum(size[v] for v in begin), 0, begin, frozenset[int]())]
    seen = set()
    for number in itertools.count(1):
        peak, _, there, happened = heapq.heappop(queue)
        if (there, happened) in seen:
            continue
        seen.add((there, happened))
        if happened == effects and there >= end:
            return peak
        # Anything may be dropped at any time, but stored values, whose bytes stay.
        for v in there:
            if roles[v] is not Role.STORED:
                heapq.heappush(queue, (peak, number, there - {v}, happened))
        for i, a in enumerate(actions):
            if not there.issuperset(a.reads) or i in happened:
                continue
            homes = {values[v].home for v in a.writes if values[v].home >= 0}
            new = [v for v in a.writes if v not in there]
            base = sum(size[v] for v in there) + align_up(a.workspace, grain[a.workspace_region])
            gone = {a.reads[p.read] for p in a.overwrites if p.required} - homes
            taken = [
                (a.writes[p.write], a.reads[p.read]) for p in a.overwrites if roles[a.reads[p.read]] is not Role.STORED
            ]
            for over in itertools.chain.from_iterable(itertools.combinations(taken, k) for k in range(len(taken) + 1)):
                writes, reads = {w for w, _ in over}, {r for _, r in over}
                if len(writes) < len(over) or len(reads) < len(over):
                    continue
                needs = base + sum(size[v] for v in new if v not in writes)
                after = (there - reads - gone) | set(a.writes)
                heapq.heappush(queue, (max(peak, needs), number, after, happened | {i} if a.effect else happened))
    raise AssertionError


@pytest.mark.parametrize("seed", range(60))
def test_no_schedule_of_a_tiny_problem_is_below_the_order_bound_even_if_it_recomputes(seed: int) -> None:
    problem = random_problem(seed, 4)
    if len(problem.values) > 13:
        problem = random_problem(seed, 2)
    if len(problem.values) <= 13:
        assert order_bound(problem) <= least_with_recomputation(problem) <= plan(problem).lower_bound_bytes


def test_an_input_that_is_read_last_is_held_throughout() -> None:
    make = Maker()
    x = make.value("x", 640, role=Role.INPUT)
    a, b = make.value("a", 64), make.value("b", 6400)
    c, y = make.value("c", 64), make.value("y", 64, role=Role.OUTPUT)
    make.action("a", [x], [a])
    make.action("b", [a], [b])  # x is read later and cannot be made again
    make.action("c", [b], [c])
    make.action("y", [c, x], [y])
    assert order_bound(make.problem()) == 640 + 64 + 6400


def test_what_an_effect_gives_is_held_and_what_can_be_made_again_is_not() -> None:
    for effect, held in ((True, 640), (False, 0)):
        make = Maker()
        x = make.value("x", 64, role=Role.INPUT)
        drawn, a, b = make.value("drawn", 640), make.value("a", 64), make.value("b", 6400)
        make.action("draw", [x], [drawn], effect=effect)
        make.action("a", [drawn], [a])
        make.action("b", [a], [b])
        make.action("y", [b, drawn], [make.value("y", 64, role=Role.OUTPUT)])
        bound = order_bound(make.problem())
        assert bound == max(64 + 6400 + held, 6400 + 640 + 64)


def test_one_read_serves_one_write() -> None:
    make = Maker()
    x = make.value("x", 640, role=Role.INPUT)
    a, b = make.value("a", 640, role=Role.OUTPUT), make.value("b", 320, role=Role.OUTPUT)
    make.action("split", [x], [a, b], Overwrite(0, 0), Overwrite(1, 0))
    assert order_bound(make.problem()) == 640 + 320

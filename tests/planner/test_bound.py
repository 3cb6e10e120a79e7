from __future__ import annotations

import heapq
import itertools

import pytest

from foreplan.base.units import align_up
from foreplan.planner import Overwrite, Part, Problem, Role, Step, buffers, bytes_by_category, plan, verify
from foreplan.planner.memory.bounds import granularities, live_bytes, reserved_bytes
from foreplan.planner.memory.order_bound import order_bound
from foreplan.planner.order.dependences import dependences
from foreplan.planner.placement.layout import schedule
from tests.planner.problems import Maker, random_problem
from tests.planner.test_verify import hand_plan


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
    live = [128 + 256 + 512 + 64, 128 + 512, 128 + 512 + 64, 128 + 64]
    assert live_bytes(problem, found.order).tolist() == live
    assert reserved_bytes(problem, found.order, found.ranges, found.alias_sets).tolist() == live
    assert found.bound == 960


def test_what_takes_the_bytes_of_the_first_value_counts_from_the_next_step_on() -> None:
    make = Maker()
    x, a = make.value("x", 640, role=Role.INPUT), make.value("a", 640)
    make.action("f", [x], [a], Overwrite(0, 0))
    make.action("g", [a], [make.value("y", 64, role=Role.OUTPUT)])
    found = schedule(make.problem(), "", [0, 1])
    assert reserved_bytes(make.problem(), found.order, found.ranges, found.alias_sets).tolist() == [640, 704]


def test_a_workspace_off_the_device_counts_nowhere() -> None:
    make = Maker()
    x = make.value("x", 256, role=Role.INPUT)
    make.action("f", [x], [make.value("y", 64, role=Role.OUTPUT)], workspace=1000, workspace_region=2)
    problem = make.problem()
    assert live_bytes(problem, [0]).tolist() == [320] and order_bound(problem) == 320


def test_what_can_be_made_again_is_held_by_nobody() -> None:
    """An effect writes v, and a pure action may write it as well: right before it is read."""
    make = Maker()
    x, u = make.value("x", 64, role=Role.INPUT), make.value("u", 64)
    v, p = make.value("v", 640), make.value("p", 64)
    make.action("once", [x], [v, u], effect=True)
    make.action("between", [u], [p], workspace=640, workspace_region=1)
    make.action("again", [x], [v])
    make.action("read", [v, p], [make.value("y", 64, role=Role.OUTPUT)])
    problem = make.problem()
    assert live_bytes(problem, [0, 1, 2, 3]).tolist() == [768, 832, 768, 768]
    assert 768 <= order_bound(problem) <= 832


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
    assert order_bound(make.problem()) == 128  # y is written while x is read


@pytest.mark.parametrize(("role", "least"), [(Role.TRANSIENT, 1344), (Role.OUTPUT, 1920)])
def test_parts_count_beside_the_whole_only_where_they_are_needed_after_it(role: Role, least: int) -> None:
    make = Maker()
    x = make.value("x", 64, role=Role.INPUT)
    a, b = make.value("a", 640, role=role), make.value("b", 640)
    both = make.value("both", 1280, role=Role.OUTPUT)
    make.action("a", [x], [a])
    make.action("b", [x], [b])
    make.action("join", [a, b], [both], parts=(Part(0, 0, 0), Part(0, 1, 640)))
    problem = make.problem()
    assert order_bound(problem) == least
    assert live_bytes(problem, [0, 1, 2]).tolist() == [704, 1344, {Role.TRANSIENT: 1280, Role.OUTPUT: 1920}[role]]
    assert plan(problem).lower_bound_bytes == least


@pytest.mark.parametrize("seed", range(40))
def test_no_legal_order_of_a_tiny_problem_is_below_the_order_bound(seed: int) -> None:
    problem = random_problem(seed, 4)
    graph = dependences(problem)
    bound = order_bound(problem)
    bounds = []
    for nodes in itertools.permutations(range(len(graph.actions))):
        at = {node: i for i, node in enumerate(nodes)}
        if all(at[earlier] < at[node] for node in nodes for earlier in graph.before[node]):
            bounds.append(int(live_bytes(problem, [graph.actions[node] for node in nodes]).max()))
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
            pairs = [p for p in a.overwrites if roles[a.reads[p.read]] is not Role.STORED]
            taken = [(a.writes[p.write], a.reads[p.read]) for p in pairs]
            must = {(a.writes[p.write], a.reads[p.read]) for p in pairs if p.required}
            for over in itertools.chain.from_iterable(itertools.combinations(taken, k) for k in range(len(taken) + 1)):
                writes, reads = {w for w, _ in over}, {r for _, r in over}
                if len(writes) < len(over) or len(reads) < len(over) or not must.issubset(over):
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


@pytest.mark.parametrize(("effect", "twice", "held"), [(True, False, 640), (False, False, 64), (True, True, 64)])
def test_what_an_effect_gives_is_held_and_what_can_be_made_again_is_not(effect: bool, twice: bool, held: int) -> None:
    make = Maker()
    x = make.value("x", 64, role=Role.INPUT)
    drawn, a, b, c = (make.value(name, size) for name, size in (("drawn", 640), ("a", 64), ("b", 6400), ("c", 64)))
    make.action("draw", [x], [drawn], effect=effect)
    if twice:  # it can be made without the effect as well
        make.action("drawn", [x], [drawn])
    make.action("a", [drawn], [a])
    make.action("b", [a], [b])
    make.action("c", [b], [c])
    make.action("y", [c, drawn], [make.value("y", 64, role=Role.OUTPUT)])
    assert order_bound(make.problem()) == 64 + 6400 + held


def test_what_is_read_before_an_effect_gives_something_is_not_held_beside_it() -> None:
    """What the effect's result is made from can be large: the result is not there yet."""
    make = Maker()
    x = make.value("x", 64, role=Role.INPUT)
    large, small = make.value("large", 6400), make.value("small", 64)
    drawn, a = make.value("drawn", 640), make.value("a", 64)
    make.action("large", [x], [large])
    make.action("small", [large], [small])
    make.action("draw", [small], [drawn], effect=True)
    make.action("a", [drawn], [a])
    make.action("y", [a, drawn], [make.value("y", 64, role=Role.OUTPUT)])
    assert order_bound(make.problem()) == 64 + 6400


def test_one_read_serves_one_write() -> None:
    make = Maker()
    x = make.value("x", 640, role=Role.INPUT)
    a, b = make.value("a", 640, role=Role.OUTPUT), make.value("b", 320, role=Role.OUTPUT)
    make.action("split", [x], [a, b], Overwrite(0, 0), Overwrite(1, 0))
    assert order_bound(make.problem()) == 640 + 320


def test_what_lies_between_parts_in_place_is_free_until_they_are_joined() -> None:
    """A large temporary fits where the second part is made only after it has gone."""
    make = Maker()
    x = make.value("x", 64, role=Role.INPUT)
    a, b, large, small = make.value("a", 64), make.value("b", 1024), make.value("large", 1024), make.value("small", 64)
    both = make.value("both", 1088, role=Role.OUTPUT)
    make.action("a", [x], [a])
    make.action("large", [x], [large])
    make.action("small", [large], [small])
    make.action("b", [small], [b])
    make.action("join", [a, b], [both], parts=(Part(0, 0, 0), Part(0, 1, 64)))
    problem = make.problem()
    assert live_bytes(problem, range(5)).tolist() == [128, 1152, 1152, 1152, 1088]
    steps = [
        Step(0, (1088,), (0,)),
        Step(1, (1088,), (64,)),
        Step(2, (64,), (1088,)),
        Step(3, (1088,), (64,)),
        Step(4, (0, 64), (0,)),
    ]
    verify(hand_plan(problem, steps, {x: 1088}, {both: 0}, (0, 1152, 0), 1152, 1), problem)


def test_an_input_that_nobody_reads_is_there_at_the_start_alone() -> None:
    make = Maker()
    unread = make.value("unread", 256, role=Role.INPUT)
    y = make.value("y", 192, role=Role.OUTPUT)
    make.action("f", [], [y])
    problem = make.problem()
    assert live_bytes(problem, [0]).tolist() == [256]
    good = hand_plan(problem, [Step(0, (), (64,))], {unread: 0}, {y: 64}, (0, 256, 0), 256, 0)
    verify(good, problem)
    assert sum(bytes_by_category(good, problem, 0).values()) == 256
    assert [buffer.value for buffer in buffers(good, problem)] == [y]


def test_a_smaller_result_in_place_counts_alone_from_the_next_step_on() -> None:
    make = Maker()
    x = make.value("x", 640, role=Role.INPUT)
    small, large = make.value("small", 64), make.value("large", 640)
    make.action("shrink", [x], [small], Overwrite(0, 0))
    make.action("grow", [small], [large])
    make.action("end", [large, small], [make.value("y", 64, role=Role.OUTPUT)])
    problem = make.problem()
    assert live_bytes(problem, range(3)).tolist() == [640, 704, 768]
    steps = [Step(0, (0,), (0,)), Step(1, (0,), (64,)), Step(2, (64, 0), (704,))]
    verify(hand_plan(problem, steps, {x: 0}, {3: 704}, (0, 768, 0), 768, 2), problem)


def test_what_a_part_must_overwrite_counts_with_its_own_size() -> None:
    make = Maker()
    x = make.value("x", 256, role=Role.INPUT)
    part, rest = make.value("part", 78), make.value("rest", 50)
    make.action("f", [x], [part], Overwrite(0, 0, True))
    make.action("g", [part], [rest])
    both = make.value("both", 178, role=Role.OUTPUT)
    make.action("join", [part, rest], [both], parts=(Part(0, 0, 0), Part(0, 1, 128)))
    problem = make.problem()
    assert live_bytes(problem, range(3)).tolist() == [256, 192, 192]
    steps = [Step(0, (0,), (0,)), Step(1, (0,), (128,)), Step(2, (0, 128), (0,))]
    verify(hand_plan(problem, steps, {x: 0}, {both: 0}, (0, 256, 0), 256, 0), problem)


def test_each_read_serves_one_write_and_the_most_bytes_are_shared() -> None:
    """Of two reads, one serves either write and the other only the smaller: the greedy choice alone would be wrong."""
    make = Maker()
    x, y = make.value("x", 128, role=Role.INPUT), make.value("y", 128, role=Role.INPUT)
    a, b = make.value("a", 64, role=Role.OUTPUT), make.value("b", 128, role=Role.OUTPUT)
    make.action("f", [x, y], [a, b], Overwrite(0, 0), Overwrite(1, 0), Overwrite(1, 1))
    problem = make.problem()
    assert live_bytes(problem, [0]).tolist() == [256]
    verify(
        hand_plan(problem, [Step(0, (0, 128), (0, 128))], {x: 0, y: 128}, {a: 0, b: 128}, (0, 256, 0), 256, 0), problem
    )

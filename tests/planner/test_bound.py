from __future__ import annotations

import heapq
import itertools

import pytest

from foreplan.base.units import align_up
from foreplan.planner import Problem, Role, buffers, bytes_by_category, plan, verify
from foreplan.planner.memory.bounds import granularities, live_bytes, reserved_bytes
from foreplan.planner.memory.order_bound import order_bound
from foreplan.planner.order.dependences import dependences
from foreplan.planner.placement.layout import schedule
from tests.planner.problems import random_problem
from tests.planner.texts import hand_plan, problem


def test_live_bytes_by_hand() -> None:
    asked = problem(
        """
        w 100 stored
        f: x 256 input, w -> a 512 | ws=64
        g: a -> b 500 | b?a
        h: b -> y 4 output
        i: -> z 64 output @host
        """
    )
    found = schedule(asked, "", [0, 1, 2, 3])
    # w has 128 throughout. f: x, a and scratch; g: a or b; h: b and y; i: y, and the host does not count.
    live = [128 + 256 + 512 + 64, 128 + 512, 128 + 512 + 64, 128 + 64]
    assert live_bytes(asked, found.order).tolist() == live
    assert reserved_bytes(asked, found.order, found.ranges, found.alias_sets).tolist() == live
    assert found.bound == 960


def test_what_takes_the_bytes_of_the_first_value_counts_from_the_next_step_on() -> None:
    asked = problem("f: x 640 input -> a 640 | a?x; g: a -> y 64 output")
    found = schedule(asked, "", [0, 1])
    assert reserved_bytes(asked, found.order, found.ranges, found.alias_sets).tolist() == [640, 704]


def test_a_workspace_off_the_device_counts_nowhere() -> None:
    asked = problem("f: x 256 input -> y 64 output | ws=1000@host")
    assert live_bytes(asked, [0]).tolist() == [320] and order_bound(asked) == 320


def test_what_can_be_made_again_is_held_by_nobody() -> None:
    """An effect writes v, and a pure action may write it as well: right before it is read."""
    asked = problem(
        """
        once: x 64 input -> v 640, u 64 | effect
        between: u -> p 64 | ws=640
        again: x -> v
        read: v, p -> y 64 output
        """
    )
    assert live_bytes(asked, [0, 1, 2, 3]).tolist() == [768, 832, 768, 768]
    assert 768 <= order_bound(asked) <= 832


ORDER_BOUNDS = {
    "by hand": (
        """
        w 64 stored; x2 256 input
        f: x 256 input, w -> a 512
        g: a, x2 -> b 512 | b?a ws=128
        h: b -> y 64 output
        not needed: x -> big 1000000
        """,
        1088,  # f: w, x, a, and x2, which is read later
    ),
    "an action without an alternative is unavoidable": (
        "hungry: x 64 input -> y 64 output | ws=1000000",
        64 + 64 + 10**6,
    ),
    "an action with an alternative is not": (
        "hungry: x 64 input -> y 64 output | ws=1000000; modest: x -> y",
        128,  # y is written while x is read
    ),
    "an input that is read last is held throughout": (
        "a: x 640 input -> a 64; b: a -> b 6400; c: b -> c 64; y: c, x -> y 64 output",
        640 + 64 + 6400,  # x is read after b and cannot be made again
    ),
    **{
        name: (
            f"""
            draw: x 64 input -> drawn 640 {effect}
            a: drawn -> a 64; b: a -> b 6400; c: b -> c 64; y: c, drawn -> y 64 output
            """,
            64 + 6400 + held,
        )
        for name, effect, held in (
            ("what an effect gives is held", "| effect", 640),
            ("what can be made again is not", "", 64),
            ("nor where it can be made without the effect as well", "| effect; drawn: x -> drawn", 64),
        )
    },
    "what is read before an effect gives something is not held beside it": (
        # What the effect's result is made from can be large: the result is not there yet.
        """
        large: x 64 input -> large 6400; small: large -> small 64; draw: small -> drawn 640 | effect
        a: drawn -> a 64; y: a, drawn -> y 64 output
        """,
        64 + 6400,
    ),
    "one read serves one write": ("split: x 640 input -> a 640 output, b 320 output | a?x b?x", 640 + 320),
}


@pytest.mark.parametrize("name", ORDER_BOUNDS)
def test_order_bounds(name: str) -> None:
    text, bound = ORDER_BOUNDS[name]
    assert order_bound(problem(text)) == bound


@pytest.mark.parametrize(("role", "least", "last"), [("", 1344, 1280), ("output", 1920, 1920)])
def test_parts_count_beside_the_whole_only_where_they_are_needed_after_it(role: str, least: int, last: int) -> None:
    asked = problem(
        f"""
        a: x 64 input -> a 640 {role}; b: x -> b 640
        join: a, b -> both 1280 output | both[0]?a both[640]?b
        """
    )
    assert order_bound(asked) == least
    assert live_bytes(asked, [0, 1, 2]).tolist() == [704, 1344, last]
    assert plan(asked).lower_bound_bytes == least


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


# A problem, a plan of it, the height of the arena and the live set of each step.
LIVE = {
    "what lies between parts in place is free until they are joined": (
        # A large temporary fits where the second part is made only after it has gone.
        """
        a: x 64 input -> a 64; large: x -> large 1024; small: large -> small 64; b: small -> b 1024
        join: a, b -> both 1088 output | both[0]?a both[64]?b
        """,
        """
        x@1088; a: x@1088 -> a@0; large: x@1088 -> large@64; small: large@64 -> small@1088; b: small@1088 -> b@64
        join: a@0 b@64 -> both@0; both@0
        """,
        1152,
        [128, 1152, 1152, 1152, 1088],
    ),
    "a smaller result in place counts alone from the next step on": (
        "shrink: x 640 input -> small 64 | small?x; grow: small -> large 640; end: large, small -> y 64 output",
        "x@0; shrink: x@0 -> small@0; grow: small@0 -> large@64; end: large@64 small@0 -> y@704; y@704",
        768,
        [640, 704, 768],
    ),
    "what a part must overwrite counts with its own size": (
        """
        f: x 256 input -> part 78 | part!x; g: part -> rest 50
        join: part, rest -> both 178 output | both[0]?part both[128]?rest
        """,
        "x@0; f: x@0 -> part@0; g: part@0 -> rest@128; join: part@0 rest@128 -> both@0; both@0",
        256,
        [256, 192, 192],
    ),
    "each read serves one write and the most bytes are shared": (
        # Of two reads, one serves either write and the other only the smaller: the greedy choice alone would be wrong.
        "f: x 128 input, y 128 input -> a 64 output, b 128 output | a?x b?x b?y",
        "x@0 y@128; f: x@0 y@128 -> a@0 b@128; a@0 b@128",
        256,
        [256],
    ),
}


@pytest.mark.parametrize("name", LIVE)
def test_live_bytes_of_plans_by_hand(name: str) -> None:
    text, answer, height, live = LIVE[name]
    asked = problem(text)
    assert live_bytes(asked, range(len(asked.actions))).tolist() == live
    verify(hand_plan(asked, answer, (0, height, 0), live), asked)


def test_an_input_that_nobody_reads_is_there_at_the_start_alone() -> None:
    asked = problem("unread 256 input; f: -> y 192 output")
    assert live_bytes(asked, [0]).tolist() == [256]
    good = hand_plan(asked, "unread@0; f: -> y@64; y@64", (0, 256, 0), [256])
    verify(good, asked)
    assert sum(bytes_by_category(good, asked, 0).values()) == 256
    assert [asked.values[buffer.value].name for buffer in buffers(good, asked)] == ["y"]

"""Segments recomputed by hand: against live bytes counted as `torch.utils.checkpoint` has them, and on real bytes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from foreplan.planner import Action, Overwrite, Plan, Problem, Region, Role, Value, without_reuse
from foreplan.planner.recompute.segments import plan_segments
from tests.planner.executor import Machine
from tests.planner.problems import random_problem
from tests.profile import pick

UNIT = 1 << 12


def chain(sizes: Sequence[int]) -> Problem:
    """Layers between activations of these sizes, and their gradients; nothing in place.

    Actions 0 to n-1 are the forward pass, n the loss, n+1 to 2n the backward pass from the last layer to the first.
    """
    n = len(sizes) - 1
    values = [Value(f"x{i}", size, role=Role.INPUT if i == 0 else Role.TRANSIENT) for i, size in enumerate(sizes)]
    values += [Value(f"g{i}", size) for i, size in enumerate(sizes)]
    values[n + 1] = Value("g0", sizes[0], role=Role.OUTPUT)
    actions = [Action(f"forward{i}", (i,), (i + 1,), flops=1) for i in range(n)]
    actions.append(Action("loss", (n,), (2 * n + 1,), flops=1))
    actions += [Action(f"backward{i}", (i, n + 2 + i), (n + 1 + i,), flops=2) for i in reversed(range(n))]
    return Problem(tuple(values), tuple(actions), (Region("arena"),))


def checkpointed_peak(sizes: Sequence[int], segments: Sequence[range]) -> int:
    """The most bytes alive at once: a segment's layers keep nothing but its input, and run again before their backward
    pass, but for the last of them, whose result nothing needs.
    """
    n = len(sizes) - 1
    of_layer = {layer: segment for segment in segments for layer in segment}
    live = {"x0": sizes[0]}
    peak = 0

    def run(name: str, size: int) -> None:
        nonlocal peak
        live[name] = size
        peak = max(peak, sum(live.values()))

    for i in range(n):
        run(f"x{i + 1}", sizes[i + 1])
        if i in of_layer and i != of_layer[i][0]:
            del live[f"x{i}"]
    run(f"g{n}", sizes[n])
    del live[f"x{n}"]
    for i in reversed(range(n)):
        if i in of_layer and i == of_layer[i][-1]:
            for j in of_layer[i][:-1]:
                run(f"x{j + 1}", sizes[j + 1])
        run(f"g{i}", sizes[i])
        del live[f"x{i}"], live[f"g{i + 1}"]
    return peak


def runs(plan: Plan) -> Counter[int]:
    return Counter(step.action for step in plan.steps)


def test_segments_of_the_root_of_a_chain() -> None:
    # 16 layers: before the backward pass of the first of four segments there are the inputs of all four segments, the
    # three activations within the last, and the gradients of its last layer's result and input.
    problem = chain([UNIT] * 17)
    whole = plan_segments(problem, [], range(17))
    assert whole.arena_bytes == 18 * UNIT and len(whole.steps) == 33
    found = plan_segments(problem, [range(i, i + 4) for i in range(0, 16, 4)], range(17))
    assert found.arena_bytes == (4 + 3 + 2) * UNIT
    again = [index for index, count in runs(found).items() if count == 2]
    assert sorted(again) == [i for i in range(16) if i % 4 != 3] and len(found.steps) == 33 + 12


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=2, max_size=14), st.data())
def test_a_chain_needs_what_checkpointing_keeps(units: list[int], data: st.DataObject) -> None:
    sizes = [64 * unit for unit in units]
    cuts = sorted(data.draw(st.sets(st.integers(0, len(sizes) - 1), max_size=6)))
    segments = [range(a, b) for a, b in pairwise(cuts) if data.draw(st.booleans())]
    problem = chain(sizes)
    found = plan_segments(problem, segments, range(len(sizes)))
    assert found.lower_bound_bytes == checkpointed_peak(sizes, segments)
    Machine(found, problem).run()


@settings(max_examples=pick(4, 6, 30), deadline=None)
@given(st.integers(0, 2**32), st.integers(3, 25))
def test_any_segments_give_the_right_bytes(seed: int, count: int) -> None:
    problem, rng = random_problem(seed, count), random.Random(seed)
    actions = list(range(len(problem.actions)))
    ahead = rng.sample(actions, rng.randint(0, len(actions)))
    labels = {action: rng.randrange(4) for action in actions}
    segments = [[action for action in actions if labels[action] == label] for label in range(rng.randint(1, 3))]
    found = plan_segments(problem, segments, ahead)
    outcome = Machine(found, problem).run()
    assert Machine(without_reuse(found, problem), problem).run() == outcome
    inside = {action for segment in segments for action in segment}
    for index, times in runs(found).items():
        assert times == 1 or (times == 2 and index in inside and not problem.actions[index].effect)


def test_effects_happen_once_and_masks_wait_for_the_backward_pass() -> None:
    values = (
        Value("x", UNIT, role=Role.INPUT),  # 0
        Value("weight", 64, role=Role.STORED),
        Value("running", 64, role=Role.STORED),
        Value("weight/next", 64, role=Role.OUTPUT, home=1),  # 3
        Value("running/next", 64, role=Role.OUTPUT, home=2),
        Value("mean", 64),
        Value("normal", UNIT),  # 6
        Value("active", UNIT),
        Value("mask", UNIT // 32),
        Value("y", UNIT),  # 9
        Value("gy", UNIT),
        Value("gw", 64),
        Value("ga", UNIT),  # 12
        Value("gx", 64, role=Role.OUTPUT),
    )
    actions = (
        Action("statistics", (0,), (5,)),
        Action("running mean", (2, 5), (4,), (Overwrite(0, 0, True),), effect=True),
        Action("normalise", (0, 5), (6,)),
        Action("activate", (6,), (7,)),
        Action("mask", (7,), (8,)),
        Action("product", (7, 1), (9,)),
        Action("loss", (9,), (10,)),
        Action("weight gradient", (7, 10), (11,)),
        Action("data gradient", (10, 1), (12,)),
        Action("update", (1, 11), (3,), (Overwrite(0, 0, True),), effect=True),
        Action("gradient", (6, 5, 8, 12), (13,)),
    )
    problem = Problem(values, actions, (Region("arena"),))
    found = plan_segments(problem, [range(6)], [0, 2, 3, 5, 6])
    Machine(found, problem).run()
    twice = {actions[index].name for index, count in runs(found).items() if count == 2}
    assert twice == {"statistics", "normalise", "activate"} and len(found.steps) == len(actions) + 3
    names = [actions[step.action].name for step in found.steps]
    assert names.index("mask") > names.index("loss")


def test_a_weight_is_read_again_before_its_update() -> None:
    # The weight's gradient needs nothing of the segment, so every order may update it before the segment's backward.
    values = (
        Value("x", UNIT, role=Role.INPUT),  # 0
        Value("weight", 64, role=Role.STORED),
        Value("weight/next", 64, role=Role.OUTPUT, home=1),
        Value("hidden", UNIT),  # 3
        Value("y", UNIT),
        Value("gy", UNIT),
        Value("gw", UNIT),  # 6
        Value("gx", UNIT, role=Role.OUTPUT),
    )
    actions = (
        Action("product", (0, 1), (3,)),
        Action("activate", (3,), (4,)),
        Action("loss", (4,), (5,)),
        Action("weight gradient", (0, 5), (6,)),
        Action("update", (1, 6), (2,), (Overwrite(0, 0, True),), effect=True),
        Action("gradient", (3, 5), (7,)),
    )
    problem = Problem(values, actions, (Region("arena"),))
    found = plan_segments(problem, [range(2)], range(3))
    Machine(found, problem).run()
    assert runs(found)[0] == 2 and len(found.steps) == len(actions) + 1


def test_sums_in_place_are_made_again_whole() -> None:
    values = (
        Value("x", UNIT, role=Role.INPUT),  # 0
        Value("first", UNIT),
        Value("sum", UNIT),
        Value("y", UNIT),  # 3
        Value("gy", UNIT),
        Value("gs", UNIT, role=Role.OUTPUT),
    )
    actions = (
        Action("first part", (0,), (1,)),
        Action("second part", (0, 1), (2,), (Overwrite(0, 1, True),)),
        Action("activate", (2,), (3,)),
        Action("loss", (3,), (4,)),
        Action("gradient", (2, 4), (5,)),
    )
    problem = Problem(values, actions, (Region("arena"),))
    found = plan_segments(problem, [range(3)], range(4))
    Machine(found, problem).run()
    assert {actions[index].name for index, count in runs(found).items() if count == 2} == {"first part", "second part"}

"""Plans written by hand, right and wrong, with what the verifier must say. Mutants by the thousand: test_mutations."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foreplan.base.errors import VerificationError
from foreplan.planner import (
    Action,
    Certificate,
    Overwrite,
    Part,
    Plan,
    Problem,
    Region,
    Role,
    Step,
    Value,
    plan,
    verify,
)
from tests.planner.problems import Maker, training_net


def hand_plan(
    problem: Problem,
    steps: list[Step],
    starts: dict[int, int],
    ends: dict[int, int],
    heights: tuple[int, ...],
    bound: int,
    peak: int,
) -> Plan:
    return Plan(
        problem.digest,
        tuple(steps),
        tuple(starts.items()),
        tuple(ends.items()),
        heights,
        sum(heights),
        bound,
        None,
        Certificate(peak, "by hand", "by hand"),
    )


def chain() -> tuple[Problem, Plan]:
    """w is updated by x -> a -> b (in place, with scratch), and y is returned."""
    make = Maker((Region("persistent"), Region("arena")))
    w = make.value("w", 64, 0, role=Role.STORED)
    x = make.value("x", 128, role=Role.INPUT)
    a, b = make.value("a", 128), make.value("b", 128)
    new = make.value("w'", 64, 0, role=Role.OUTPUT, home=w)
    y = make.value("y", 64, role=Role.OUTPUT)
    make.action("f", [x, w], [a])
    make.action("g", [a], [b], Overwrite(0, 0), workspace=64, workspace_region=1)
    make.action("h", [b, w], [y])
    make.action("update", [w, b], [new], Overwrite(0, 0, True), effect=True)
    steps = [
        Step(0, (0, 0), (128,)),
        Step(1, (128,), (128,), 0),
        Step(2, (128, 0), (0,)),
        Step(3, (0, 128), (0,)),
    ]
    problem = make.problem()
    return problem, hand_plan(problem, steps, {w: 0, x: 0}, {new: 0, y: 0}, (64, 256), 320, 0)


def test_a_right_plan_passes() -> None:
    problem, good = chain()
    verify(good, problem)


def with_step(plan: Plan, number: int, **fields: object) -> Plan:
    """The plan with other fields in one of its steps."""
    steps = list(plan.steps)
    steps[number] = replace(steps[number], **fields)
    return replace(plan, steps=tuple(steps))


def changed(step: int, **fields: object) -> Plan:
    return with_step(chain()[1], step, **fields)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (
            changed(0, writes=(64,)),
            r"step 0 \('f'\): 'a' at \[64, 192\) is written over 'x' at \[0, 128\), which it reads",
        ),
        (changed(0, writes=(192,)), r"step 0 \('f'\): 'a' at \[192, 320\) is not within region 'arena' of 256 bytes"),
        (changed(0, writes=(130,)), r"'a' at \[130, 258\) is not aligned to 64"),
        (changed(0, reads=(0, 64)), r"'w' at \[64, 128\) is not within region 'persistent'"),
        (
            changed(1, reads=(64,), writes=(64,)),
            r"step 1 \('g'\): 'a' at \[64, 192\) is needed, but 'x', its bytes \[64, 128\), in \[64, 128\), is there",
        ),
        (
            changed(1, workspace=128),
            r"'b' at \[128, 256\) is written over the workspace \[128, 192\)|workspace .* over 'b'",
        ),
        (changed(1, workspace=32), r"workspace \[32, 96\) is not aligned to 64 or not within region 'arena' of 256"),
        (
            changed(1, writes=(0,), workspace=128),
            r"the workspace \[128, 192\) is written over 'a' at \[128, 256\), which",
        ),
        (
            changed(2, writes=(128,)),
            r"step 2 \('h'\): 'y' at \[128, 192\) is written over 'b' at \[128, 256\), which it",
        ),
        (changed(3, writes=(64,)), r"\"w'\" at \[64, 128\) is not within"),
        (changed(2, action=7), "step 2 runs action 7, which is not there"),
        (changed(2, reads=(128,)), r"step 2 \('h'\) has 1 read and 1 write offsets for 2 reads"),
    ],
)
def test_what_is_said_of_a_wrong_step(bad: Plan, message: str) -> None:
    with pytest.raises(VerificationError, match=message):
        verify(bad, chain()[0])


def test_effects_happen_once_and_after_the_readers() -> None:
    problem, good = chain()
    with pytest.raises(VerificationError, match="'update' has an effect and must run once; it runs 0 times"):
        verify(replace(good, steps=good.steps[:3]), problem)
    with pytest.raises(VerificationError, match="'update' has an effect and must run once; it runs 2 times"):
        verify(replace(good, steps=(*good.steps, good.steps[3])), problem)
    early = (*good.steps[:2], good.steps[3], good.steps[2])
    with pytest.raises(VerificationError, match=r"step 3 \('h'\): 'w' at \[0, 64\) is needed, but \"w'\", its bytes"):
        verify(replace(good, steps=early), problem)


def test_starts_ends_digest_heights_and_budget() -> None:
    problem, good = chain()
    wrong = [
        (replace(good, problem_digest="0" * 64), "answers problem 000000000000"),
        (replace(good, starts=good.starts[:1]), "starts must name every input and stored value once"),
        (replace(good, ends=good.ends[:1]), "ends must name every output and stored value once"),
        (replace(good, ends=((4, 0), (5, 64))), r"at the end: 'y' at \[64, 128\) is needed, but 'x', its bytes"),
        (replace(good, heights=(64, 200), arena_bytes=264), "a multiple of 64"),
        (replace(good, heights=(128, 256)), "arena_bytes is 320, but the device's heights come to 384"),
        (replace(good, lower_bound_bytes=256), "lower_bound_bytes is 256, but the highest live set is 320"),
        (replace(good, certificate=replace(good.certificate, peak_step=3)), "highest at step 0"),
        (replace(good, budget=319), "more than its budget of 319"),
    ]
    for bad, message in wrong:
        with pytest.raises(VerificationError, match=message):
            verify(bad, problem)


def test_stored_bytes_are_not_scratch_even_after_the_last_read() -> None:
    make = Maker((Region("arena"),))
    w, x = make.value("w", 64, 0, role=Role.STORED), make.value("x", 64, 0, role=Role.INPUT)
    y = make.value("y", 64, 0, role=Role.OUTPUT)
    new = make.value("w'", 64, 0, role=Role.OUTPUT, home=w)
    make.action("f", [x], [y])
    make.action("set", [y], [new], effect=True)
    problem = make.problem()
    bad = hand_plan(problem, [Step(0, (64,), (0,)), Step(1, (0,), (0,))], {w: 0, x: 64}, {y: 0, new: 0}, (128,), 128, 0)
    with pytest.raises(VerificationError, match=r"'y' at \[0, 64\) is written over stored 'w' at \[0, 64\)"):
        verify(bad, problem)


def test_two_writes_may_not_share_bytes_though_both_may_overwrite() -> None:
    make = Maker((Region("arena"),))
    x = make.value("x", 64, 0, role=Role.INPUT)
    a, b = make.value("a", 64, 0, role=Role.OUTPUT), make.value("b", 64, 0, role=Role.OUTPUT)
    make.action("f", [x], [a, b], Overwrite(0, 0), Overwrite(1, 0))
    problem = make.problem()
    bad = hand_plan(problem, [Step(0, (0,), (0, 0))], {x: 0}, {a: 0, b: 0}, (64,), 64, 0)
    with pytest.raises(VerificationError, match=r"'a' at .* is written over 'b'"):
        verify(bad, problem)


def joined() -> tuple[Problem, Plan]:
    """A table of 64, 128 and 64 bytes: the first and the last part are made in their places, the other is copied."""
    make = Maker((Region("arena"),))
    x = make.value("x", 64, 0, role=Role.INPUT)
    a, b, c = make.value("a", 64, 0), make.value("b", 128, 0), make.value("c", 64, 0)
    table, y = make.value("t", 256, 0), make.value("y", 64, 0, role=Role.OUTPUT)
    for name, value in (("a", a), ("b", b), ("c", c)):
        make.action(name, [x], [value])
    make.action("join", [a, b, c], [table], parts=(Part(0, 0, 0), Part(0, 1, 64), Part(0, 2, 192)))
    make.action("y", [table], [y])
    steps = [
        Step(0, (384,), (0,)),
        Step(1, (384,), (256,)),
        Step(2, (384,), (192,)),
        Step(3, (0, 256, 192), (0,)),
        Step(4, (0,), (256,)),
    ]
    problem = make.problem()
    # Live at most: x and three parts, before they are joined; the table and y, after.
    return problem, hand_plan(problem, steps, {x: 384}, {y: 256}, (448,), 320, 2)


def test_parts_may_be_made_within_the_whole_or_copied_there() -> None:
    problem, good = joined()
    verify(good, problem)


def test_wrong_parts_are_refused() -> None:
    problem, good = joined()

    def refused(message: str, *steps: tuple[int, Step]) -> None:
        changed = dict(steps)
        bad = replace(good, steps=tuple(changed.get(i, step) for i, step in enumerate(good.steps)))
        with pytest.raises(VerificationError, match=message):
            verify(bad, problem)

    refused(r"'a' at \[64, 128\), which it reads", (0, Step(0, (384,), (64,))), (3, Step(3, (64, 256, 192), (0,))))
    refused(r"step 3 \('join'\): 'c' at \[192, 256\) is needed", (2, Step(2, (384,), (128,))))
    refused(
        r"'b' at \[128, 256\), which it reads",
        (1, Step(1, (384,), (128,))),
        (3, Step(3, (0, 128, 256), (0,))),
        (2, Step(2, (384,), (256,))),
    )
    refused(r"step 4 \('y'\): 'y' at \[192, 256\) is written over 't'", (4, Step(4, (0,), (192,))))


def test_a_part_that_is_read_again_must_not_lie_within_the_whole() -> None:
    make = Maker((Region("arena"),))
    x = make.value("x", 64, 0, role=Role.INPUT)
    a, table = make.value("a", 64, 0), make.value("t", 128, 0)
    y = make.value("y", 64, 0, role=Role.OUTPUT)
    make.action("a", [x], [a])
    make.action("join", [a, x], [table], parts=(Part(0, 0, 0), Part(0, 1, 64)))
    make.action("y", [table, a], [y])
    problem = make.problem()
    steps = [Step(0, (128,), (0,)), Step(1, (0, 128), (0,)), Step(2, (0, 0), (192,))]
    bad = hand_plan(problem, steps, {x: 128}, {y: 192}, (256,), 192, 1)
    with pytest.raises(VerificationError, match=r"'a' at \[0, 64\) is needed, but 't', its bytes \[0, 64\)"):
        verify(bad, problem)


def test_recomputed_values_may_lie_elsewhere() -> None:
    make = Maker((Region("arena"),))
    x = make.value("x", 64, 0, role=Role.INPUT)
    a, y, z = (make.value(n, 64, 0, role=r) for n, r in (("a", Role.TRANSIENT), ("y", Role.OUTPUT), ("z", Role.OUTPUT)))
    make.action("a", [x], [a])
    make.action("y", [a], [y], Overwrite(0, 0))
    make.action("z", [a], [z], Overwrite(0, 0))
    steps = [Step(0, (0,), (64,)), Step(1, (64,), (64,)), Step(0, (0,), (128,)), Step(2, (128,), (128,))]
    problem = make.problem()
    verify(hand_plan(problem, steps, {x: 0}, {y: 64, z: 128}, (192,), 192, 2), problem)
    stale = [*steps[:3], Step(2, (64,), (0,))]
    with pytest.raises(VerificationError, match=r"step 3 \('z'\): 'a' at \[64, 128\) is needed, but 'y'"):
        verify(hand_plan(problem, stale, {x: 0}, {y: 64, z: 0}, (192,), 192, 2), problem)


def test_the_verifier_imports_nothing_of_the_planner_but_its_types() -> None:
    import ast
    from pathlib import Path

    import foreplan.planner

    folder = Path(foreplan.planner.__file__).parent / "verify"
    allowed = {
        "foreplan.base.errors",
        "foreplan.planner.plan",
        "foreplan.planner.problem",
        "foreplan.planner.verify.replay",
    }
    allowed |= {"foreplan.planner.verify.wellformed", "foreplan.planner.placement.problem"}  # the latter for a limit
    for name in ("verifier.py", "replay.py", "wellformed.py"):
        for node in ast.walk(ast.parse((folder / name).read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("foreplan"):
                assert node.module in allowed


def test_training_plans_verify() -> None:
    problem = training_net(20)
    verify(plan(problem), problem)


def test_the_peak_is_the_first_step_of_the_highest_live_set() -> None:
    roles = (Role.INPUT, Role.TRANSIENT, Role.TRANSIENT, Role.OUTPUT)
    values = tuple(Value(name, 64, role=role) for name, role in zip("xaby", roles))
    problem = Problem(values, tuple(Action(f"to {i + 1}", (i,), (i + 1,)) for i in range(3)))
    found = plan(problem)
    assert found.certificate.peak_step == 0
    with pytest.raises(VerificationError, match="peak_step is 1, but the live set is highest at step 0"):
        verify(replace(found, certificate=replace(found.certificate, peak_step=1)), problem)

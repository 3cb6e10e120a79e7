"""Plans written by hand, right and wrong, with what the verifier must say. Mutants by the thousand: test_mutations."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foreplan.base.errors import VerificationError
from foreplan.planner import Plan, Problem, Region, Step, plan, verify
from tests.planner.problems import training_net
from tests.planner.texts import ARENA, hand_plan, problem


def chain() -> tuple[Problem, Plan]:
    """w is updated by x -> a -> b (in place, with scratch), and y is returned."""
    asked = problem(
        """
        w 64 stored; x 128 input; a 128; b 128; w' 64 output home=w; y 64 output
        f: x, w -> a
        g: a -> b | b?a ws=64
        h: b, w -> y
        update: w, b -> w' | w'!w effect
        """,
        (Region("persistent"), Region("arena")),
    )
    text = """
        w@0 x@0
        f: x@0 w@0 -> a@128
        g: a@128 -> b@128 ws@0
        h: b@128 w@0 -> y@0
        update: w@0 b@128 -> w'@0
        w'@0 y@0
    """
    return asked, hand_plan(asked, text, (64, 256), [320, 256, 256, 256])


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


# A problem, a plan of it, its height, the live set of each step, and what is said.
REFUSED: dict[str, tuple[str, str, int, list[int], str]] = {
    "stored bytes are not scratch even after the last read": (
        "w 64 stored; f: x 64 input -> y 64 output; set: y -> w' 64 output home=w | effect",
        "w@0 x@64; f: x@64 -> y@0; set: y@0 -> w'@0; y@0 w'@0",
        128,
        [128],
        r"'y' at \[0, 64\) is written over stored 'w' at \[0, 64\)",
    ),
    "two writes may not share bytes though both may overwrite": (
        "f: x 64 input -> a 64 output, b 64 output | a?x b?x",
        "x@0; f: x@0 -> a@0 b@0; a@0 b@0",
        64,
        [64],
        r"'a' at .* is written over 'b'",
    ),
    "a part that is read again must not lie within the whole": (
        "a: x 64 input -> a 64; join: a, x -> t 128 | t[0]?a t[64]?x; y: t, a -> y 64 output",
        "x@128; a: x@128 -> a@0; join: a@0 x@128 -> t@0; y: t@0 a@0 -> y@192; y@192",
        256,
        [128, 192],
        r"'a' at \[0, 64\) is needed, but 't', its bytes \[0, 64\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    text, answer, height, live, message = REFUSED[name]
    asked = problem(text, ARENA)
    with pytest.raises(VerificationError, match=message):
        verify(hand_plan(asked, answer, (height,), live), asked)


def joined() -> tuple[Problem, Plan]:
    """A table of 64, 128 and 64 bytes: the first and the last part are made in their places, the other is copied."""
    asked = problem(
        """
        a: x 64 input -> a 64; b: x -> b 128; c: x -> c 64
        join: a, b, c -> t 256 | t[0]?a t[64]?b t[192]?c
        y: t -> y 64 output
        """,
        ARENA,
    )
    text = """
        x@384
        a: x@384 -> a@0; b: x@384 -> b@256; c: x@384 -> c@192
        join: a@0 b@256 c@192 -> t@0
        y: t@0 -> y@256
        y@256
    """
    # Live at most: x and three parts, before they are joined; the table and y, after.
    return asked, hand_plan(asked, text, (448,), [128, 256, 320, 256, 320])


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


def test_recomputed_values_may_lie_elsewhere() -> None:
    asked = problem("a: x 64 input -> a 64; y: a -> y 64 output | y?a; z: a -> z 64 output | z?a", ARENA)
    begun = "x@0; a: x@0 -> a@64; y: a@64 -> y@64; a: x@0 -> a@128"
    live = [128, 128, 192, 128]
    verify(hand_plan(asked, f"{begun}; z: a@128 -> z@128; y@64 z@128", (192,), live), asked)
    with pytest.raises(VerificationError, match=r"step 3 \('z'\): 'a' at \[64, 128\) is needed, but 'y'"):
        verify(hand_plan(asked, f"{begun}; z: a@64 -> z@0; y@64 z@0", (192,), live), asked)


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
    asked = problem("to 1: x 64 input -> a 64; to 2: a -> b 64; to 3: b -> y 64 output", ARENA)
    found = plan(asked)
    assert found.certificate.peak_step == 0
    with pytest.raises(VerificationError, match="peak_step is 1, but the live set is highest at step 0"):
        verify(replace(found, certificate=replace(found.certificate, peak_step=1)), asked)

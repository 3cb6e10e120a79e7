"""The verifier at its edges: each comparison one step to either side, with values, homes and offsets that are not 0."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foreplan.base.errors import VerificationError
from foreplan.planner import Plan, Region, verify
from foreplan.planner.memory.bounds import live_bytes
from tests.planner.test_verify import with_step
from tests.planner.texts import ARENA, hand_plan, problem

# Two stored values of one size, each with a next content: v's from x beside its last reader, w's over w.
HOMES = problem(
    """
    v 64 stored; w 64 stored
    f: x 64 input, v, w -> a 128, y 64 output | ws=64
    set v: a -> v' 64 output home=v | effect
    set w: w, a -> w' 64 output home=w | w'!w effect
    """,
    (Region("stored"), Region("arena")),
)
GOOD = hand_plan(
    HOMES,
    """
    v@64 w@128 x@64
    f: x@64 v@64 w@128 -> a@128 y@256 ws@0
    set v: a@128 -> v'@64
    set w: w@128 a@128 -> w'@128
    y@256 v'@64 w'@128
    """,
    (192, 320),
    [448, 320, 320],
)


def test_the_plan_is_right() -> None:
    verify(GOOD, HOMES)


def changed(step: int, **fields: object) -> Plan:
    return with_step(GOOD, step, **fields)


def with_fields(**fields: object) -> Plan:
    return replace(GOOD, **fields)


REFUSED = [
    (with_fields(problem_digest="0" * 64), "answers problem 000000000000"),
    (with_fields(problem_digest="f" * 64), "answers problem ffffffffffff"),
    (with_fields(heights=(192,), arena_bytes=192), "for each of 2 regions"),
    (with_fields(heights=(192, 320, 64), arena_bytes=576), "for each of 2 regions"),
    (with_fields(heights=(192, -64), arena_bytes=128), "a multiple of 64"),
    (with_fields(arena_bytes=GOOD.arena_bytes - 64), "arena_bytes is 448, but"),
    (with_fields(arena_bytes=GOOD.arena_bytes + 64), "arena_bytes is 576, but"),
    (with_fields(lower_bound_bytes=384), "lower_bound_bytes is 384, but the highest live set is 448"),
    (with_fields(lower_bound_bytes=512), "lower_bound_bytes is 512, but the highest live set is 448"),
    (with_fields(certificate=replace(GOOD.certificate, peak_step=1)), "peak_step is 1"),
    (with_fields(certificate=replace(GOOD.certificate, peak_step=3)), "peak_step is 3"),
    (with_fields(certificate=replace(GOOD.certificate, peak_step=4)), "peak_step is 4"),
    (with_fields(certificate=replace(GOOD.certificate, peak_step=-3)), "peak_step is -3"),
    (with_fields(order_lower_bound_bytes=-1), "order_lower_bound_bytes is -1"),
    (with_fields(order_lower_bound_bytes=513), "order_lower_bound_bytes is 513"),
    (with_fields(budget=511), "more than its budget of 511"),
    (with_fields(starts=((0, 64), (1, 128))), r"they name \['v', 'w'\]"),
    (with_fields(starts=(*GOOD.starts, (2, 64))), r"they name \['v', 'w', 'x', 'x'\]"),
    (with_fields(starts=(*GOOD.starts, (3, 64))), r"they name \['v', 'w', 'x', 'a'\]"),
    (with_fields(starts=(*GOOD.starts, (7, 64))), r"'x', 'value 7, which is not there'\]"),
    (with_fields(starts=((-1, 64), *GOOD.starts[1:])), r"\['value -1, which is not there', 'w', 'x'\]"),
    (
        with_fields(starts=((0, 128), (1, 128), (2, 64))),
        r"at the start: 'w' at \[128, 192\) overlaps 'v', its bytes \[0",
    ),
    (with_fields(starts=((0, 63), (1, 128), (2, 64))), r"'v' at \[63, 127\) is not aligned to 64"),
    (with_fields(starts=((0, -64), (1, 128), (2, 64))), r"'v' at \[-64, 0\) is not within region 'stored' of 192"),
    (with_fields(starts=((0, 64), (1, 192), (2, 64))), r"'w' at \[192, 256\) is not within region 'stored' of 192"),
    (with_fields(ends=GOOD.ends[1:]), r"ends must name every output and stored value once; they name \[\"v'\""),
    (with_fields(ends=(*GOOD.ends, (0, 64))), r"ends must name every output"),
    (with_fields(ends=((4, 256), (5, 128), (6, 128))), r"\"v'\" must be at home, offset 64, not at 128"),
    (with_fields(ends=((4, 256), (5, 64), (6, 64))), r"\"w'\" must be at home, offset 128, not at 64"),
    (with_fields(ends=((4, 192), (5, 64), (6, 128))), r"'y' at \[192, 256\) is needed, but 'a', its bytes \[64, 128\)"),
    (changed(0, action=3), "step 0 runs action 3, which is not there"),
    (changed(0, action=-1), "step 0 runs action -1, which is not there"),
    (changed(0, reads=(64, 64)), "has 2 read and 2 write offsets for 3 reads"),
    (changed(0, reads=(64, 64, 128, 0)), "has 4 read and 2 write offsets for 3 reads"),
    (changed(0, writes=(128,)), "has 3 read and 1 write offsets for 3 reads and 2 writes"),
    (changed(0, writes=(128, 256, 0)), "has 3 read and 3 write offsets for 3 reads and 2 writes"),
    (changed(0, workspace=-64), r"workspace \[-64, 0\) is not aligned"),
    (changed(0, workspace=320), r"workspace \[320, 384\) is not aligned to 64 or not within region 'arena' of 320"),
    (changed(0, workspace=64), r"the workspace \[64, 128\) is written over 'x' at \[64, 128\), which it reads"),
    (
        changed(0, workspace=192),
        r"'a' at \[128, 256\) is written over the workspace \[192, 256\)|workspace .* over 'a'",
    ),
    (changed(0, writes=(128, 192)), r"'a' at \[128, 256\) is written over 'y' at \[192, 256\)"),
    (changed(1, writes=(128,)), r"\"v'\" at \[128, 192\) is written over stored 'w' at \[128, 192\)"),
    (changed(1, writes=(0,)), r"\"v'\" must be written at home, offset 64, not at 0"),
    (changed(2, writes=(64,)), r"\"w'\" at \[64, 128\) must take the bytes of 'w' at \[128, 192\)"),
    (changed(1, reads=(192,)), r"'a' at \[192, 320\) is needed, but 'a', its bytes \[64, 128\), in \[192, 256\)"),
    (changed(1, reads=(64,)), r"'a' at \[64, 192\) is needed, but 'x', its bytes \[0, 64\), in \[64, 128\)"),
    (
        changed(1, reads=(0,)),
        r"'a' at \[0, 128\) is needed, but rubbish that the workspace of step 0 left in \[0, 64\)",
    ),
]


HIGHER = replace(changed(1, writes=(192,)), heights=(256, 320), arena_bytes=576)
REFUSED.append((HIGHER, r"\"v'\" must be written at home, offset 64, not at 192"))
EARLY = replace(GOOD, steps=(GOOD.steps[1], GOOD.steps[0], GOOD.steps[2]))
REFUSED.append((EARLY, r"step 0 \('set v'\): 'a' at \[128, 256\) is needed, but nothing, in \[128, 256\), is there"))


@pytest.mark.parametrize("at", range(len(REFUSED)))
def test_what_is_refused_and_what_is_said(at: int) -> None:
    bad, message = REFUSED[at]
    with pytest.raises(VerificationError, match=message):
        verify(bad, HOMES)


@pytest.mark.parametrize(
    "fields",
    [{"order_lower_bound_bytes": bound} for bound in (None, 0, 448, 512)]
    + [{"budget": budget} for budget in (None, 512, 513)]
    + [{"starts": GOOD.starts[::-1], "ends": GOOD.ends[::-1]}],  # they come in any order
)
def test_figures_at_their_limits_pass(fields: dict[str, object]) -> None:
    verify(with_fields(**fields), HOMES)


def test_a_place_for_no_workspace_means_nothing() -> None:
    verify(changed(1, workspace=32), HOMES)


def test_a_stored_value_may_lie_anywhere_and_is_not_for_others() -> None:
    """With another region's workspace, and a write that is not its next content, over either stored value."""
    both = problem("v 64 stored; w 64 stored; f: -> a 64 output, b 64 output | ws=64", ARENA)

    def at(a: int, b: int, scratch: int) -> Plan:
        return hand_plan(both, f"v@64 w@256; f: -> a@{a} b@{b} ws@{scratch}; v@64 w@256 a@{a} b@{b}", (320,), [320])

    verify(at(0, 128, 192), both)
    for bad, message in (
        (at(64, 128, 192), "'a' at .* is written over stored 'v'"),
        (at(256, 128, 192), "'a' at .* is written over stored 'w'"),
        (at(0, 64, 192), "'b' at .* is written over stored 'v'"),
        (at(0, 256, 192), "'b' at .* is written over stored 'w'"),
        (at(0, 128, 64), r"the workspace \[64, 128\) is written over stored 'v'"),
        (at(0, 128, 256), r"the workspace \[256, 320\) is written over stored 'w'"),
        (
            replace(at(0, 128, 192), ends=((0, 64), (1, 64), (2, 0), (3, 128))),
            "'w' must be at home, offset 256, not at 64",
        ),
    ):
        with pytest.raises(VerificationError, match=message):
            verify(bad, both)


# A problem, a plan of it, its height and the live set of each step.
OF_FOUR = "p 192 input, q 192 input, r 192 input, s 192 input -> a 192 output, b 128 output, c 64 output, d 64 output"
APART = "p@0 q@192 r@384 s@576; f: p@0 q@192 r@384 s@576 -> a@192 b@384 c@0 d@768; a@192 b@384 c@0 d@768"
RIGHT: dict[str, tuple[str, str, int, list[int]]] = {
    **{
        f"sharing is found along paths, {first} values before": (
            # All find a read only if the larger two writes give way twice.
            "".join(f"unused{i} 64;" for i in range(first))
            + "f: p 192 input, q 192 input, r 192 input -> a 192 output, b 128 output, c 64 output"
            " | a?p a?q b?q b?r b?p c?p",
            "p@0 q@192 r@384; f: p@0 q@192 r@384 -> a@192 b@384 c@0; a@192 b@384 c@0",
            576,
            [576],
        )
        for first in (0, 1, 3)
    },
    **{
        # The third write makes others give way; the fourth finds nothing, though the second could move on.
        f"a path that was taken is remembered, {wishes}": (f"f: {OF_FOUR} | {wishes}", APART, 832, [832])
        for wishes in ("a?p a?q b?q b?r b?s c?p d?p", "a?p a?q a?s b?q b?r c?p d?p")
    },
    "one of two copies may be overwritten": (
        "make: x 64 input -> a 64; take: a -> b 64 | b!a; join: a, b -> y 64 output",
        "x@0; make: x@0 -> a@64; make: x@0 -> a@128; take: a@64 -> b@64; join: a@128 b@64 -> y@0; y@0",
        192,
        [128, 128, 128, 192],
    ),
    "nothing is planned in no bytes": ("", ";", 0, [0]),
    "sizes are rounded up to the smallest alignment of what has bytes": (
        "f: x 98 input align=32, token 0 input align=4 -> y 32 output",
        "x@0 token@0; f: x@0 token@0 -> y@128; y@128",
        192,
        [128 + 32],
    ),
    "bytes at home are given to no other write": (
        # A next content that is read, gone and made again: what is written then has bytes of its own.
        "w 64 stored; set: x 64 input -> w' 64 output home=w; use: w' -> y 64 output | y?w' ws=64",
        "w@0 x@64; set: x@64 -> w'@0; use: w'@0 -> y@128 ws@192; set: x@64 -> w'@0; w'@0 y@128",
        256,
        [128, 256, 192],
    ),
    "a required overwrite shares the bytes of its read": (
        "f: x 64 input -> a 64; g: a, x -> b 64 output, token 0 | b!a",
        "x@0; f: x@0 -> a@64; g: a@64 x@0 -> b@64 token@64; b@64",
        128,
        [128, 128],
    ),
    "a required overwrite of no bytes leaves them to another write": (
        "f: x 64 input -> a 64; g: a, x -> b 64 output, token 0 | b?a token!a",
        "x@0; f: x@0 -> a@64; g: a@64 x@0 -> b@64 token@64; b@64",
        128,
        [128, 128],
    ),
    "the larger of two writes has the read": (
        "f: p 128 input -> a 64 output, b 128 output | a?p b?p",
        "p@0; f: p@0 -> a@128 b@0; a@128 b@0",
        192,
        [192],
    ),
    "what has no bytes is in nobody's way": (
        "w 0 stored; f: token 0 input -> y 128 output",
        "w@64 token@64; f: token@64 -> y@0; w@64 y@0",
        128,
        [128],
    ),
    "a part in its place touches no write below the whole": (
        "a: x 64 input -> a 64; b: x -> b 64; join: a, b -> s 64 output, t 128 output | t[0]?a t[64]?b",
        "x@192; a: x@192 -> a@64; b: x@192 -> b@128; join: a@64 b@128 -> s@0 t@64; s@0 t@64",
        256,
        [128, 192, 192],
    ),
    "what is made again lived before": (
        "a: x 64 input -> a 64; y: a -> y 64 output | ws=64; z: a -> z 64 output",
        "x@0; a: x@0 -> a@64; y: a@64 -> y@128 ws@192; a: x@0 -> a@64; z: a@64 -> z@0; y@128 z@0",
        256,
        [128, 256, 192, 192],
    ),
    "a required overwrite comes before a larger one": (
        "f: p 128 input -> a 64 output, b 128 output | a!p b?p",
        "p@0; f: p@0 -> a@0 b@128; a@0 b@128",
        256,
        [256],
    ),
    "what must take one read takes no other": (
        "f: p 64 input, q 64 input -> y 64 output | y!p y?q ws=64",
        "p@0 q@64; f: p@0 q@64 -> y@0 ws@128; y@0",
        192,
        [192],
    ),
    "parts share the bytes of the whole if they die there and may lie there": (
        # Of three parts, one is read again and one would not be aligned.
        "a: x 64 input -> a 64; b: x -> b 64; c: x -> c 64;"
        "join: a, b, c -> t 224 | t[0]?a t[64]?b t[160]?c ws=64; y: t, a -> y 64 output",
        "x@128; a: x@128 -> a@256; b: x@128 -> b@64; c: x@128 -> c@320;"
        "join: a@256 b@64 c@320 -> t@0 ws@384; y: t@0 a@256 -> y@320; y@320",
        448,
        [128, 192, 256, 448, 384],
    ),
    **{
        f"a part aligned to {part} lies in a whole aligned to {whole}": (
            f"a: x 32 input align=32 -> a 32 align={part}; join: a -> t 64 output align={whole} | t[32]?a ws=64",
            f"x@128; a: x@128 -> a@{at}; join: a@{at} -> t@{at - 32} ws@128; t@{at - 32}",
            192,
            [64, 128],
        )
        for part, whole, at in ((32, 64, 32), (64, 32, 64))
    },
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_passes(name: str) -> None:
    asked, answer, height, live = RIGHT[name]
    of = problem(asked, ARENA)
    found = hand_plan(of, answer, (height,), live)
    assert live_bytes(of, [step.action for step in found.steps]).tolist() == live
    verify(found, of)


# Likewise, a plan that is wrong, and what is said of it.
WRONG: dict[str, tuple[str, str, str, int, list[int], str]] = {
    "what has no bytes must have been made": (
        "make: x 64 input -> token 0; use: token -> y 64 output",
        "x@0; make: x@0 -> token@0; use: token@0 -> y@64; y@64",
        "x@0; use: token@0 -> y@64; y@64",
        128,
        [64, 64],
        r"'token' at \[0, 0\) is needed, but nothing has made it yet",
    ),
    "what is written second goes home": (
        "unused 64; w 64 stored; set: -> y 64 output, w' 64 output home=w | effect",
        "w@64; set: -> y@0 w'@64; y@0 w'@64",
        "w@64; set: -> y@0 w'@128; y@0 w'@128",
        192,
        [128],
        r"\"w'\" must be written at home, offset 64, not at 128",
    ),
    "stored bytes are found in whatever order they lie": (
        # What is written over w, which nobody reads, is all that is wrong.
        "v 64 stored; w 64 stored; f: x 64 input -> y 64; set: y -> w' 64 output home=w | w'?y effect",
        "v@192 w@0 x@64; f: x@64 -> y@128; set: y@128 -> w'@0; v@192 w'@0",
        "v@192 w@0 x@64; f: x@64 -> y@0; set: y@0 -> w'@0; v@192 w'@0",
        256,
        [256, 192],
        r"'y' at \[0, 64\) is written over stored 'w' at \[0, 64\)",
    ),
    "the workspace of what writes nothing is not over stored bytes": (
        "w 64 stored; look: x 64 input -> | ws=64 effect",
        "w@0 x@64; look: x@64 -> ws@128; w@0",
        "w@0 x@64; look: x@64 -> ws@0; w@0",
        192,
        [192],
        r"the workspace \[0, 64\) is written over stored 'w'",
    ),
    "every write over a read needs a right of its own": (
        "f: x 128 input -> a 64 output, b 64 output | a?x",
        "x@0; f: x@0 -> a@0 b@128; a@0 b@128",
        "x@0; f: x@0 -> a@0 b@64; a@0 b@64",
        192,
        [192],
        r"'b' at \[64, 128\) is written over 'x' at \[0, 128\), which it",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_beside_what_is_right(name: str) -> None:
    asked, right, wrong, height, live, message = WRONG[name]
    of = problem(asked, ARENA)
    verify(hand_plan(of, right, (height,), live), of)
    with pytest.raises(VerificationError, match=message):
        verify(hand_plan(of, wrong, (height,), live), of)


def test_heights_are_multiples_of_the_largest_alignment_and_may_be_nothing() -> None:
    wide = problem("x 64 input align=128", (Region("arena"), Region("empty")))
    verify(hand_plan(wide, "x@0;", (128, 0), [64]), wide)
    with pytest.raises(VerificationError, match="a multiple of 128 is needed"):
        verify(hand_plan(wide, "x@0;", (192, 0), [64]), wide)


def test_what_lies_off_the_device_is_in_no_figure() -> None:
    away = problem(
        "save: x 64 input -> x/host 64 @host | ws=64@host; fetch: x/host -> y 64 output",
        (Region("arena"), Region("host", on_device=False)),
    )
    good = hand_plan(away, "x@0; save: x@0 -> x/host@0 ws@64; fetch: x/host@0 -> y@0; y@0", (64, 128), [64, 64])
    verify(replace(good, arena_bytes=64, budget=64), away)

"""The verifier at its edges: each comparison one step to either side, with values, homes and offsets that are not 0."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foreplan.base.errors import VerificationError
from foreplan.planner import Overwrite, Part, Plan, Problem, Region, Role, Step, verify
from foreplan.planner.memory.bounds import live_bytes
from tests.planner.problems import Maker
from tests.planner.test_verify import hand_plan, with_step


def two_homes() -> tuple[Problem, Plan]:
    """Two stored values of one size, each with a next content: v's from x beside its last reader, w's over w."""
    make = Maker((Region("stored"), Region("arena")))
    v, w = make.value("v", 64, 0, role=Role.STORED), make.value("w", 64, 0, role=Role.STORED)
    x, a = make.value("x", 64, role=Role.INPUT), make.value("a", 128)
    y = make.value("y", 64, role=Role.OUTPUT)
    next_v = make.value("v'", 64, 0, role=Role.OUTPUT, home=v)
    next_w = make.value("w'", 64, 0, role=Role.OUTPUT, home=w)
    make.action("f", [x, v, w], [a, y], workspace=64, workspace_region=1)
    make.action("set v", [a], [next_v], effect=True)
    make.action("set w", [w, a], [next_w], Overwrite(0, 0, True), effect=True)
    steps = [Step(0, (64, 64, 128), (128, 256), 0), Step(1, (128,), (64,)), Step(2, (128, 128), (128,))]
    ends = {y: 256, next_v: 64, next_w: 128}
    problem = make.problem()
    return problem, hand_plan(problem, steps, {v: 64, w: 128, x: 64}, ends, (192, 320), 128 + 320, 0)


def test_the_plan_is_right() -> None:
    problem, good = two_homes()
    verify(good, problem)


def changed(step: int, **fields: object) -> Plan:
    return with_step(two_homes()[1], step, **fields)


def with_fields(**fields: object) -> Plan:
    return replace(two_homes()[1], **fields)


GOOD = two_homes()[1]
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
        verify(bad, two_homes()[0])


@pytest.mark.parametrize(
    "fields",
    [{"order_lower_bound_bytes": bound} for bound in (None, 0, 448, 512)]
    + [{"budget": budget} for budget in (None, 512, 513)],
)
def test_figures_at_their_limits_pass(fields: dict[str, int | None]) -> None:
    verify(with_fields(**fields), two_homes()[0])


def test_a_stored_value_may_lie_anywhere_and_is_not_for_others() -> None:
    """With another region's workspace, and a write that is not its next content, over either stored value."""
    make = Maker((Region("all"),))
    v, w = make.value("v", 64, 0, role=Role.STORED), make.value("w", 64, 0, role=Role.STORED)
    a, b = make.value("a", 64, 0, role=Role.OUTPUT), make.value("b", 64, 0, role=Role.OUTPUT)
    make.action("f", [], [a, b], workspace=64)
    problem = make.problem()

    def at(a_at: int, b_at: int, scratch: int) -> Plan:
        steps = [Step(0, (), (a_at, b_at), scratch)]
        return hand_plan(problem, steps, {v: 64, w: 256}, {v: 64, w: 256, a: a_at, b: b_at}, (320,), 320, 0)

    verify(at(0, 128, 192), problem)
    for bad, message in (
        (at(64, 128, 192), "'a' at .* is written over stored 'v'"),
        (at(256, 128, 192), "'a' at .* is written over stored 'w'"),
        (at(0, 64, 192), "'b' at .* is written over stored 'v'"),
        (at(0, 256, 192), "'b' at .* is written over stored 'w'"),
        (at(0, 128, 64), r"the workspace \[64, 128\) is written over stored 'v'"),
        (at(0, 128, 256), r"the workspace \[256, 320\) is written over stored 'w'"),
    ):
        with pytest.raises(VerificationError, match=message):
            verify(bad, problem)
    good = at(0, 128, 192)
    with pytest.raises(VerificationError, match="'w' must be at home, offset 256, not at 64"):
        verify(replace(good, ends=((v, 64), (w, 64), (a, 0), (b, 128))), problem)


def test_what_has_no_bytes_must_have_been_made() -> None:
    make = Maker((Region("arena"),))
    x = make.value("x", 64, 0, role=Role.INPUT)
    token, y = make.value("token", 0, 0), make.value("y", 64, 0, role=Role.OUTPUT)
    make.action("make", [x], [token])
    make.action("use", [token], [y])
    problem = make.problem()
    both = [Step(0, (0,), (0,)), Step(1, (0,), (64,))]
    verify(hand_plan(problem, both, {x: 0}, {y: 64}, (128,), 64, 0), problem)
    with pytest.raises(VerificationError, match=r"'token' at \[0, 0\) is needed, but nothing has made it yet"):
        verify(hand_plan(problem, both[1:], {x: 0}, {y: 64}, (128,), 64, 0), problem)


@pytest.mark.parametrize("first", [0, 1, 3])
def test_sharing_is_found_along_paths(first: int) -> None:
    """Reads p, q, r and writes a, b, c, which all find one only if the larger two give way twice."""
    make = Maker((Region("arena"),))
    for i in range(first):
        make.value(f"unused{i}", 64, 0)
    p, q, r = (make.value(name, 192, 0, role=Role.INPUT) for name in "pqr")
    a, b, c = (make.value(n, size, 0, role=Role.OUTPUT) for n, size in (("a", 192), ("b", 128), ("c", 64)))
    pairs = [Overwrite(0, 0), Overwrite(0, 1), Overwrite(1, 1), Overwrite(1, 2), Overwrite(1, 0), Overwrite(2, 0)]
    make.action("f", [p, q, r], [a, b, c], *pairs)
    problem = make.problem()
    assert live_bytes(problem, [0]).tolist() == [576]
    steps = [Step(0, (0, 192, 384), (192, 384, 0))]
    verify(hand_plan(problem, steps, {p: 0, q: 192, r: 384}, {a: 192, b: 384, c: 0}, (576,), 576, 0), problem)


@pytest.mark.parametrize(
    "wishes",
    [
        [(0, 0), (0, 1), (1, 1), (1, 2), (1, 3), (2, 0), (3, 0)],
        [(0, 0), (0, 1), (0, 3), (1, 1), (1, 2), (2, 0), (3, 0)],
    ],
)
def test_a_path_that_was_taken_is_remembered(wishes: list[tuple[int, int]]) -> None:
    """The third write makes others give way; the fourth finds nothing, though the second could move on."""
    make = Maker((Region("arena"),))
    p, q, r, s = (make.value(name, 192, 0, role=Role.INPUT) for name in "pqrs")
    sizes = (("a", 192), ("b", 128), ("c", 64), ("d", 64))
    a, b, c, d = (make.value(name, size, 0, role=Role.OUTPUT) for name, size in sizes)
    make.action("f", [p, q, r, s], [a, b, c, d], *[Overwrite(*wish) for wish in wishes])
    problem = make.problem()
    assert live_bytes(problem, [0]).tolist() == [832]
    starts, ends = {p: 0, q: 192, r: 384, s: 576}, {a: 192, b: 384, c: 0, d: 768}
    steps = [Step(0, tuple(starts.values()), tuple(ends.values()))]
    verify(hand_plan(problem, steps, starts, ends, (832,), 832, 0), problem)


def test_what_is_written_second_goes_home() -> None:
    make = Maker((Region("arena"),))
    make.value("unused", 64, 0)
    w, y = make.value("w", 64, 0, role=Role.STORED), make.value("y", 64, 0, role=Role.OUTPUT)
    new = make.value("w'", 64, 0, role=Role.OUTPUT, home=w)
    make.action("set", [], [y, new], effect=True)
    problem = make.problem()

    def at(offset: int) -> Plan:
        return hand_plan(problem, [Step(0, (), (0, offset))], {w: 64}, {y: 0, new: offset}, (192,), 128, 0)

    verify(at(64), problem)
    with pytest.raises(VerificationError, match=r"\"w'\" must be written at home, offset 64, not at 128"):
        verify(at(128), problem)


def test_one_of_two_copies_may_be_overwritten() -> None:
    make = Maker((Region("arena"),))
    x, a = make.value("x", 64, 0, role=Role.INPUT), make.value("a", 64, 0)
    b, y = make.value("b", 64, 0), make.value("y", 64, 0, role=Role.OUTPUT)
    make.action("make", [x], [a])
    make.action("take", [a], [b], Overwrite(0, 0, True))
    make.action("join", [a, b], [y])
    problem = make.problem()
    assert live_bytes(problem, [0, 0, 1, 2]).tolist() == [128, 128, 128, 192]
    steps = [Step(0, (0,), (64,)), Step(0, (0,), (128,)), Step(1, (64,), (64,)), Step(2, (128, 64), (0,))]
    verify(hand_plan(problem, steps, {x: 0}, {y: 0}, (192,), 192, 3), problem)


def test_starts_and_ends_come_in_any_order() -> None:
    verify(with_fields(starts=GOOD.starts[::-1], ends=GOOD.ends[::-1]), two_homes()[0])


def test_a_place_for_no_workspace_means_nothing() -> None:
    verify(changed(1, workspace=32), two_homes()[0])


def test_nothing_is_planned_in_no_bytes() -> None:
    problem = Maker((Region("arena"),)).problem()
    verify(hand_plan(problem, [], {}, {}, (0,), 0, 0), problem)


def test_heights_are_multiples_of_the_largest_alignment_and_may_be_nothing() -> None:
    make = Maker((Region("arena"), Region("empty")))
    make.value("x", 64, 0, alignment=128, role=Role.INPUT)
    problem = make.problem()
    verify(hand_plan(problem, [], {0: 0}, {}, (128, 0), 64, 0), problem)
    with pytest.raises(VerificationError, match="a multiple of 128 is needed"):
        verify(hand_plan(problem, [], {0: 0}, {}, (192, 0), 64, 0), problem)


def test_sizes_are_rounded_up_to_the_smallest_alignment_of_what_has_bytes() -> None:
    make = Maker((Region("arena"),))
    x, y = make.value("x", 98, 0, alignment=32, role=Role.INPUT), make.value("y", 32, 0, role=Role.OUTPUT)
    token = make.value("token", 0, 0, alignment=4, role=Role.INPUT)
    make.action("f", [x, token], [y])
    problem = make.problem()
    assert live_bytes(problem, [0]).tolist() == [128 + 32]
    starts = {x: 0, token: 0}
    verify(hand_plan(problem, [Step(0, (0, 0), (128,))], starts, {y: 128}, (192,), 128 + 32, 0), problem)


def test_what_lies_off_the_device_is_in_no_figure() -> None:
    make = Maker((Region("arena"), Region("host", on_device=False)))
    x, y = make.value("x", 64, 0, role=Role.INPUT), make.value("y", 64, 0, role=Role.OUTPUT)
    away = make.value("x/host", 64, 1)
    make.action("save", [x], [away], workspace=64, workspace_region=1)
    make.action("fetch", [away], [y])
    problem = make.problem()
    steps = [Step(0, (0,), (0,), 64), Step(1, (0,), (0,))]
    good = hand_plan(problem, steps, {x: 0}, {y: 0}, (64, 128), 64, 0)
    verify(replace(good, arena_bytes=64, budget=64), problem)


def test_bytes_at_home_are_given_to_no_other_write() -> None:
    """A next content that is read, gone and made again: what is written then has bytes of its own."""
    make = Maker((Region("arena"),))
    w, x = make.value("w", 64, 0, role=Role.STORED), make.value("x", 64, 0, role=Role.INPUT)
    new, y = make.value("w'", 64, 0, role=Role.OUTPUT, home=w), make.value("y", 64, 0, role=Role.OUTPUT)
    make.action("set", [x], [new])
    make.action("use", [new], [y], Overwrite(0, 0), workspace=64)
    problem = make.problem()
    assert live_bytes(problem, [0, 1, 0]).tolist() == [128, 256, 192]
    steps = [Step(0, (64,), (0,)), Step(1, (0,), (128,), 192), Step(0, (64,), (0,))]
    verify(hand_plan(problem, steps, {w: 0, x: 64}, {new: 0, y: 128}, (256,), 256, 1), problem)


@pytest.mark.parametrize("nothing", [False, True], ids=["required", "of no bytes"])
def test_bytes_that_must_be_taken_are_counted_once(nothing: bool) -> None:
    """A required overwrite shares the bytes of its read; one of no bytes leaves them to another write."""
    make = Maker((Region("arena"),))
    x, a, b = make.value("x", 64, 0, role=Role.INPUT), make.value("a", 64, 0), make.value("b", 64, 0, role=Role.OUTPUT)
    token = make.value("token", 0, 0)
    make.action("f", [x], [a])
    pairs = [Overwrite(0, 0), Overwrite(1, 0, True)] if nothing else [Overwrite(0, 0, True)]
    make.action("g", [a, x], [b, token], *pairs)
    problem = make.problem()
    assert live_bytes(problem, [0, 1]).tolist() == [128, 128]
    steps = [Step(0, (0,), (64,)), Step(1, (64, 0), (64, 64))]
    verify(hand_plan(problem, steps, {x: 0}, {b: 64}, (128,), 128, 0), problem)


def test_the_larger_of_two_writes_has_the_read() -> None:
    make = Maker((Region("arena"),))
    p = make.value("p", 128, 0, role=Role.INPUT)
    a, b = make.value("a", 64, 0, role=Role.OUTPUT), make.value("b", 128, 0, role=Role.OUTPUT)
    make.action("f", [p], [a, b], Overwrite(0, 0), Overwrite(1, 0))
    problem = make.problem()
    verify(hand_plan(problem, [Step(0, (0,), (128, 0))], {p: 0}, {a: 128, b: 0}, (192,), 192, 0), problem)


def test_what_has_no_bytes_is_in_nobodys_way() -> None:
    """A stored value and a read of no bytes, amid what is written."""
    make = Maker((Region("arena"),))
    w, token = make.value("w", 0, 0, role=Role.STORED), make.value("token", 0, 0, role=Role.INPUT)
    y = make.value("y", 128, 0, role=Role.OUTPUT)
    make.action("f", [token], [y])
    problem = make.problem()
    starts, ends = {w: 64, token: 64}, {w: 64, y: 0}
    verify(hand_plan(problem, [Step(0, (64,), (0,))], starts, ends, (128,), 128, 0), problem)


def test_stored_bytes_are_found_in_whatever_order_they_lie() -> None:
    """What is written over w, which nobody reads, is all that is wrong."""
    make = Maker((Region("arena"),))
    v, w = make.value("v", 64, 0, role=Role.STORED), make.value("w", 64, 0, role=Role.STORED)
    x, y = make.value("x", 64, 0, role=Role.INPUT), make.value("y", 64, 0)
    new = make.value("w'", 64, 0, role=Role.OUTPUT, home=w)
    make.action("f", [x], [y])
    make.action("set", [y], [new], Overwrite(0, 0), effect=True)
    problem = make.problem()

    def at(offset: int) -> Plan:
        steps = [Step(0, (64,), (offset,)), Step(1, (offset,), (0,))]
        return hand_plan(problem, steps, {v: 192, w: 0, x: 64}, {v: 192, new: 0}, (256,), 256, 0)

    verify(at(128), problem)
    with pytest.raises(VerificationError, match=r"'y' at \[0, 64\) is written over stored 'w' at \[0, 64\)"):
        verify(at(0), problem)


def test_the_workspace_of_what_writes_nothing_is_not_over_stored_bytes() -> None:
    make = Maker((Region("arena"),))
    w, x = make.value("w", 64, 0, role=Role.STORED), make.value("x", 64, 0, role=Role.INPUT)
    make.action("look", [x], [], workspace=64, effect=True)
    problem = make.problem()
    verify(hand_plan(problem, [Step(0, (64,), (), 128)], {w: 0, x: 64}, {w: 0}, (192,), 192, 0), problem)
    with pytest.raises(VerificationError, match=r"the workspace \[0, 64\) is written over stored 'w'"):
        verify(hand_plan(problem, [Step(0, (64,), (), 0)], {w: 0, x: 64}, {w: 0}, (192,), 192, 0), problem)


def test_every_write_over_a_read_needs_a_right_of_its_own() -> None:
    make = Maker((Region("arena"),))
    x = make.value("x", 128, 0, role=Role.INPUT)
    a, b = make.value("a", 64, 0, role=Role.OUTPUT), make.value("b", 64, 0, role=Role.OUTPUT)
    make.action("f", [x], [a, b], Overwrite(0, 0))
    problem = make.problem()
    verify(hand_plan(problem, [Step(0, (0,), (0, 128))], {x: 0}, {a: 0, b: 128}, (192,), 192, 0), problem)
    with pytest.raises(VerificationError, match=r"'b' at \[64, 128\) is written over 'x' at \[0, 128\), which it"):
        verify(hand_plan(problem, [Step(0, (0,), (0, 64))], {x: 0}, {a: 0, b: 64}, (192,), 192, 0), problem)


def test_a_part_in_its_place_touches_no_write_below_the_whole() -> None:
    make = Maker((Region("arena"),))
    x, a, b = make.value("x", 64, 0, role=Role.INPUT), make.value("a", 64, 0), make.value("b", 64, 0)
    s, t = make.value("s", 64, 0, role=Role.OUTPUT), make.value("t", 128, 0, role=Role.OUTPUT)
    make.action("a", [x], [a])
    make.action("b", [x], [b])
    make.action("join", [a, b], [s, t], parts=(Part(1, 0, 0), Part(1, 1, 64)))
    problem = make.problem()
    steps = [Step(0, (192,), (64,)), Step(1, (192,), (128,)), Step(2, (64, 128), (0, 64))]
    verify(hand_plan(problem, steps, {x: 192}, {s: 0, t: 64}, (256,), 192, 1), problem)


def test_what_is_made_again_lived_before() -> None:
    make = Maker((Region("arena"),))
    x, a = make.value("x", 64, 0, role=Role.INPUT), make.value("a", 64, 0)
    y, z = make.value("y", 64, 0, role=Role.OUTPUT), make.value("z", 64, 0, role=Role.OUTPUT)
    make.action("a", [x], [a])
    make.action("y", [a], [y], workspace=64)
    make.action("z", [a], [z])
    problem = make.problem()
    assert live_bytes(problem, [0, 1, 0, 2]).tolist() == [128, 256, 192, 192]
    steps = [Step(0, (0,), (64,)), Step(1, (64,), (128,), 192), Step(0, (0,), (64,)), Step(2, (64,), (0,))]
    verify(hand_plan(problem, steps, {x: 0}, {y: 128, z: 0}, (256,), 256, 1), problem)


def test_a_required_overwrite_comes_before_a_larger_one() -> None:
    make = Maker((Region("arena"),))
    p = make.value("p", 128, 0, role=Role.INPUT)
    a, b = make.value("a", 64, 0, role=Role.OUTPUT), make.value("b", 128, 0, role=Role.OUTPUT)
    make.action("f", [p], [a, b], Overwrite(0, 0, True), Overwrite(1, 0))
    problem = make.problem()
    assert live_bytes(problem, [0]).tolist() == [256]
    verify(hand_plan(problem, [Step(0, (0,), (0, 128))], {p: 0}, {a: 0, b: 128}, (256,), 256, 0), problem)


def test_what_must_take_one_read_takes_no_other() -> None:
    make = Maker((Region("arena"),))
    p, q = make.value("p", 64, 0, role=Role.INPUT), make.value("q", 64, 0, role=Role.INPUT)
    y = make.value("y", 64, 0, role=Role.OUTPUT)
    make.action("f", [p, q], [y], Overwrite(0, 0, True), Overwrite(0, 1), workspace=64)
    problem = make.problem()
    assert live_bytes(problem, [0]).tolist() == [192]
    verify(hand_plan(problem, [Step(0, (0, 64), (0,), 128)], {p: 0, q: 64}, {y: 0}, (192,), 192, 0), problem)


def test_parts_share_the_bytes_of_the_whole_if_they_die_there_and_may_lie_there() -> None:
    """Of three parts, one is read again and one would not be aligned."""
    make = Maker((Region("arena"),))
    x = make.value("x", 64, 0, role=Role.INPUT)
    a, b, c = (make.value(name, 64, 0) for name in "abc")
    t, y = make.value("t", 224, 0), make.value("y", 64, 0, role=Role.OUTPUT)
    for part in (a, b, c):
        make.action(make.values[part].name, [x], [part])
    make.action("join", [a, b, c], [t], parts=(Part(0, 0, 0), Part(0, 1, 64), Part(0, 2, 160)), workspace=64)
    make.action("y", [t, a], [y])
    problem = make.problem()
    assert live_bytes(problem, range(5)).tolist() == [128, 192, 256, 448, 384]
    steps = [Step(i, (128,), (offset,)) for i, offset in enumerate((256, 64, 320))]
    steps += [Step(3, (256, 64, 320), (0,), 384), Step(4, (0, 256), (320,))]
    verify(hand_plan(problem, steps, {x: 128}, {y: 320}, (448,), 448, 3), problem)


@pytest.mark.parametrize(("piece", "whole"), [(32, 64), (64, 32)])
def test_a_part_lies_where_either_alignment_lets_it(piece: int, whole: int) -> None:
    make = Maker((Region("arena"),))
    x, a = make.value("x", 32, 0, alignment=32, role=Role.INPUT), make.value("a", 32, 0, alignment=piece)
    t = make.value("t", 64, 0, alignment=whole, role=Role.OUTPUT)
    make.action("a", [x], [a])
    make.action("join", [a], [t], parts=(Part(0, 0, 32),), workspace=64)
    problem = make.problem()
    assert live_bytes(problem, [0, 1]).tolist() == [64, 128]
    at = 64 if piece == 64 else 32
    steps = [Step(0, (128,), (at,)), Step(1, (at,), (at - 32,), 128)]
    verify(hand_plan(problem, steps, {x: 128}, {t: at - 32}, (192,), 128, 1), problem)

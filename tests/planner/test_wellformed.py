"""Whatever is given to the planner instead of a well-formed problem, budget or interval: an error that says so."""

from __future__ import annotations

import math
import random
from contextlib import suppress
from dataclasses import fields, replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreplan.base.errors import DoesNotFitError, ForeplanError, PlanError, UsageError
from foreplan.planner import (
    Action,
    Overwrite,
    Part,
    Problem,
    Region,
    Role,
    Value,
    check_problem,
    place,
    plan,
    plan_curve,
)
from foreplan.planner.placement.problem import MOST
from foreplan.planner.verify.wellformed import LARGEST_ALIGNMENT
from tests.planner.problems import joined_problem, random_problem
from tests.planner.tiny import draw
from tests.profile import pick

GOOD = Problem(
    (
        Value("w", 64, role=Role.STORED),
        Value("x", 128, role=Role.INPUT),
        Value("a", 128),
        Value("b", 64),
        Value("t", 192, role=Role.OUTPUT),
        Value("w'", 64, role=Role.OUTPUT, home=0),
    ),
    (
        Action("f", (0, 1), (2,), (Overwrite(0, 1),), nanoseconds=5),
        Action("g", (2,), (3,), workspace=64),
        Action("join", (2, 3), (4,), parts=(Part(0, 0, 0), Part(0, 1, 128))),
        Action("update", (0, 3), (5,), (Overwrite(0, 0, True),), effect=True),
    ),
    (Region("arena"),),
)


def with_value(index: int, **changed: Any) -> Problem:
    values = list(GOOD.values)
    values[index] = replace(values[index], **changed)
    return replace(GOOD, values=tuple(values))


def with_action(index: int, **changed: Any) -> Problem:
    actions = list(GOOD.actions)
    actions[index] = replace(actions[index], **changed)
    return replace(GOOD, actions=tuple(actions))


WRONG = [
    (with_value(2, nbytes=-128), r"value 'a': -128 bytes aligned to 64"),
    (with_value(2, nbytes=128.0), r"value 'a': nbytes must be an int, got 128.0 \(float\)"),
    (with_value(2, nbytes=True), r"value 'a': nbytes must be an int, got True \(bool\)"),
    (with_value(2, nbytes=np.int64(128)), r"value 'a': nbytes must be an int, got .*128.* \(int64\)"),
    (with_value(2, nbytes="128"), r"value 'a': nbytes must be an int, got '128' \(str\)"),
    (with_value(1, nbytes=2**62), r"the bytes of values of a problem add up to 4.61e\+18"),
    (with_value(2, nbytes=10**400), r"value 'a': nbytes is a number of 1329 bits, but only 64 are allowed"),
    (with_action(1, reads=(10**5000,)), r"action 'g': reads must be a tuple of int, got numbers beyond 64 bits"),
    (with_value(2, alignment=0), r"value 'a': 128 bytes aligned to 0 \(a power of two"),
    (with_value(2, alignment=48), r"aligned to 48 \(a power of two"),
    (with_value(2, alignment=-64), r"aligned to -64 \(a power of two"),
    (with_value(2, alignment=2**40), r"value 'a': its alignment is .*, and the largest is 1073741824"),
    (with_value(2, region=1), r"value 'a': there is no region 1"),
    (with_value(2, region=-1), r"value 'a': there is no region -1"),
    (with_value(2, role=0), r"value 'a': its role must be a Role"),
    (with_value(2, category="activation"), r"value 'a': its role must be a Role and its category a Category"),
    (with_value(2, name=3), r"value 2: its name must be text, got 3"),
    (with_value(5, home=9), r"value \"w'\": its home must be a stored value"),
    (with_value(5, home=6), r"value \"w'\": its home must be a stored value"),
    (with_value(5, home=3), r"value \"w'\": its home must be a stored value"),
    (
        replace(with_value(5, region=1), regions=(Region("arena"), Region("more"))),
        r"value \"w'\": its home must be a stored value of its size and region",
    ),
    (with_value(5, home=-2), r"value \"w'\": its home must be a stored value"),
    (with_value(5, home=1), r"value \"w'\": its home must be a stored value"),
    (with_value(5, nbytes=32), r"value \"w'\": its home must be a stored value of its size"),
    (with_value(5, role=Role.TRANSIENT), r"value \"w'\": a value with a home must have the role OUTPUT"),
    (with_value(3, role=Role.OUTPUT, home=0), r"values 'b' and \"w'\" have the same home, 'w'"),
    (with_value(2, role=Role.INPUT), r"action 'f': writes 'a', which is there from the start"),
    (with_value(1, role=Role.OUTPUT), r"action 'f': reads 'x' before any action writes it"),
    (with_action(1, reads=(9,)), r"action 'g': reads \(9,\) or writes \(3,\) a value that is not there"),
    (with_action(1, reads=(-1,)), r"action 'g': reads \(-1,\) or writes"),
    (with_action(1, writes=(6,)), r"action 'g': reads \(2,\) or writes \(6,\) a value that is not there"),
    (with_action(1, reads=[2]), r"action 'g': reads must be a tuple of int, got \[2\]"),
    (with_action(1, reads=(np.int64(2),)), r"action 'g': reads must be a tuple of int"),
    (with_action(1, reads=(2, 2)), r"action 'g': reads or writes a value twice"),
    (with_action(1, writes=(3, 3)), r"action 'g': reads or writes a value twice"),
    (with_action(1, reads=(2, 3)), r"action 'g': reads and writes 'b'; a value has one content"),
    (with_action(0, reads=(0, 4)), r"action 'f': reads 't' before any action writes it"),
    (with_action(1, workspace=-1), r"action 'g': workspace is -1, and must not be negative"),
    (with_action(1, workspace=2**60), r"the workspace of a problem add up to 1.15e\+18"),
    (with_value(1, nbytes=MOST - 512), r"the bytes of values of a problem add up to"),  # with alignments
    (with_action(1, nanoseconds=2**62), r"the nanoseconds of a problem add up to"),
    (
        replace(GOOD, actions=tuple(replace(action, flops=MOST // 4 + 1) for action in GOOD.actions)),
        r"the flops of a problem add up to 7.21e\+16; at most 72057594037927936 are allowed",
    ),
    (with_action(1, nanoseconds=1.5), r"action 'g': nanoseconds must be an int, got 1.5"),
    (with_action(1, nanoseconds=math.nan), r"action 'g': nanoseconds must be an int, got nan"),
    (with_action(1, flops=-3), r"action 'g': flops is -3, and must not be negative"),
    (with_action(1, workspace_region=1), r"action 'g': there is no region 1"),
    (with_action(1, workspace_region=-1), r"action 'g': there is no region -1"),
    (with_action(1, effect=1), r"action 'g': effect and required must be True or False, got 1"),
    (with_action(0, overwrites=(Overwrite(0, 1, 1),)), r"action 'f': effect and required must be True or False"),  # type: ignore[arg-type]
    (with_action(0, overwrites=(Overwrite(False, 1),)), r"action 'f': the write of a pair must be an int, got False"),
    (with_action(0, overwrites=(Overwrite(0, 1.0),)), r"action 'f': the read of a pair must be an int, got 1.0"),  # type: ignore[arg-type]
    (with_action(0, overwrites=(Overwrite(0, 2),)), r"action 'f': an overwrite names a write or a read that"),
    (with_action(0, overwrites=(Overwrite(-1, 1),)), r"action 'f': an overwrite names a write or a read that"),
    (with_action(0, overwrites=(Overwrite(0, 0),)), r"action 'f': 'a' cannot take the bytes of 'w', which has fewer"),
    (
        with_action(0, overwrites=(Overwrite(0, 1), Overwrite(0, 1, True))),
        r"action 'f': an overwrite is listed twice",
    ),
    (with_action(0, overwrites=(Part(0, 1, 0),)), r"action 'f': overwrites must be a tuple of Overwrite"),
    (with_action(2, parts=(Part(0, 0, 0), Part(0, 1, 64))), r"action 'join': 'b' cannot lie in 't' from byte 64 on"),
    (with_action(2, parts=(Part(0, 0, -64),)), r"action 'join': 'a' cannot lie in 't' from byte -64 on"),
    (with_action(2, parts=(Part(0, 0, 128),)), r"action 'join': 'a' cannot lie in 't' from byte 128 on"),
    (with_action(2, parts=(Part(0, 5, 0),)), r"action 'join': a part names a write or a read that"),
    (with_action(2, parts=(Part(0, 0, None),)), r"action 'join': the offset of a part must be an int, got None"),
    (with_action(2, overwrites=(Overwrite(0, 0),)), r"cannot take the bytes"),
    (with_action(2, parts=(Part(0, 1, 0), Part(0, 1, 128))), r"a read is a part of two writes, or twice of one"),
    (
        with_action(1, reads=(2, 0), overwrites=(Overwrite(0, 0),), parts=(Part(0, 1, 0),)),
        r"action 'g': a write that takes other bytes, or is at home, cannot have parts",
    ),
    (with_action(3, overwrites=(), parts=(Part(0, 1, 0),)), r"action 'update': .* or is at home, cannot have parts"),
    (replace(GOOD, regions=(Region("arena", on_device=1),)), r"region 'arena': on_device must be True or False, got 1"),  # type: ignore[arg-type]
    (replace(GOOD, regions=()), r"a problem needs at least one region"),
    (replace(GOOD, regions=("arena",)), r"a problem's regions must be a tuple of Region"),
    (replace(GOOD, values=list(GOOD.values)), r"a problem's values must be a tuple of Value"),
    (replace(GOOD, actions=GOOD.actions[:2]), r"value 't' must be there at the end, and no action writes it"),
    (replace(GOOD, actions=GOOD.actions[::-1]), r"action 'update': reads 'b' before any action writes it"),
]


@pytest.mark.parametrize("at", range(len(WRONG)))
def test_what_is_wrong_is_said(at: int) -> None:
    problem, message = WRONG[at]
    for ask in (check_problem, plan, plan_curve):
        with pytest.raises(PlanError, match=message):
            ask(problem)


def test_the_good_one_is_good() -> None:
    check_problem(GOOD)
    plan(GOOD)
    for other in ("a problem", None, GOOD.values):
        with pytest.raises(UsageError, match="a Problem is needed"):
            plan(other)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "problem",
    [
        *(with_value(2, alignment=alignment) for alignment in (1, 2, LARGEST_ALIGNMENT)),
        with_value(1, nbytes=MOST - 512 - 6 * 64),
        with_action(0, overwrites=()),
        with_action(2, parts=(Part(0, 1, 0), Part(0, 0, 64))),
        replace(GOOD, actions=tuple(replace(action, flops=MOST // 4) for action in GOOD.actions)),
        with_action(1, nanoseconds=MOST - 5),
    ],
)
def test_what_is_just_allowed(problem: Problem) -> None:
    check_problem(problem)


def test_overwrites_that_wait_for_one_another_are_told_as_a_cycle() -> None:
    values = tuple(Value(name, 64, role=role) for name, role in (("x", 1), ("y", 1), ("a", 2), ("b", 2)))
    values = tuple(replace(v, role=Role(v.role)) for v in values)
    actions = (
        Action("first", (0, 1), (2,), (Overwrite(0, 0, True),)),
        Action("second", (0, 1), (3,), (Overwrite(0, 1, True),)),
    )
    with pytest.raises(PlanError, match="no order can run"):
        plan(Problem(values, actions))


ODD = st.one_of(
    st.integers(-3, 9),
    st.sampled_from([-(2**63), 2**31, 2**56, 2**62, 2**63, 2**64, 10**400, True, None, "1", 1.0, math.nan, math.inf]),
    st.sampled_from([np.int64(1), np.float32(2), (), (0,), [0], b"0", Role.OUTPUT, Overwrite(0, 0), Part(0, 0, 0)]),
)


@st.composite
def malformed(draw_from: st.DrawFn) -> Problem:
    """A good problem with one to three fields of anything in it replaced by something odd."""
    seed = draw_from(st.integers(0, 2**32))
    make = draw_from(
        st.sampled_from([lambda s: draw(random.Random(s)), lambda s: random_problem(s, 4), joined_problem])
    )
    problem = make(seed)
    for _ in range(draw_from(st.integers(1, 3))):
        where = draw_from(st.sampled_from(["values", "actions", "regions"]))
        items = getattr(problem, where)
        if not isinstance(items, tuple) or not items:
            continue
        at = draw_from(st.integers(0, len(items) - 1))
        field = draw_from(st.sampled_from([f.name for f in fields(type(items[at]))]))
        old = getattr(items[at], field)
        if isinstance(old, tuple) and old and draw_from(st.booleans()):
            k = draw_from(st.integers(0, len(old) - 1))
            inner = old[k]
            if isinstance(inner, Overwrite | Part):
                name = draw_from(st.sampled_from([f.name for f in fields(type(inner))]))
                inner = replace(inner, **{name: draw_from(ODD)})
            else:
                inner = draw_from(ODD)
            new = (*old[:k], inner, *old[k + draw_from(st.integers(0, 1)) :])
        else:
            new = draw_from(ODD)
        changed = (*items[:at], replace(items[at], **{field: new}), *items[at + 1 :])
        problem = replace(problem, **{where: changed})
    return problem


@settings(max_examples=pick(50, 100, 300), deadline=None)
@given(malformed(), st.sampled_from([None, 0.5, 1000, "1KiB"]))
def test_malformed_problems_are_refused_or_planned(problem: Problem, budget: Any) -> None:
    with suppress(ForeplanError):
        plan(problem, budget)


@pytest.mark.parametrize(
    "budget",
    [
        math.nan,
        math.inf,
        -math.inf,
        -1.0,
        0.0,
        -1,
        True,
        np.True_,
        [],
        b"1",
        1j,
        "",
        "x",
        "-1",
        "1.5.2GiB",
        object(),
        2**63,
        "9" * 400,
    ],
)
def test_wrong_budgets(budget: Any) -> None:
    with pytest.raises(UsageError, match=r"budget|size"):
        plan(GOOD, budget)


@pytest.mark.parametrize(
    "budget",
    [
        1e308,
        2**63 - 1,
        np.int64(4096),
        np.uint16(4096),
        np.float32(2.0),
        np.float64(1.0),
        4096,
        1.0,
        Fraction(3, 2),
        Fraction(10**400),
        "4KiB",
        None,
    ],
)
def test_budgets_that_allow_anything(budget: Any) -> None:
    found = plan(GOOD, budget)
    assert found.arena_bytes <= 4096
    assert found.budget is None or (type(found.budget) is int and 0 < found.budget <= 2**56)


def test_an_integer_with_more_digits_than_python_writes() -> None:
    with pytest.raises(UsageError, match="must not be negative"):
        plan(GOOD, -(10**5000))
    with pytest.raises(UsageError, match="at most 2"):
        plan(GOOD, 10**5000)


def test_small_budgets_do_not_fit() -> None:
    for budget in (0, np.int64(1), 1e-300, 5e-324, "1B"):
        with pytest.raises(DoesNotFitError):
            plan(GOOD, budget)


NUMBERS = st.one_of(ODD, st.integers(0, 5), st.lists(st.one_of(st.integers(-2, 9), ODD), max_size=4))


@settings(max_examples=pick(50, 100, 300), deadline=None)
@given(st.tuples(*[NUMBERS] * 5), st.one_of(st.none(), ODD), ODD)
def test_malformed_intervals_are_refused_or_placed(arrays: tuple[Any, ...], capacity: Any, work: Any) -> None:
    try:
        placed = place(*arrays, capacity=capacity, work=work)
    except ForeplanError:
        return
    assert placed.height >= placed.lower_bound >= 0


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (([0], [1], [-1]), "size -1 not negative"),
        (([0], [0], [1]), "must not be empty"),
        (([0, 1], [1], [1]), "arrays of lengths"),
        (([0], [1], [1.5]), "size must be a sequence of whole numbers"),
        (([0], [1], [True]), "size must be a sequence of whole numbers"),
        (([0], [1], ["1"]), "size must be a sequence of whole numbers"),
        ((None, [1], [1]), "lower must be a sequence of whole numbers"),
        (([0], [10**30], [1]), "upper must be a sequence of whole numbers"),
        (([0], [2**62], [1]), "upper must lie between"),
        (([0, 0], [1, 1], [2**56, 2**56]), "come to more than"),
        (([0], [1], [1], 3), "a power of two"),
        (([0], [1], [1], True), "alignment must be a sequence of whole numbers"),
        (([0, 0], [1, 1], [2, 2], 1, [0, 1]), "fixed to bytes that overlap"),
    ],
)
def test_what_is_wrong_with_intervals_is_said(arrays: tuple[Any, ...], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        place(*arrays)


def test_numpy_integers_are_fine_for_intervals() -> None:
    arrays = [np.array(a, np.int32) for a in ([0, 1], [2, 3], [64, 64])]
    assert place(*arrays, alignment=np.int64(64), capacity=np.int64(128)).height == 128

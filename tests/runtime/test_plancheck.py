"""What is checked of a program's calls, one right after the other: kernels that are not there, windows, overwrites."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

import foreplan as fp
from foreplan.base.errors import PlanError
from foreplan.graph import Op, Window, parse_graph
from foreplan.lower import Candidate, Operand, Program, lower
from foreplan.planner import Overwrite, Plan
from foreplan.runtime import plancheck
from foreplan.runtime.numpy.target import NumpyTarget
from foreplan.runtime.plancheck import check_program
from tests.runtime.test_session import compiled


def planned(text: str) -> tuple[Program, Plan]:
    program = lower(parse_graph("graph %g\n" + text))
    return program, fp.planner.plan(program)


def with_call(program: Program, index: int, **fields: Any) -> Program:
    call = replace(program.calls[index], **fields)
    return replace(program, calls=(*program.calls[:index], call, *program.calls[index + 1 :]))


@pytest.mark.parametrize(
    ("card", "used", "payload", "taken"),
    [(True, False, b"", True), (True, True, b"", False), (True, False, b"1", False), (False, False, b"", False)],
)
def test_a_kernel_may_be_gone_that_does_not_run_on_a_card(
    card: bool, used: bool, payload: bytes, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which kernels there are depends on the card and its libraries; what a step runs must be there."""

    class Elsewhere(NumpyTarget):
        name = "cuda:elsewhere" if card else "numpy:elsewhere"

        def kernel(
            self, op: Op, name: str, payload: bytes, inputs: Sequence[Window], outputs: Sequence[Window]
        ) -> Candidate | None:
            return None if op.name == "matmul" else super().kernel(op, name, b"", inputs, outputs)

    step = compiled()
    index = next(i for i, call in enumerate(step.program.calls) if call.op.name == "matmul")
    monkeypatch.setattr(plancheck, "target_named", lambda text: Elsewhere())
    program = with_call(replace(step.program, target=Elsewhere.name), index, payload=payload)
    absent = {i for i, call in enumerate(program.calls) if call.op.name == "matmul"} - ({index} if used else set())
    plan = replace(step.plan, steps=tuple(each for each in step.plan.steps if each.action not in absent))
    if taken:
        check_program(program, plan)
    else:
        with pytest.raises(PlanError, match="has no kernel 'reference' for matmul"):
            check_program(program, plan)


def test_what_does_not_run_has_the_workspace_of_its_kernel_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Card(NumpyTarget):
        name = "cuda:card"

    step = compiled()
    monkeypatch.setattr(plancheck, "target_named", lambda text: Card())
    index = next(i for i, action in enumerate(step.program.actions) if action.workspace)
    more = replace(step.program.actions[index], workspace=step.program.actions[index].workspace + 64)
    program = replace(
        step.program,
        target=Card.name,
        actions=(*step.program.actions[:index], more, *step.program.actions[index + 1 :]),
    )
    plan = replace(step.plan, steps=tuple(each for each in step.plan.steps if each.action != index))
    with pytest.raises(PlanError, match="bytes of workspace, and"):
        check_program(program, plan)


def test_two_elements_with_a_gap_are_not_read_as_two_without() -> None:
    program, plan = planned(
        """input %i: int64[4]
input %u: float32[2,3]
%s: int64[2] = slice(starts=(0,), shape=(2,), steps=(2,)) [%i] as %s
%y: float32[5,3] = scatter_add(shape=(5, 3), axis=0) [%s, %u] as %y
output %y = %y
"""
    )
    assert [call.node for call in program.calls] == ["y/dense/copy", "y"]
    check_program(program, plan)
    old, updates = program.calls[1].inputs
    with pytest.raises(PlanError, match=r"cannot read input 0 with the strides \(16,\)"):
        check_program(with_call(program, 1, inputs=(Operand(0, 0, old.type, (16,)), updates)), plan)


@pytest.mark.parametrize(
    ("shape", "read", "written", "taken"),
    [
        ((2, 3), (12, 4), (12, 4), True),
        ((2, 3), (4, 8), (4, 8), True),
        ((2, 3), (4, 8), (12, 4), False),
        ((2, 3), (12, 4), (4, 8), False),
        ((1, 3), (4, 4), (12, 4), True),  # the step along an axis of extent 1 means nothing
    ],
)
def test_what_is_overwritten_lies_as_what_is_written(
    shape: tuple[int, int], read: tuple[int, int], written: tuple[int, int], taken: bool
) -> None:
    type = f"float32[{shape[0]},{shape[1]}]"
    program, plan = planned(
        f"""input %x: {type}
%y: {type} = map(exprs=('exp(a0)',)) [%x] as %y
output %y = %y
"""
    )
    assert program.actions[0].overwrites
    (x,), (y,) = program.calls[0].inputs, program.calls[0].outputs
    changed = with_call(program, 0, inputs=(replace(x, strides=read),), outputs=(replace(y, strides=written),))
    if taken:
        check_program(changed, plan)
    else:
        with pytest.raises(PlanError, match="its kernel may not overwrite input 0 with output 0"):
            check_program(changed, plan)


@pytest.mark.parametrize(
    ("offset", "stride", "told"),
    [(1, 1, ""), (0, 2, ""), (2, -1, ""), (2, -2, ""), (2, 1, "2 to 4"), (0, -1, "-1 to 1"), (1, 2, "1 to 4")],
)
def test_a_window_of_bytes_lies_within_its_value(offset: int, stride: int, told: str) -> None:
    program, plan = planned(
        """input %x: uint8[3]
%s: uint8[2] = slice(starts=(1,), shape=(2,), steps=(1,)) [%x] as %s
%y: uint8[2] = map(exprs=('(a0 + 1)',)) [%s] as %y
output %y = %y
"""
    )
    (x,) = program.calls[0].inputs
    changed = with_call(program, 0, inputs=(replace(x, offset=offset, strides=(stride,)),))
    if not told:
        check_program(changed, plan)
    else:
        with pytest.raises(PlanError, match=f"reads bytes {told} of 'x', which has 3"):
            check_program(changed, plan)


@pytest.mark.parametrize(
    "line",
    [
        "%y: float32[2,2] = matmul() [%x, %x] as %y",
        "%s: float32[1,2] = slice(starts=(1, 0), shape=(1, 2), steps=(1, 1)) [%x] as %s\n"
        "%y: float32[1,2] = map(exprs=('exp(a0)',)) [%s] as %y",
    ],
    ids=["no right of the kernel", "a part"],
)
def test_a_right_to_overwrite_is_the_kernel_s_and_of_what_begins_with_its_value(line: str) -> None:
    program, plan = planned(f"input %x: float32[2,2]\n{line}\noutput %y = %y\n")
    check_program(program, plan)
    assert not program.actions[0].overwrites
    changed = replace(program, actions=(replace(program.actions[0], overwrites=(Overwrite(0, 0),)),))
    with pytest.raises(PlanError, match="its kernel may not overwrite input 0 with output 0"):
        check_program(changed, plan)

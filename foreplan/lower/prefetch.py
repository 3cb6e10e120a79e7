"""Prefetching: a second slot for every input, into which the next batch is copied while a step runs."""

from __future__ import annotations

from dataclasses import replace

from foreplan.lower.program import STATE, Operand, Program
from foreplan.planner.problem import Category, Role, Value


def with_prefetch(program: Program, body: Program | None = None) -> Program:
    """The program with a second slot for each input that has no default. The program neither reads nor writes the slot,
    so its bytes are kept from step to step; the engine copies them to the input's place.

    Args:
        program: from `lower`.
        body: the first half of a step whose second half the program is: the slots are then those of its inputs.
    """
    owner = program if body is None else body
    values, ahead = list(program.values), []
    for slot in owner.required_inputs:
        type, value = slot.operand.type, owner.values[slot.operand.value]
        ahead.append(replace(slot, operand=Operand(len(values), 0, type, type.strides), valid=None))
        values.append(Value(f"{value.name}/ahead", type.nbytes, value.alignment, STATE, Category.INPUTS, Role.STORED))
    return replace(program, values=tuple(values), ahead=tuple(ahead))

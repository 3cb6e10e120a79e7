"""The valid range of an integer input: the values that every op that selects by it can take."""

from __future__ import annotations

from dataclasses import replace

from foreplan.lower.program import Program, Slot
from foreplan.ops.valid import common, moves_alone


def with_valid(program: Program) -> Program:
    """The program with the valid range of each of its inputs, which follows from the calls alone."""
    return replace(program, inputs=tuple(replace(slot, valid=_range(program, slot)) for slot in program.inputs))


def _range(program: Program, slot: Slot) -> tuple[int, ...] | None:
    """The values that every op which selects by this input, perhaps by copies or parts of it, can take."""
    if slot.operand.type.dtype.is_float:
        return None
    ranges: list[tuple[int, ...]] = []
    values = [slot.operand.value]
    for value in values:  # which grows
        for index in program.readers[value]:
            call = program.calls[index]
            if moves_alone(call.op):
                values += (y.value for y in call.outputs if y.value not in values)
            types = [operand.type for operand in call.inputs]
            reads = (i for i, x in enumerate(call.inputs) if x.value == value and x.holds is None)
            found = (call.op.valid_range(i, types) for i in reads)
            ranges += [each for each in found if each is not None]
    return common(ranges)

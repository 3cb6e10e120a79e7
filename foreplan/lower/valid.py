"""The valid range of an integer input: the values that every op that selects by it can take."""

from __future__ import annotations

from dataclasses import replace

from foreplan.lower.offload import COPY
from foreplan.lower.program import Program, Slot


def with_valid(program: Program) -> Program:
    """The program with the valid range of each of its inputs, which follows from the calls alone."""
    return replace(program, inputs=tuple(replace(slot, valid=_range(program, slot)) for slot in program.inputs))


def _range(program: Program, slot: Slot) -> tuple[int, ...] | None:
    """The values that every op which selects by this input, perhaps by a copy of it, can take."""
    if slot.operand.type.dtype.is_float:
        return None
    ranges: list[tuple[int, ...]] = []
    values = [slot.operand.value]
    for value in values:  # which grows
        for index in program.readers[value]:
            call = program.calls[index]
            if call.op == COPY and call.outputs[0].value not in values:
                values.append(call.outputs[0].value)
            types = [operand.type for operand in call.inputs]
            reads = (i for i, x in enumerate(call.inputs) if x.value == value and x.holds is None)
            found = (call.op.valid_range(i, types) for i in reads)
            ranges += [each for each in found if each is not None]
    if not ranges:
        return None
    low, high = max(low for low, *_ in ranges), min(high for _, high, *_ in ranges)
    others = {other for _, _, *others in ranges for other in others if not low <= other <= high}
    taken = (other for other in others if all(r[0] <= other <= r[1] or other in r[2:] for r in ranges))
    return (low, high, *sorted(taken))

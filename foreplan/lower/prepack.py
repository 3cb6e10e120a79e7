"""Stored values that no step changes, laid out once as their kernels like to read them: "prepacked"."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from foreplan.base.units import format_bytes
from foreplan.graph import Window
from foreplan.graph.blocks import Blocks
from foreplan.lower.program import Call, Program
from foreplan.lower.target import Target


def best_blocks(program: Program, target: Target, names: Collection[str] | None = None) -> dict[str, Blocks]:
    """By name, the blocks in which all readers of a stored value together take the least time; without those that are
    read no faster so.

    Args:
        program: with all values in C order.
        names: of stored values; None: of all.
    """
    changed = {value.home for value in program.values}
    found: dict[str, Blocks] = {}
    for slot in (slot for slot in program.stored if names is None or slot.name in names):
        index = slot.operand.value
        nodes = _nodes(program, index)
        calls = [program.calls[actions[0]] for actions in nodes]
        places = [[i for i, x in enumerate(call.inputs) if x.value == index] for call in calls]
        alone = all(len(at) == 1 and call.inputs[at[0]] == slot.operand for at, call in zip(places, calls))
        if index in changed or not calls or not alone:
            continue
        now = sum(min(program.actions[i].nanoseconds for i in actions) for actions in nodes)
        times = {
            blocks: _time(target, calls, [at[0] for at in places], blocks)
            for call, at in zip(calls, places)
            for blocks in target.blocks(call.op, at[0], *_windows(call))
        }
        best = min(times, key=lambda blocks: times[blocks], default=None)
        if best is not None and times[best] < now:
            found[slot.name] = best
    return found


def prepack_note(program: Program, blocks: Mapping[str, Blocks]) -> str:
    """What was done, for people."""
    if not blocks:
        return f"prepack: no kernel of the target {program.target} would read a weight faster in blocks"
    slots = [slot for slot in program.stored if slot.name in blocks]
    total = sum(slot.operand.nbytes for slot in slots)
    more = total - sum(slot.operand.type.nbytes for slot in slots)
    return (
        f"prepack: {len(slots)} weights lie in the blocks that their kernels read, {format_bytes(total)}, "
        f"{format_bytes(more)} of it to fill up blocks; a session that trains cannot share them"
    )


def _nodes(program: Program, value: int) -> Sequence[Sequence[int]]:
    """The actions that read a value, by the node that each is a kernel for."""
    found: dict[tuple[int, ...], list[int]] = {}
    for index in program.readers[value]:
        found.setdefault(program.actions[index].writes, []).append(index)
    return list(found.values())


def _time(target: Target, calls: Sequence[Call], places: Sequence[int], blocks: Blocks) -> float:
    """Nanoseconds of all readers, by their fastest kernels; infinite if one has no kernel for these blocks."""
    total = 0.0
    for call, at in zip(calls, places):
        inputs, outputs = _windows(call)
        given = [replace(x, blocks=blocks) if i == at else x for i, x in enumerate(inputs)]
        kernels = target.kernels(call.op, given, outputs)
        total += min((target.price(call.op, kernel, given, outputs) for kernel in kernels), default=math.inf)
    return total


def _windows(call: Call) -> tuple[Sequence[Window], Sequence[Window]]:
    return [x.window for x in call.inputs], [y.window for y in call.outputs]

"""The body of a loop as a program of its own, whose steps follow one another in the same memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

from foreplan.graph import Fill, Graph, Kind, Value
from foreplan.lower.lower import lower, lower_in_blocks
from foreplan.lower.prepack import best_blocks
from foreplan.lower.program import Operand, Program
from foreplan.lower.target import Target
from foreplan.ops.loop import Loop
from foreplan.passes.fuse_attention import fuse_attention
from foreplan.passes.join_maps import join_maps
from foreplan.passes.pipeline import PLAIN, SIMPLIFY
from foreplan.passes.tile.concats import split_concats


@dataclass(frozen=True)
class Body:
    """A loop's body on a target.

    Attributes:
        program: stored values are what the loop reads and the carries, which are updated in place; outputs are what
            each step adds to the stacks. What every step reads may lie in blocks: it is copied so before the first.
        place: by value that is stored, or written over one, the number of the loop's input.
        stacks: for each stack that the loop gives, what a step adds to it.
    """

    program: Program
    place: dict[int, int]
    stacks: tuple[Operand, ...]


def lower_body(loop: Loop, target: Target) -> Body:
    """The body of a loop, simplified, and lowered for a target.

    Raises:
        UnsupportedError: the target has no kernel for an op of it, and the op no decomposition.
    """
    step = _as_step(loop)
    for each in (*PLAIN, fuse_attention, split_concats, *SIMPLIFY, join_maps):
        step = each(step)
    program = lower(step, target)
    fixed = {value.name for value in loop.graph.inputs[loop.carries + loop.slices :]}
    if loop.steps > 1 and (blocks := best_blocks(program, target, fixed)):
        program = lower_in_blocks(step, target, blocks)
    number = {value.name: i for i, value in enumerate(loop.graph.inputs)}
    place = {slot.operand.value: number[slot.name] for slot in program.stored if slot.name in number}
    place |= {i: place[value.home] for i, value in enumerate(program.values) if value.home in place}
    return Body(program, place, tuple(slot.operand for slot in program.outputs))


def _as_step(loop: Loop) -> Graph:
    """The body as a step that keeps its carries: inputs become stored values, next carries become updates."""
    body = loop.graph
    kinds = [Kind.STATE] * loop.carries + [Kind.FROZEN] * (len(body.inputs) - loop.carries)
    now = {value: Value(value.name, value.type, kind, Fill(0.0)) for value, kind in zip(body.inputs, kinds)}

    def new(value: Value) -> Value:
        return now.get(value, value)

    return replace(
        body,
        inputs=(),
        stored=tuple(now.values()),
        nodes=tuple(replace(node, inputs=tuple(map(new, node.inputs))) for node in body.nodes),
        outputs={f"stack{i}": new(value) for i, value in enumerate(loop.results[loop.carries :])},
        updates={now[old]: new(after) for old, after in zip(body.inputs, loop.results[: loop.carries])},
    )

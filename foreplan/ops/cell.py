"""Loops made of the nodes of one step: what never changes stands before the loop, all else becomes its body."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from foreplan.base.errors import UnsupportedError
from foreplan.graph import Builder, Fill, GraphBuilder, Kind, Node, Value
from foreplan.ops.loop import MOST_RUNS, Loop
from foreplan.ops.marks import Gradient
from foreplan.ops.random import Dropout
from foreplan.ops.unstack import MOST_STEPS

# Ops that a loop cannot hold: those that draw anew in each step, and gradients, which stay to be expanded.
WRITTEN_OUT = (Dropout, Gradient)


@dataclass(frozen=True)
class Cell:
    """One step, as it was traced.

    Attributes:
        nodes: in order.
        carries, slices: what stands in the nodes for the carries and for the slices of a step.
        after: the next carries.
        outputs: what the step gives beside them.
    """

    nodes: Sequence[Node]
    carries: Sequence[Value]
    slices: Sequence[Value]
    after: Sequence[Value]
    outputs: Sequence[Value]


def placeholders(carried: Sequence[Value], stacks: Sequence[Value]) -> tuple[list[Value], list[Value]]:
    """What stands for carries, and for slices of stacks [steps, …], while a step is traced."""
    carries = [Value(f"carry{i}", value.type, Kind.ACTIVATION) for i, value in enumerate(carried)]
    slices = [Value(f"x{i}", x.type.with_shape(x.shape[1:]), Kind.ACTIVATION) for i, x in enumerate(stacks)]
    return carries, slices


def repeated(
    b: Builder,
    step: Callable[[list[Value], list[Value]], tuple[Sequence[Value], Sequence[Value]]],
    carried: Sequence[Value],
    stacks: Sequence[Value],
    reverse: bool,
) -> tuple[list[Value], list[Value]]:
    """The last carries, and the outputs of all steps, stacked, of a function that adds the nodes of one step.

    Args:
        step: from carries and slices to next carries and outputs.
        carried: the first carries.
        stacks: [steps, …] each, at least one.
        reverse: whether the last slices come first.
    """
    carries, slices = placeholders(carried, stacks)
    with b.recorded() as nodes:
        after, outputs = step(carries, slices)
    return looped(b, Cell(nodes, carries, slices, after, outputs), carried, stacks, reverse)


def looped(
    b: Builder, cell: Cell, carried: Sequence[Value], stacks: Sequence[Value], reverse: bool, length: int = 0
) -> tuple[list[Value], list[Value]]:
    """The last carries and the stacked outputs of a loop: see `repeated`.

    Args:
        length: the number of steps where there are no stacks.

    Raises:
        UnsupportedError: it has too many steps for the size of its body.
    """
    steps = stacks[0].shape[0] if stacks else length
    if not steps:
        return list(carried), [_nothing(b, value) for value in cell.outputs]
    nodes = _hoist(b, cell)
    if steps > MOST_STEPS or steps * len(nodes) > MOST_RUNS:
        raise UnsupportedError(
            f"a loop of {steps:,} steps of {len(nodes)} nodes is too long: {MOST_STEPS:,} steps, and {MOST_RUNS:,} "
            "nodes in all of them, are the most; use fewer steps"
        )
    made = {*cell.carries, *cell.slices, *(value for node in nodes for value in node.outputs)}
    read = [*(value for node in nodes for value in node.inputs), *cell.after, *cell.outputs]
    fixed = [value for value in dict.fromkeys(read) if value not in made]
    body = GraphBuilder("body")
    # Names say nothing of where the loop stands: so loops that do the same have one text, which is parsed once.
    names = [*(value.name for value in (*cell.carries, *cell.slices)), *(f"c{i}" for i in range(len(fixed)))]
    inputs = (*cell.carries, *cell.slices, *fixed)
    at = {value: body.input(name, value.type) for name, value in zip(names, inputs)}
    for node in nodes:
        name, body.kind = node.name.rpartition("/")[2], node.outputs[0].kind
        at.update(zip(node.outputs, body.node(node.op, *(at[value] for value in node.inputs), name=name)))
    outputs = {f"carry{i}": at[value] for i, value in enumerate(cell.after)}
    outputs |= {f"y{i}": at[value] for i, value in enumerate(cell.outputs)}
    op = Loop(body.finish(outputs).as_text(), steps, len(cell.carries), len(stacks), reverse)
    read = [*carried, *stacks, *fixed]
    written_out = any(isinstance(node.op, WRITTEN_OUT) for node in nodes)
    results = list(op.decompose(b, read) if written_out else b.node(op, *read, name="scan"))
    return results[: len(cell.carries)], results[len(cell.carries) :]


def _nothing(b: Builder, like: Value) -> Value:
    """The outputs of no steps."""
    return b.store("nothing", like.type.with_shape((0, *like.shape)), Kind.CONSTANT, Fill(0.0))


def _hoist(b: Builder, cell: Cell) -> list[Node]:
    """Add the nodes that are the same in each step, and return the others."""
    changing, inner = {*cell.carries, *cell.slices}, []
    for node in cell.nodes:
        if changing.isdisjoint(node.inputs):
            b.nodes.append(node)
        else:
            changing.update(node.outputs)
            inner.append(node)
    return inner

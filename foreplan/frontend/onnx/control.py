"""Control flow: branches, and loops of known length, written out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from foreplan.frontend.onnx.branches import State, both, kept, select, truth
from foreplan.frontend.onnx.node import OnnxNode, Operand
from foreplan.frontend.onnx.sequences import Given, Tensors
from foreplan.frontend.onnx.tensors import Constant, from_array
from foreplan.graph import Value
from foreplan.ops.join import concat
from foreplan.ops.shape import reshape, slice_axis

if TYPE_CHECKING:
    import onnx


_MOST_TURNS = 256  # of a loop that data end


class Walk(Protocol):
    """Adds the nodes of a body, which can also read the tensors around its node."""

    def __call__(self, body: str, prefix: str, given: Sequence[State], taken: Value | None = None) -> list[State]:
        """The body's outputs.

        Args:
            body: the attribute of the node that has it.
            prefix: of the names in it.
            given: its inputs.
            taken: whether it is taken, where that depends on data.
        """


def body_of(n: OnnxNode, name: str) -> onnx.GraphProto:
    """The graph in an attribute.

    Raises:
        ModelError: it is missing.
    """
    for attribute in n.proto.attribute:
        if attribute.name == name and attribute.HasField("g"):
            return attribute.g
    raise n.fail(f"the graph attribute {name!r} is missing")


def _gives(n: OnnxNode, body: onnx.GraphProto, least: int) -> None:
    """Refuse a body with fewer than `least` outputs."""
    if len(body.output) < least:
        raise n.fail(f"its body {body.name!r} must have {least} outputs or more, and has {len(body.output)}")


def _for_each(n: OnnxNode, name: str, count: int) -> list[int]:
    """An attribute with a number for each scanned tensor, 0 by default."""
    found: list[int] = n.integers(name, [0] * count)
    if len(found) != count:
        raise n.fail(f"{name} must have {count} numbers, one for each scanned tensor, and has {len(found)}")
    return found


def _tensor(n: OnnxNode, operand: State, what: str) -> Operand:
    """What must be no sequence."""
    if isinstance(operand, Tensors):
        raise n.fail(f"{what} must be a tensor, and is a sequence")
    return operand


def _first_state(n: OnnxNode, given: Sequence[Given], start: int, stop: int) -> list[State]:
    """What the node hands from step to step, sequences among it."""
    state: list[State] = []
    for i in range(start, stop):
        each = given[i] if i < len(given) else None
        state.append(each if isinstance(each, Tensors) else n.operand(i))
    return state


def _known_number(n: OnnxNode, operand: State, what: str) -> int:
    """A number or a flag that decides which nodes run."""
    operand = _tensor(n, operand, what)
    if not isinstance(operand, Constant) or operand.array is None:
        raise n.needs_value(operand, what)
    if operand.array.size != 1:
        raise n.misshapen(f"{what} must be one number, and has the shape {list(operand.shape)}")
    return int(operand.array.reshape(-1)[0])


def translate_if(n: OnnxNode, given: Sequence[Given], name: str, walk: Walk) -> list[Given]:
    """The branch that a known condition chooses; of one that is computed from data both, and a selection."""
    condition = n.operand(0)
    if isinstance(condition, Constant) and condition.is_foldable:
        branch = "then_branch" if _known_number(n, condition, "its condition") else "else_branch"
        return list(walk(branch, f"{name}/", ()))
    return list(select(n, name, lambda body, prefix, taken: walk(body, prefix, (), taken)))


def translate_loop(n: OnnxNode, given: Sequence[Given], name: str, walk: Walk) -> list[Given]:
    """A loop of a known number of steps, written out; so a sequence that it carries is a list of known length.

    Where data end it, all steps that it may have are computed, and those behind the end change nothing.
    """
    body = body_of(n, "body")
    if not n.has(0) and not n.has(1):
        raise n.unsupported(
            "it has neither a number of steps nor a condition, so it would never end; export it with one"
        )
    most = None
    if n.has(0):
        most = _known_number(n, n.operand(0), "its number of steps")
    for each, what in zip(given[:2], ("its number of steps", "its condition")):
        if each is not None:
            _tensor(n, each, what)
    state = _first_state(n, given, 2, len(n.proto.input))
    _gives(n, body, 1 + len(state))
    rows: list[list[Operand]] = [[] for _ in body.output[1 + len(state) :]]
    may_be_data = most is not None and most <= _MOST_TURNS and not rows
    going = _flag(n, n.operand(1), "its condition", may_be_data) if n.has(1) else True
    step = 0
    while going is not False and (most is None or step < most):
        prefix = f"{name}/{step}/"
        count = from_array(f"{prefix}i", np.array(step, np.int64))
        taken = None if going is True else both(n.b, going, n.taken)
        results = walk("body", prefix, [count, from_array(f"{prefix}cond", np.array(True)), *state], taken)
        new = results[1 : 1 + len(state)]
        state = new if going is True else [kept(n, going, *pair) for pair in zip(new, state)]
        further = _flag(n, results[0], "the condition that its body gives", may_be_data)
        if going is True or further is False:
            going = further
        elif further is not True:
            going = both(n.b, going, further)
        for row, result in zip(rows, results[1 + len(state) :]):
            row.append(_tensor(n, result, "what its body gives for each step"))
        step += 1
    if rows and not step:
        raise n.unsupported(
            "it runs no step, so the shapes of its scan outputs are not known; export the model without it"
        )
    return [*state, *(_stack(n, row, 0) for row in rows)]


def _flag(n: OnnxNode, operand: State, what: str, may_be_data: bool) -> bool | Value:
    """A condition for one more step: a truth value that is known, or one of data, of which a note then tells."""
    operand = _tensor(n, operand, what)
    if not may_be_data or (isinstance(operand, Constant) and operand.is_foldable):
        return bool(_known_number(n, operand, what))
    note = (
        f"{n.source}: data end it, so all the steps that it may have are computed, and those behind the end are dropped"
    )
    if note not in n.b.notes:
        n.b.note(note)
    return truth(n, operand, what)


def _stack(n: OnnxNode, row: Sequence[Operand], axis: int) -> Operand:
    """One result a step, along a new axis."""
    parts = []
    for operand in row:
        value = n.as_value(operand)
        at = axis + len(value.shape) + 1 if axis < 0 else axis
        parts.append(reshape(n.b, value, (*value.shape[:at], 1, *value.shape[at:])))
    rank = len(parts[0].shape)
    return concat(n.b, parts, axis + rank if axis < 0 else axis)


def translate_scan(n: OnnxNode, given: Sequence[Given], name: str, walk: Walk) -> list[Given]:
    """A scan over axes of known extent, written out."""
    if n.opset < 9:
        raise n.unsupported("the Scan of opset 8 has a batch axis of its own; export the model for opset 9 or later")
    body, count = body_of(n, "body"), n.integer("num_scan_inputs")
    if not 0 < count <= len(n.inputs):
        raise n.fail(f"num_scan_inputs must be from 1 to {len(n.inputs)}, the number of its inputs, and is {count}")
    held = len(n.inputs) - count
    _gives(n, body, held)
    state = _first_state(n, given, 0, held)
    scanned = [n.value(i) for i in range(held, len(n.inputs))]
    axes = [n.axis(a, len(x.shape)) for a, x in zip(_for_each(n, "scan_input_axes", count), scanned)]
    backward = _for_each(n, "scan_input_directions", count)
    lengths = {x.shape[axis] for x, axis in zip(scanned, axes)}
    if len(lengths) != 1 or 0 in lengths:
        raise n.unsupported(f"it scans axes of {sorted(lengths)} elements; all must have the same number, at least 1")
    (length,) = lengths
    rows: list[list[Operand]] = [[] for _ in body.output[held:]]
    for step in range(length):
        rest: list[State] = []
        for x, axis, reverse in zip(scanned, axes, backward):
            one = slice_axis(n.b, x, axis, length - 1 - step if reverse else step, 1)
            rest.append(reshape(n.b, one, (*x.shape[:axis], *x.shape[axis + 1 :])))
        results = walk("body", f"{name}/{step}/", [*state, *rest])
        state = results[:held]
        for row, result in zip(rows, results[held:]):
            row.append(_tensor(n, result, "what its body gives for each step"))
    rows = [row[::-1] if d else row for row, d in zip(rows, _for_each(n, "scan_output_directions", len(rows)))]
    places = _for_each(n, "scan_output_axes", len(rows))
    return [*state, *(_stack(n, row, axis) for row, axis in zip(rows, places))]


CONTROL_FLOW: dict[str, Callable[[OnnxNode, Sequence[Given], str, Walk], list[Given]]] = {
    "If": translate_if,
    "Loop": translate_loop,
    "Scan": translate_scan,
}

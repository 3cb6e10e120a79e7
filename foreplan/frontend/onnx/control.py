"""Control flow that is known at import: branches on known conditions, loops of known length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from foreplan.frontend.onnx.node import OnnxNode, Operand
from foreplan.frontend.onnx.tensors import Constant, from_array
from foreplan.ops.join import concat
from foreplan.ops.shape import reshape, slice_axis

if TYPE_CHECKING:
    import onnx

# (body, prefix of the names in it, its inputs) → its outputs. A body can also read the tensors around its node.
Walk = Callable[["onnx.GraphProto", str, Sequence[Operand]], list[Operand]]


def _graph(n: OnnxNode, name: str) -> onnx.GraphProto:
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


def _known_number(n: OnnxNode, operand: Operand, what: str) -> int:
    """A number or a flag that decides which nodes run."""
    if not isinstance(operand, Constant) or operand.array is None:
        raise n.needs_value(operand, what)
    if operand.array.size != 1:
        raise n.misshapen(f"{what} must be one number, and has the shape {list(operand.shape)}")
    return int(operand.array.reshape(-1)[0])


def translate_if(n: OnnxNode, name: str, walk: Walk) -> list[Operand | None]:
    """The branch that a known condition chooses."""
    branch = "then_branch" if _known_number(n, n.operand(0), "its condition") else "else_branch"
    return list(walk(_graph(n, branch), f"{name}/", ()))


def translate_loop(n: OnnxNode, name: str, walk: Walk) -> list[Operand | None]:
    """A loop of a known number of steps, written out."""
    body = _graph(n, "body")
    if not n.has(0) and not n.has(1):
        raise n.unsupported(
            "it has neither a number of steps nor a condition, so it would never end; export it with one"
        )
    most = None
    if n.has(0):
        most = _known_number(n, n.operand(0), "its number of steps")
    going = not n.has(1) or bool(_known_number(n, n.operand(1), "its condition"))
    state = [n.operand(i) for i in range(2, len(n.inputs))]
    _gives(n, body, 1 + len(state))
    rows: list[list[Operand]] = [[] for _ in body.output[1 + len(state) :]]
    step = 0
    while going and (most is None or step < most):
        prefix = f"{name}/{step}/"
        given = [
            from_array(f"{prefix}i", np.array(step, np.int64)),
            from_array(f"{prefix}cond", np.array(True)),
            *state,
        ]
        results = walk(body, prefix, given)
        going = bool(_known_number(n, results[0], "the condition that its body gives"))
        state = results[1 : 1 + len(state)]
        for row, result in zip(rows, results[1 + len(state) :]):
            row.append(result)
        step += 1
    if rows and not step:
        raise n.unsupported(
            "it runs no step, so the shapes of its scan outputs are not known; export the model without it"
        )
    return [*state, *(_stack(n, row, 0) for row in rows)]


def _stack(n: OnnxNode, row: Sequence[Operand], axis: int) -> Operand:
    """One result a step, along a new axis."""
    parts = []
    for operand in row:
        value = n.as_value(operand)
        at = axis + len(value.shape) + 1 if axis < 0 else axis
        parts.append(reshape(n.b, value, (*value.shape[:at], 1, *value.shape[at:])))
    rank = len(parts[0].shape)
    return concat(n.b, parts, axis + rank if axis < 0 else axis)


def translate_scan(n: OnnxNode, name: str, walk: Walk) -> list[Operand | None]:
    """A scan over axes of known extent, written out."""
    if n.opset < 9:
        raise n.unsupported("the Scan of opset 8 has a batch axis of its own; export the model for opset 9 or later")
    body, count = _graph(n, "body"), n.integer("num_scan_inputs")
    if not 0 < count <= len(n.inputs):
        raise n.fail(f"num_scan_inputs must be from 1 to {len(n.inputs)}, the number of its inputs, and is {count}")
    held = len(n.inputs) - count
    _gives(n, body, held)
    state = [n.operand(i) for i in range(held)]
    scanned = [n.value(i) for i in range(held, len(n.inputs))]
    axes = [n.axis(a, len(x.shape)) for a, x in zip(_for_each(n, "scan_input_axes", count), scanned)]
    backward = _for_each(n, "scan_input_directions", count)
    lengths = {x.shape[axis] for x, axis in zip(scanned, axes)}
    if len(lengths) != 1 or 0 in lengths:
        raise n.unsupported(f"it scans axes of {sorted(lengths)} elements; all must have the same number, at least 1")
    (length,) = lengths
    rows: list[list[Operand]] = [[] for _ in body.output[held:]]
    for step in range(length):
        given = list(state)
        for x, axis, reverse in zip(scanned, axes, backward):
            one = slice_axis(n.b, x, axis, length - 1 - step if reverse else step, 1)
            given.append(reshape(n.b, one, (*x.shape[:axis], *x.shape[axis + 1 :])))
        results = walk(body, f"{name}/{step}/", given)
        state = results[:held]
        for row, result in zip(rows, results[held:]):
            row.append(result)
    rows = [row[::-1] if d else row for row, d in zip(rows, _for_each(n, "scan_output_directions", len(rows)))]
    places = _for_each(n, "scan_output_axes", len(rows))
    return [*state, *(_stack(n, row, axis) for row, axis in zip(rows, places))]


CONTROL_FLOW: dict[str, Callable[[OnnxNode, str, Walk], list[Operand | None]]] = {
    "If": translate_if,
    "Loop": translate_loop,
    "Scan": translate_scan,
}

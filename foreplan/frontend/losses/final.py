"""The function that ends a model, where a loss does its work."""

from __future__ import annotations

import math
from collections.abc import Collection

from foreplan.frontend.tracing.tensor import Tensor, wrap
from foreplan.frontend.tracing.tracer import current
from foreplan.graph import Node
from foreplan.graph.types import Shape


def before_softmax(logits: Tensor, axis: int, loss: str, kinds: Collection[str] = ("softmax", "log_softmax")) -> Tensor:
    """The input of a final softmax or log-softmax along the classes; the logits themselves if there is none.

    A reshape may follow the softmax, if the classes remain an axis: older opsets write a softmax so.

    Args:
        logits: a model's output.
        axis: of the classes.
        loss: its name, for the note that says so.
        kinds: the ops that count.
    """
    node, classes = _producer(logits), axis
    while node is not None and node.op.name == "reshape" and classes >= 0:
        classes = _same_axis(logits.shape, axis, node.inputs[0].shape)
        node = _producer(wrap(node.inputs[0]))
    if node is None or node.op.name not in kinds or getattr(node.op, "axis", None) != classes:
        return logits
    before = _taken_in(node, node.op.name, loss)
    return before if before.shape == logits.shape else before.reshape(logits.shape)


def before_sigmoid(logits: Tensor, loss: str) -> Tensor:
    """The input of the model's final sigmoid; the logits themselves if there is none."""
    node = _producer(logits)
    if node is None or getattr(node.op, "exprs", None) != ("sigmoid(a0)",):
        return logits
    return _taken_in(node, "sigmoid", loss)


def _producer(x: Tensor) -> Node | None:
    for node in reversed(current().at().nodes):
        if x.value in node.outputs:
            return node
    return None


def _taken_in(node: Node, kind: str, loss: str) -> Tensor:
    """The input of the model's last node, with a note that the loss does that node's work."""
    current().at().note(
        f"the model's {kind} {node.name!r} is taken into the loss {loss}, which reads its input "
        f"{node.inputs[0].name!r}; the model's output stays as it is"
    )
    return wrap(node.inputs[0])


def _same_axis(shape: Shape, axis: int, other: Shape) -> int:
    """The axis of `other` that is the axis `axis` of `shape`, if one is a reshape of the other; -1: there is none."""
    outer = math.prod(shape[:axis])
    found = (i for i, extent in enumerate(other) if extent == shape[axis] and math.prod(other[:i]) == outer)
    return next(found, -1)

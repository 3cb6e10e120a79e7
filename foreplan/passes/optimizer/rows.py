"""Gradients of tables as rows: what backward adds up at the places that a step has read."""

from __future__ import annotations

from dataclasses import dataclass

from foreplan.graph import Builder, Node, Value
from foreplan.ops.expr import Arg, cast
from foreplan.ops.index import ScatterAdd
from foreplan.ops.map import Map


@dataclass(frozen=True)
class Rows:
    """Part of a table's gradient: zero but for some rows. Rows of the same index add up.

    Attributes:
        indices: which rows; integers of any shape.
        values: a row an index: the indices' shape, then that of a row.
    """

    indices: Value
    values: Value


def rows_of(b: Builder, gradient: Value) -> tuple[Rows, ...]:
    """The rows that a gradient is the sum of, the latest first; none if it is anything else, or if it has fewer
    elements than they have.
    """
    found, pending = list[Rows](), [gradient]
    while pending:
        node = _producer(b, pending.pop())
        if node is None:
            return ()
        if isinstance(node.op, ScatterAdd) and node.op.axis == 0 and len(node.inputs) == 2:
            found.append(Rows(*node.inputs))
        elif _passes_rows(node):
            pending += node.inputs
        else:
            return ()
    return tuple(found) if sum(rows.values.type.size for rows in found) <= gradient.type.size else ()


def _passes_rows(node: Node) -> bool:
    """Whether a node adds two tensors of one type, or converts a tensor to another type."""
    if not isinstance(node.op, Map) or len(node.outputs) != 1:
        return False
    (output,), (expr, *_) = node.outputs, node.op.parsed
    adds = expr == Arg(0) + Arg(1) and all(value.type == output.type for value in node.inputs)
    return adds or expr == cast(Arg(0), output.dtype)


def _producer(b: Builder, value: Value) -> Node | None:
    """What computes a gradient, which is most often among the last nodes."""
    return next((node for node in reversed(b.nodes) if value in node.outputs), None)

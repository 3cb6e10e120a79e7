"""Gradients of tables as rows: what backward adds up at the places that a step has read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foreplan.graph import Builder, Node, Value
from foreplan.graph.types import INT64
from foreplan.ops.expr import Arg, cast
from foreplan.ops.first_equal import FirstEqual
from foreplan.ops.index import ScatterAdd
from foreplan.ops.join import concat
from foreplan.ops.map import Map, convert
from foreplan.ops.shape import reshape


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
    """The rows that a gradient is the sum of, the latest first; none if it is anything else."""
    found, pending = list[Rows](), [gradient]
    while pending:
        node = _producer(b, pending.pop())
        if node is None:
            return ()
        added = node.of(ScatterAdd)
        if added and added.op.axis == 0 and len(node.inputs) == 2:
            found.append(Rows(*node.inputs))
        elif _passes_rows(node):
            pending += node.inputs
        else:
            return ()
    return tuple(found)


def flat_indices(b: Builder, rows: Rows) -> Value:
    """The indices along one axis, int64."""
    return reshape(b, convert(b, rows.indices, INT64), (rows.indices.type.size,))


def summed(b: Builder, every: Sequence[Rows], table: Value) -> tuple[Rows, Value]:
    """Rows of the same index added up, in the table's element type: the sum stands where that index stands first, and
    the other positions of the index have zeros.

    Returns:
        The rows, all along one axis; and for each position the first one of its index.
    """
    indices = concat(b, [flat_indices(b, rows) for rows in every])
    each = [convert(b, rows.values, table.dtype) for rows in every]
    values = concat(b, [reshape(b, value, (-1, *table.shape[1:])) for value in each])
    first = b.apply(FirstEqual(table.shape[0]), indices, name="first")
    return Rows(indices, b.apply(ScatterAdd(0, values.shape), first, values, name="sums")), first


def _passes_rows(node: Node) -> bool:
    """Whether a node adds two tensors of one type, or converts a tensor to another type."""
    map, output = node.of(Map), node.outputs[0]
    if map is None or len(map.outputs) != 1:
        return False
    adds = map.op.is_sum and all(value.type == output.type for value in map.inputs)
    return adds or map.op.parsed == (cast(Arg(0), output.dtype),)


def _producer(b: Builder, value: Value) -> Node | None:
    """What computes a gradient, which is most often among the last nodes."""
    return next((node for node in reversed(b.nodes) if value in node.outputs), None)

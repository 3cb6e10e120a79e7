"""Which integers are valid where an op selects by them: of inputs that ops move before they reach it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from foreplan.graph import Graph, Op, Value
from foreplan.ops.join import CopyOp
from foreplan.ops.map import COPY


def moves_alone(op: Op) -> bool:
    """Whether the elements of an op's outputs are those of its inputs, in other places."""
    return op == COPY or isinstance(op, CopyOp)


def common(ranges: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """The values that lie in all of some ranges: the lowest and the highest, then single ones outside of these."""
    if not ranges:
        return None
    low, high = max(low for low, *_ in ranges), min(high for _, high, *_ in ranges)
    others = {other for _, _, *others in ranges for other in others if not low <= other <= high}
    taken = (other for other in others if all(r[0] <= other <= r[1] or other in r[2:] for r in ranges))
    return (low, high, *sorted(taken))


def valid_in(graph: Graph, value: Value) -> tuple[int, ...] | None:
    """The values that every op of a graph which selects by an input of it can take; None: any."""
    ranges: list[tuple[int, ...]] = []
    values = [value]
    for moved in values:  # which grows
        for node in graph.readers[moved]:
            if moves_alone(node.op) or (node.op.is_view and node.inputs[0] is moved):
                values += (y for y in node.outputs if y.dtype == moved.dtype and y not in values)
            ranges += _of(node.op, [i for i, x in enumerate(node.inputs) if x is moved], node.inputs)
    return common(ranges)


def _of(op: Op, places: Iterable[int], inputs: Sequence[Value]) -> list[tuple[int, ...]]:
    found = (op.valid_range(i, [x.type for x in inputs]) for i in places)
    return [each for each in found if each is not None]

"""What each of several ranks computes that run one graph together: node by node, in step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from foreplan.graph import Graph, GraphBuilder, Op, Value
from foreplan.graph.init import generator_for
from foreplan.ops.collective import (
    AllGather,
    AllReduce,
    AllToAll,
    Begin,
    Broadcast,
    Collective,
    Exchange,
    Finish,
    OfRank,
    ReduceScatter,
    Shift,
)
from tests.ops.check import run_op, type_of

Arrays = Mapping[str, np.ndarray]


def evaluate_ranks(graph: Graph, inputs: Sequence[Arrays], stored: Sequence[Arrays]) -> list[dict[Value, np.ndarray]]:
    """Every value of a graph, by rank. What ranks exchange is taken from its definition.

    Args:
        inputs, stored: by rank; all that the graph reads.
    """
    found = [{x: given[x.name] for x in graph.inputs} for given in inputs]
    for own, kept in zip(found, stored):
        own.update((x, kept[x.name]) for x in graph.stored)
    for node in graph.nodes:
        given = [[own[x] for x in node.inputs] for own in found]
        for own, made in zip(found, _made(node.op, given), strict=True):
            own.update(zip(node.outputs, made, strict=True))
    return found


def _made(op: Op, given: Sequence[Sequence[np.ndarray]]) -> list[list[np.ndarray]]:
    """What an op gives on each rank, from what each gives it."""
    if isinstance(op, OfRank):
        return [[_on_rank(op, _place(op, rank), arrays)] for rank, arrays in enumerate(given)]
    if isinstance(op, Collective):
        return [[_exchanged(op, given, rank)] for rank in range(len(given))]
    if type(op).compute is Op.compute:  # it may exchange something within
        return _decomposed(op, given)
    return [run_op(op, *arrays, hard=False) for arrays in given]


def _place(op: Collective, rank: int) -> int:
    """The number of a rank in its group."""
    return rank // op.stride % op.ranks


def _on_rank(op: OfRank, number: int, arrays: Sequence[np.ndarray]) -> np.ndarray:
    (type,) = op.infer([type_of(x) for x in arrays])
    out = np.empty(type.shape, type.dtype.numpy)
    op.on_rank(number, arrays, [out])
    return out


def _exchanged(op: Collective, given: Sequence[Sequence[np.ndarray]], rank: int) -> np.ndarray:
    """What a rank has when ranks have exchanged what they have."""
    if isinstance(op, Finish):
        return given[rank][0]
    number = _place(op, rank)
    group = [given[rank + (other - number) * op.stride][0] for other in range(op.ranks)]
    kind = op.kind if isinstance(op, Exchange | Begin) else op.name
    if kind in (AllReduce.name, ReduceScatter.name):
        total = np.sum(group, 0)
        return total if kind == AllReduce.name else np.split(total, op.ranks)[number]
    if kind == AllGather.kind:
        return np.concatenate(group)
    if kind == AllToAll.kind:
        return np.concatenate([np.split(x, op.ranks)[number] for x in group])
    assert isinstance(op, Exchange | Begin) and kind in (Broadcast.kind, Shift.kind), op
    return group[op.peer if kind == Broadcast.kind else (number - op.peer) % op.ranks]


def _decomposed(op: Op, given: Sequence[Sequence[np.ndarray]]) -> list[list[np.ndarray]]:
    b = GraphBuilder()
    values = [b.input(f"x{i}", type_of(x)) for i, x in enumerate(given[0])]
    made = op.decompose(b, values)
    assert made is not None
    graph = b.finish({f"y{i}": value for i, value in enumerate(made)})
    inputs = [{value.name: x for value, x in zip(values, arrays)} for arrays in given]
    constants = {value.name: _content(value) for value in graph.stored}
    found = evaluate_ranks(graph, inputs, [constants for _ in given])
    return [[own[value] for value in made] for own in found]


def _content(value: Value) -> np.ndarray:
    """Of a constant."""
    assert value.init is not None
    array = np.empty(value.shape, value.dtype.numpy)
    value.init.fill(array, generator_for(0, value.name))
    return array

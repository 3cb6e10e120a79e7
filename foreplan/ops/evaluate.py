"""Kernels run while a graph is made: results of constants are computed at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from foreplan.graph import GraphBuilder, Kind, Node, Op, Value
from foreplan.graph.shard import Sharded
from foreplan.graph.types import types_of


def is_known(value: Value) -> bool:
    """Whether a value is a constant, the same on all ranks."""
    return value.kind is Kind.CONSTANT and not isinstance(value.init, Sharded)


def is_computed(op: Op) -> bool:
    """Whether what an op gives follows from its inputs alone, wherever it runs."""
    return not op.is_random and not op.of_ranks


def content(value: Value) -> np.ndarray:
    """Of a constant that `is_known`."""
    array = np.empty(value.shape, value.dtype.numpy)
    assert value.init is not None
    value.init.fill(array, np.random.default_rng(0))
    return array


def computed(op: Op, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The results of an op's kernel on arrays in C order; infinities and NaNs are results like any other."""
    types = types_of(*arrays)
    results = op.result_types(types)
    outputs = [np.empty(type.shape, type.dtype.numpy) for type in results]
    with np.errstate(all="ignore"):
        op.compute(arrays, outputs, np.empty(op.workspace(types, results), np.uint8))
    return outputs


def evaluate(
    nodes: Iterable[Node], known: dict[Value, np.ndarray], most: int, may: Callable[[int], bool] = lambda _: True
) -> bool:
    """Add the nodes' results to `known`; ops without a kernel are decomposed.

    Args:
        nodes: in order.
        known: the content of every other value that they read.
        most: bytes of a result and of a kernel's workspace.
        may: whether there is time for a kernel of some bytes and operations.

    Returns:
        Whether all was computed; larger results than `most` are not, and what takes more time than there is.
    """
    for node in nodes:
        types = [value.type for value in node.inputs], [value.type for value in node.outputs]
        arrays = [np.ascontiguousarray(known[value]).reshape(value.shape) for value in node.inputs]
        if type(node.op).compute is Op.compute:
            results = _by_parts(node, arrays, most, may)
            if results is None:
                return False
        else:
            cost = node.op.cost(*types)
            if max(node.op.workspace(*types), *(type.nbytes for type in types[1])) > most:
                return False
            if not may(cost.flops + cost.nbytes):
                return False
            results = computed(node.op, arrays)
        known.update(zip(node.outputs, results, strict=True))
    return True


def _by_parts(
    node: Node, arrays: Sequence[np.ndarray], most: int, may: Callable[[int], bool]
) -> list[np.ndarray] | None:
    b = GraphBuilder()
    inputs = [b.input(f"x{i}", value.type) for i, value in enumerate(node.inputs)]
    parts = node.op.decompose(b, inputs)
    if parts is None:
        return None
    known = dict(zip(inputs, arrays)) | {value: content(value) for value in b.stored}
    return [known[value] for value in parts] if evaluate(b.nodes, known, most, may) else None

"""Which weights a step trains: those that the model trains, but for those that the user names."""

from __future__ import annotations

import dataclasses

from foreplan.graph import Builder, Graph, Kind, Node, Value
from foreplan.ops.norm.batch import BatchNorm
from foreplan.passes.rewrite import replaced, rewrite, with_values
from foreplan.patterns import Selection

_WEIGHTS = (Kind.PARAMETER, Kind.FROZEN)


def choose_trained(graph: Graph, selection: Selection) -> Graph:
    """The graph with the weights trained, or frozen, that patterns name; all others are as they were.

    A weight that is frozen keeps its place among the model's parameters; it gets no gradient, no optimizer state and no
    update. Buffers, such as running statistics, and integers are never trained.

    Raises:
        UsageError: a pattern means nothing, or nothing that can be trained.
    """
    if not selection:
        return graph
    stored = [value for value in graph.stored if value.kind in (*_WEIGHTS, Kind.CONSTANT, Kind.BUFFER)]
    selection.check({value.name: value.dtype.is_float and value.kind is not Kind.BUFFER for value in stored})
    chosen = {}
    for value in stored:
        found = selection.of(value.name, value.kind in _WEIGHTS)
        if found is not None and value.dtype.is_float and value.kind is not Kind.BUFFER:
            trained, pattern = found
            kind, option = (Kind.PARAMETER, "train") if trained else (Kind.FROZEN, "freeze")
            chosen[value] = dataclasses.replace(value, kind=kind, why=f"{option}={pattern!r}")
    return with_values(graph, chosen)


def freeze_statistics(graph: Graph, everywhere: bool = False) -> Graph:
    """The graph with frozen batch normalisation where its scale and bias are frozen, or everywhere.

    In training it then uses the running statistics, as in inference, and leaves them as they are.
    """

    def replace(b: Builder, node: Node, inputs: tuple[Value, ...]) -> list[Value] | None:
        op = node.op
        if not isinstance(op, BatchNorm) or op.frozen:
            return None
        if not everywhere and any(value.kind is not Kind.FROZEN for value in inputs[1:3]):
            return None
        return replaced(b, node, dataclasses.replace(op, frozen=True), inputs)

    return rewrite(graph, replace) if any(isinstance(node.op, BatchNorm) for node in graph.nodes) else graph

"""Parts of a model: what leads to values that are named, and what follows them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from foreplan.errors import UsageError
from foreplan.graph.ir import Graph, Kind, Node, Value
from foreplan.graph.walk import live_nodes
from foreplan.patterns import close_names, scopes_of


def until(graph: Graph, names: Sequence[str]) -> Graph:
    """The part of a graph that computes some values, which are its outputs under the names given.

    Raises:
        UsageError: see `named_values`.
    """
    found = named_values(graph, names)
    return _part(graph, graph.nodes, graph.inputs, found)


def since(graph: Graph, names: Sequence[str]) -> Graph:
    """The part of a graph that follows some values, which are its first inputs under their own names. Outputs that
    do not depend on them are left out.

    Raises:
        UsageError: see `named_values`; or no output depends on one of them.
    """
    cut = list(named_values(graph, names).values())
    given = {value: dataclasses.replace(value, kind=Kind.INPUT, init=None) for value in cut}
    for value in cut:
        if value in graph.producer and len(graph.producer[value].outputs) > 1:
            made = graph.producer[value].name
            raise UsageError(f"{value.name!r} is one of several results of {made!r}: name a value that follows from it")
    nodes = [node for node in graph.nodes if given.keys().isdisjoint(node.outputs)]
    reached: set[Value] = set(cut)
    for node in nodes:
        if not reached.isdisjoint(node.inputs):
            reached.update(node.outputs)
    moved = [dataclasses.replace(n, inputs=tuple(given.get(v, v) for v in n.inputs)) for n in nodes]
    outputs = {name: given.get(value, value) for name, value in graph.outputs.items() if value in reached}
    inputs = (*given.values(), *(value for value in graph.inputs if value not in given))
    part = _part(graph, moved, inputs, outputs)
    for name, value in zip(names, given.values()):
        if value not in part.inputs:
            raise UsageError(f"no output of graph {graph.name!r} depends on {name!r}, or on it and the others named")
    return part


def named_values(graph: Graph, names: Sequence[str]) -> dict[str, Value]:
    """The value that each name means: an output of the graph, any value, the one result of a node, or the one value
    that a part of the model gives to what follows.

    Raises:
        UsageError: there are no names, or a name means no value, or several.
    """
    if not names or not all(isinstance(name, str) for name in names):
        raise UsageError(f"a model is cut at names of values, such as {', '.join(map(repr, graph.outputs))}")
    values = {value.name: value for value in graph.values()}
    nodes = {node.name: node for node in graph.nodes}
    found = {}
    for name in names:
        value = graph.outputs.get(name) or values.get(name)
        found[name] = _only_result(graph, name, nodes) if value is None else value
    return found


def _only_result(graph: Graph, name: str, nodes: Mapping[str, Node]) -> Value:
    """What a node, or a part of the model, gives to the rest."""
    inside = [nodes[name]] if name in nodes else [n for n in graph.nodes if name.lstrip("/") in scopes_of(n.name)]
    results = set(graph.outputs.values())
    own = set(inside)
    given = [
        value
        for node in inside
        for value in node.outputs
        if value in results or any(reader not in own for reader in graph.readers[value])
    ]
    if len(given) == 1:
        return given[0]
    if given:
        listed = ", ".join(repr(value.name) for value in given[:5])
        raise UsageError(
            f"graph {graph.name!r}: {name!r} gives {len(given)} values to what follows, {listed}: name one"
        )
    names = [*graph.outputs, *(v.name for v in graph.values()), *nodes]
    raise UsageError(f"graph {graph.name!r} has no value {name!r}; there are {close_names(name, names)}")


def _part(graph: Graph, nodes: Sequence[Node], inputs: Iterable[Value], outputs: Mapping[str, Value]) -> Graph:
    """The outputs and what they need of these nodes, inputs and stored values, with the updates of a random state."""
    whole = dataclasses.replace(graph, nodes=tuple(nodes), outputs=dict(outputs), loss=None, gradients={})
    read = {value for node in live_nodes(whole, outputs.values()) for value in node.inputs} | set(outputs.values())
    updates = {old: new for old, new in graph.updates.items() if old in read and graph.loss is None}
    live = live_nodes(whole, (*outputs.values(), *updates.values()))
    read.update(value for node in live for value in node.inputs)
    return dataclasses.replace(
        whole,
        inputs=tuple(value for value in inputs if value in read),
        stored=tuple(value for value in graph.stored if value in read),
        nodes=live,
        updates=updates,
    )

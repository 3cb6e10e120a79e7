"""Copying a graph node by node with replacements: every rewriting pass uses this."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

from foreplan.graph import Builder, Graph, GraphBuilder, Node, Op, Value
from foreplan.graph.op import Asked, Types

Group = TypeVar("Group")
Replace = Callable[[Builder, Node, tuple[Value, ...]], Sequence[Value] | None]
Accepts = Callable[[Op, Types, Types], bool]  # whether a target has a kernel for an op of such inputs and outputs


def builder_for(graph: Graph) -> GraphBuilder:
    """A builder with what a graph has besides nodes and results, in which names of its nodes and their results are
    taken.
    """
    b = GraphBuilder(graph.name)
    b.inputs, b.stored, b.notes = list(graph.inputs), list(graph.stored), list(graph.notes)
    b.reserve((*graph.inputs, *graph.stored), graph.nodes)
    return b


def rewrite(
    graph: Graph,
    replace: Replace,
    *,
    updates: Mapping[Value, Value] | None = None,
    finish: Callable[[Builder], None] | None = None,
) -> Graph:
    """The graph with some nodes replaced; dead nodes are left out, stored values and inputs all kept. Where there is
    nothing to do, the very same graph.

    Args:
        graph: what to copy.
        replace: called with the new graph's builder, each node and its new inputs; returns the values that take the
            place of the node's outputs (new names are made), or None to copy the node as it is.
        updates: further updates, in terms of values of the new graph (the mapping may be filled by `replace`).
        finish: called with the builder when all nodes are there, to add what stands at the end.

    Raises:
        ModelError: the result breaks a rule of `verify_graph`.
    """
    from foreplan.graph.ir import live_nodes

    b = builder_for(graph)
    now: dict[Value, Value] = {}
    for node in live_nodes(graph, graph.results):
        inputs = tuple(now.get(value, value) for value in node.inputs)
        b.source, b.scope = node.source, ""
        b.kind = node.outputs[0].kind
        outputs = replace(b, node, inputs)
        if outputs is None:
            same = inputs == node.inputs
            kept = same or [value.type for value in inputs] == [value.type for value in node.inputs]
            copied = node if same else Node(node.op, inputs, node.outputs, node.name, node.source)
            b.append(copied, inferred=kept, reserved=True)
            outputs = node.outputs
        now.update((old, new) for old, new in zip(node.outputs, outputs, strict=True) if old is not new)

    if finish is not None:
        finish(b)

    def new(value: Value) -> Value:
        return now.get(value, value)

    made = b.finish(
        {name: new(value) for name, value in graph.outputs.items()},
        {old: new(value) for old, value in graph.updates.items()} | dict(updates or {}),
        None if graph.loss is None else new(graph.loss),
        {name: new(value) for name, value in graph.gradients.items()},
    )
    return graph if _parts(made) == _parts(graph) else made


def rewrite_ops(
    graph: Graph,
    replace: Callable[[Builder, Node[Asked], tuple[Value, ...]], Sequence[Value] | None],
    *ops: type[Asked],
) -> Graph:
    """`rewrite`, with `replace` called for the nodes of these ops alone; all others are copied."""

    def asked(b: Builder, node: Node, inputs: tuple[Value, ...]) -> Sequence[Value] | None:
        found = node.of(*ops)
        return None if found is None else replace(b, found, inputs)

    return rewrite(graph, asked)


def _parts(graph: Graph) -> tuple[object, ...]:
    """All that makes a graph but its name and origin: values and nodes by identity."""
    results = graph.outputs, graph.updates, graph.loss, graph.gradients
    return graph.nodes, graph.inputs, graph.stored, *results, graph.notes


def with_values(graph: Graph, now: Mapping[Value, Value]) -> Graph:
    """The graph with other values in the place of some inputs and stored values, of the same names and types."""

    def new(value: Value) -> Value:
        return now.get(value, value)

    def moved(node: Node) -> Node:
        if now.keys().isdisjoint(node.inputs):
            return node
        return dataclasses.replace(node, inputs=tuple(map(new, node.inputs)))

    return dataclasses.replace(
        graph,
        inputs=tuple(map(new, graph.inputs)),
        stored=tuple(map(new, graph.stored)),
        nodes=tuple(map(moved, graph.nodes)),
        outputs={name: new(value) for name, value in graph.outputs.items()},
        updates={new(old): new(value) for old, value in graph.updates.items()},
        loss=None if graph.loss is None else new(graph.loss),
        gradients={name: new(value) for name, value in graph.gradients.items()},
    )


def replaced(b: Builder, node: Node, op: Op, inputs: Sequence[Value]) -> list[Value]:
    """A node's outputs by another op of other inputs, both under the node's own names; their types are inferred.

    Raises:
        ShapeError: the op cannot take these inputs.
    """
    types = op.result_types([value.type for value in inputs])
    outputs = [Value(old.name, type, old.kind) for old, type in zip(node.outputs, types, strict=True)]
    b.append(Node(op, tuple(inputs), tuple(outputs), node.name, node.source), inferred=True)
    return outputs


def rewrite_groups(
    graph: Graph,
    groups: Mapping[Node, Group],
    inner: Collection[Node],
    make: Callable[[Builder, Group, Mapping[Value, Value]], Sequence[Value]],
) -> Graph:
    """The graph with groups of nodes replaced, each by what gives the outputs of its last node.

    Args:
        groups: by last node.
        inner: the other nodes of all groups; nobody else reads what they make.
        make: called with the new graph's builder, each group, and the new values of all that was read so far.

    Raises:
        ModelError: the result breaks a rule of `verify_graph`.
    """
    now: dict[Value, Value] = {}

    def replace(b: Builder, node: Node, inputs: tuple[Value, ...]) -> Sequence[Value] | None:
        now.update(zip(node.inputs, inputs))
        if node in inner:
            return node.outputs  # nobody will read it
        return make(b, groups[node], now) if node in groups else None

    return rewrite(graph, replace) if groups else graph

"""Several maps of the same small values → one, which computes what they share once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from foreplan.graph import Graph, Node, Value
from foreplan.ops.expr import Arg, Expr, subexpressions, substitute
from foreplan.ops.map import Map

JOINED_BYTES = 128 * 1024  # of a result; for larger ones, the time of a call and of what is shared count little
JOINED_PARTS, JOINED_INPUTS = 96, 16  # of one map


def join_maps(graph: Graph) -> Graph:
    """The graph with one map for maps of one shape that read a value in common, where their results are small.

    This serves the bodies of loops: the gradients of a recurrent layer's gates need the same sigmoids. All results are
    then there at the same time; so it is not for large values, nor for whole steps.

    Ensures: same results. A map moves only behind nodes that do not read what it makes.
    """
    fresh = {new: old for old, new in graph.updates.items()}
    nodes: list[Node | None] = []
    groups: dict[int, list[Node]] = {}  # by the place of its last node in `nodes`
    for node in graph.nodes:
        read = set(node.inputs)
        groups = {at: group for at, group in groups.items() if read.isdisjoint(_outputs(group))}
        group = [node]
        if isinstance(node.op, Map) and node.outputs[0].type.nbytes <= JOINED_BYTES:
            for at, others in groups.items():
                if _fit(others, node, fresh):
                    group, nodes[at] = [*groups.pop(at), node], None
                    break
            groups[len(nodes)] = group
        nodes.append(_joined(group))
    return replace(graph, nodes=tuple(node for node in nodes if node is not None))


def _outputs(group: Sequence[Node]) -> list[Value]:
    return [value for node in group for value in node.outputs]


def _fit(group: Sequence[Node], node: Node, fresh: dict[Value, Value]) -> bool:
    """Whether a map may join others: nothing is then read beside the content that takes its place."""
    first, second = group[0].outputs[0], node.outputs[0]
    before = {value for each in group for value in each.inputs}
    if (first.shape, first.kind) != (second.shape, second.kind) or before.isdisjoint(node.inputs):
        return False
    exprs, inputs = _together([*group, node])
    small = len(inputs) <= JOINED_INPUTS and len(subexpressions(*exprs)) <= JOINED_PARTS
    return small and not any(fresh.get(value) in inputs for value in inputs)


def _together(group: Sequence[Node]) -> tuple[list[Expr], list[Value]]:
    """The expressions of maps, over all that they read."""
    inputs = list(dict.fromkeys(value for node in group for value in node.inputs))
    exprs: list[Expr] = []
    for node in group:
        assert isinstance(node.op, Map)
        args = [Arg(inputs.index(value)) for value in node.inputs]
        exprs += [substitute(expr, args) for expr in node.op.parsed]
    return exprs, inputs


def _joined(group: Sequence[Node]) -> Node:
    """One map for a group; a single node as it is."""
    if len(group) == 1:
        return group[0]
    exprs, inputs = _together(group)
    return Node(Map(tuple(map(str, exprs))), tuple(inputs), tuple(_outputs(group)), group[0].name, group[0].source)

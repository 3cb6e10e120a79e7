"""Several maps of the same small values → one, which computes what they share once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from foreplan.graph import Graph, Node, Value
from foreplan.ops.expr import Arg, Expr, subexpressions, substitute
from foreplan.ops.map import Map
from foreplan.passes.base import Pass
from foreplan.passes.simplify import fused

JOINED_BYTES = 128 * 1024  # of a result; for larger ones, the time of a call and of what is shared count little
JOINED_PARTS, JOINED_INPUTS = 96, 16  # of one map


@dataclass(frozen=True)
class JoinMaps(Pass, requires=("plain ops",), ensures=("plain ops",), optional=True):
    """The graph with one map for maps of one shape that read a value in common, where their results are small. A map
    whose result that one alone reads is a part of it.

    This serves the bodies of loops: the gradients of a recurrent layer's gates need the same sigmoids. All results are
    then there at the same time; so it is not for large values, nor for whole steps.

    Ensures: same results. A map moves only behind nodes that do not read what it makes.
    """

    def _run(self, graph: Graph) -> Graph:
        fresh = {new: old for old, new in graph.updates.items()}
        nodes: list[Node | None] = []
        groups: dict[int, list[Node[Map]]] = {}  # by the place of its last node in `nodes`
        for node in graph.nodes:
            read = set(node.inputs)
            groups = {at: group for at, group in groups.items() if read.isdisjoint(_outputs(group))}
            if (map := node.of(Map)) and node.outputs[0].type.nbytes <= JOINED_BYTES:
                group = [map]
                for at, others in groups.items():
                    if _fit(others, map, fresh):
                        group, nodes[at] = [*groups.pop(at), map], None
                        break
                groups[len(nodes)], node = group, _joined(group)
            nodes.append(node)
        found = _with_parts(replace(graph, nodes=tuple(node for node in nodes if node is not None)), fresh)
        return graph if found.nodes == graph.nodes else found


join_maps = JoinMaps()


def _with_parts(graph: Graph, fresh: Mapping[Value, Value]) -> Graph:
    """The graph with maps in the place of their results, where one other map alone reads these."""
    now: dict[Node, Node[Map]] = {}  # what a map has become, with its parts
    gone: set[Node] = set()
    for node in graph.nodes_of(Map):
        if len(node.outputs) > 1 or node.outputs[0] in graph.returned:
            continue
        readers = set(graph.readers[node.outputs[0]])
        reader = readers.pop().of(Map) if len(readers) == 1 else None
        if reader is None or reader.outputs[0].type.nbytes > JOINED_BYTES:
            continue
        exprs, inputs = fused([now.get(node, node), now.get(reader, reader)], {})
        if _is_alike(node, reader) and _is_small(exprs, inputs, fresh):
            now[reader] = replace(reader, op=Map(tuple(map(str, exprs))), inputs=tuple(inputs))
            gone.add(node)
    return replace(graph, nodes=tuple(now.get(node, node) for node in graph.nodes if node not in gone))


def _outputs(group: Sequence[Node]) -> list[Value]:
    return [value for node in group for value in node.outputs]


def _fit(group: Sequence[Node[Map]], node: Node[Map], fresh: Mapping[Value, Value]) -> bool:
    """Whether a map may join others."""
    before = {value for each in group for value in each.inputs}
    return (
        _is_alike(group[0], node)
        and not before.isdisjoint(node.inputs)
        and _is_small(*_together([*group, node]), fresh)
    )


def _is_alike(one: Node, other: Node) -> bool:
    first, second = one.outputs[0], other.outputs[0]
    return (first.shape, first.kind) == (second.shape, second.kind)


def _is_small(exprs: Sequence[Expr], inputs: Sequence[Value], fresh: Mapping[Value, Value]) -> bool:
    """Whether one map may be so much; nothing is then read beside the content that takes its place."""
    small = len(inputs) <= JOINED_INPUTS and len(subexpressions(*exprs)) <= JOINED_PARTS
    return small and not any(fresh.get(value) in inputs for value in inputs)


def _together(group: Sequence[Node[Map]]) -> tuple[list[Expr], list[Value]]:
    """The expressions of maps, over all that they read."""
    inputs = list(dict.fromkeys(value for node in group for value in node.inputs))
    exprs: list[Expr] = []
    for node in group:
        args = [Arg(inputs.index(value)) for value in node.inputs]
        exprs += [substitute(expr, args) for expr in node.op.parsed]
    return exprs, inputs


def _joined(group: Sequence[Node[Map]]) -> Node[Map]:
    """One map for a group; a single node as it is."""
    if len(group) == 1:
        return group[0]
    exprs, inputs = _together(group)
    return Node(Map(tuple(map(str, exprs))), tuple(inputs), tuple(_outputs(group)), group[0].name, group[0].source)

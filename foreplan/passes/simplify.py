"""Passes that make a graph smaller: constant folding, common subexpressions, and fusing of element-wise chains."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from foreplan.graph import Array, Builder, Graph, Kind, Node, Op, Value
from foreplan.ops.evaluate import computed, content, is_computed, is_known
from foreplan.ops.expr import Arg, Expr, subexpressions, substitute
from foreplan.ops.map import Map
from foreplan.passes.base import Pass
from foreplan.passes.rewrite import rewrite

FOLD_BYTES = 1024  # a folded constant larger than this would cost more memory than recomputing it
FUSED_PARTS = 48  # expressions with more parts than this spill their registers out of the cache
FUSED_INPUTS = 8


@dataclass(frozen=True)
class FoldConstants(Pass, requires=("plain ops",), ensures=("plain ops", "live"), optional=True):
    """Compute at once what small constants alone determine, and drop constants that no node reads.

    This serves files and traced functions that compute with constants, and passes that leave constants behind.

    Ensures: same results; random ops, those of ranks and views stay.
    """

    def _run(self, graph: Graph) -> Graph:
        def replace(b: Builder, node: Node, inputs: tuple[Value, ...]) -> Sequence[Value] | None:
            small = sum(value.type.nbytes for value in (*inputs, *node.outputs)) <= FOLD_BYTES
            if not small or node.op.is_view or not is_computed(node.op) or not all(map(is_known, inputs)):
                return None
            outputs = computed(node.op, [content(value) for value in inputs])
            return [
                b.store(f"{value.name}.folded", value.type, Kind.CONSTANT, Array(array))
                for value, array in zip(node.outputs, outputs)
            ]

        return _drop_idle_constants(rewrite(graph, replace))


fold_constants = FoldConstants()


def _drop_idle_constants(graph: Graph) -> Graph:
    """Without the constants that nothing reads any more."""
    used = set(graph.results).union(*(node.inputs for node in graph.nodes))
    stored = tuple(value for value in graph.stored if value.kind is not Kind.CONSTANT or value in used)
    return graph if stored == graph.stored else dataclasses.replace(graph, stored=stored)


@dataclass(frozen=True)
class ShareCommon(Pass, requires=("plain ops",), ensures=("plain ops", "live"), optional=True):
    """One node for equal ops of equal inputs. Ensures: same results; forward and backward stay apart.

    A backward node equal to a forward one is left alone: to share it would keep the forward result alive until then,
    and that choice is the planner's.
    """

    def _run(self, graph: Graph) -> Graph:
        seen: dict[tuple[Op, tuple[Value, ...], Kind], tuple[Value, ...]] = {}

        def replace(b: Builder, node: Node, inputs: tuple[Value, ...]) -> Sequence[Value] | None:
            key = (node.op, inputs, node.outputs[0].kind)
            if key in seen:
                return seen[key]
            seen[key] = node.outputs
            return None

        return rewrite(graph, replace)


share_common = ShareCommon()


@dataclass(frozen=True)
class FuseMaps(Pass, requires=("plain ops",), ensures=("plain ops", "live"), optional=True):
    """One `map` for a group of element-wise nodes whose inner results nobody else reads.

    Ensures: same results. Only nodes of the same kind (forward or backward) and shape are fused, so that nothing
    lives longer than it did, except inputs of the earlier node until the later one runs.
    """

    def _run(self, graph: Graph) -> Graph:
        group = _groups(graph)
        absorbed = {node for node, root in group.items() if node is not root}
        members: dict[Node, list[Node[Map]]] = {}
        for node in graph.nodes_of(Map):
            members.setdefault(group[node], []).append(node)
        now: dict[Value, Value] = {}

        def replace(b: Builder, node: Node, inputs: tuple[Value, ...]) -> Sequence[Value] | None:
            now.update(zip(node.inputs, inputs))
            if node in absorbed:
                return node.outputs  # nobody will read it: the root computes it for itself
            if len(members.get(node, ())) < 2:
                return None
            exprs, values = fused(members[node], now)
            b.source, b.scope = node.source, ""
            return b.node(Map(tuple(map(str, exprs))), *values, name=node.name + "/fused")

        return rewrite(graph, replace)


fuse_maps = FuseMaps()


def _groups(graph: Graph) -> dict[Node, Node]:
    """Each map node → the last node of its group."""
    updated = set(graph.updates.values())
    group: dict[Node, Node] = {}
    parts: dict[Node, int] = {}
    outside: dict[Node, set[Value]] = {}
    for node in reversed(graph.nodes_of(Map)):
        readers = {group.get(reader) for value in node.outputs for reader in graph.readers[value]}
        root = next(iter(readers)) if len(readers) == 1 else None
        size = len(subexpressions(*node.op.parsed))
        fits = (
            root is not None
            and len(node.outputs) == 1
            and node.outputs[0] not in graph.returned
            and node.outputs[0].shape == root.outputs[0].shape
            and node.outputs[0].kind is root.outputs[0].kind
            and updated.isdisjoint(root.outputs)
            and parts[root] + size <= FUSED_PARTS
            and len((outside[root] - set(node.outputs)) | set(node.inputs)) <= FUSED_INPUTS
        )
        if fits and root is not None:
            group[node] = root
            parts[root] += size
            outside[root] = (outside[root] - set(node.outputs)) | set(node.inputs)
        else:
            group[node], parts[node], outside[node] = node, size, set(node.inputs)
    return group


def fused(nodes: Sequence[Node[Map]], now: Mapping[Value, Value]) -> tuple[list[Expr], list[Value]]:
    """The last map's expressions over the outer inputs of a group.

    Args:
        now: what has taken the place of a value.
    """
    values: list[Value] = []
    inside: dict[Value, Expr] = {}
    exprs: list[Expr] = []
    for node in nodes:
        args: list[Expr] = []
        for value in node.inputs:
            if value not in inside:
                new = now.get(value, value)
                if new not in values:
                    values.append(new)
                args.append(Arg(values.index(new)))
            else:
                args.append(inside[value])
        exprs = [substitute(expr, args) for expr in node.op.parsed]
        inside.update(zip(node.outputs, exprs))
    return exprs, values

"""Slices of results → results of slices: values that nobody reads are not computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foreplan.graph import Builder, Graph, Node, Value
from foreplan.graph.value import Kind
from foreplan.ops.shape import Slice
from foreplan.passes.base import Pass
from foreplan.passes.narrowing import Narrowed, narrowed
from foreplan.passes.rewrite import rewrite

SHARE = 2  # a slice is pushed if it keeps at most 1 / SHARE of the elements


@dataclass(frozen=True)
class PushSlices(Pass, requires=("plain ops",), ensures=("plain ops", "live"), optional=True):
    """Compute only the slice of a forward result that is read, and likewise of its inputs, and of theirs.

    This serves classifiers that read one token of many, such as ViT, which then compute only that one behind the last
    attention; and language models that are asked for the last position's logits.

    Ensures: the same results, up to the blocks in which products are computed. Only where all readers read the same
    slice, of at most half of the elements, and through ops that can compute it alone (`narrowing`).
    """

    def _run(self, graph: Graph) -> Graph:
        plans: dict[Node, Narrowed] = {}
        for node in reversed(graph.nodes):
            wanted = _wanted(graph, node, plans)
            if wanted is not None and (found := narrowed(node, wanted)) is not None:
                plans[node] = found
        for node in graph.nodes:  # a view of what is computed whole saves nothing
            if node in plans and node.op.is_view and graph.producer.get(node.inputs[0]) not in plans:
                del plans[node]
        if not plans:
            return graph
        parts: dict[tuple[Value, Slice], Value] = {}

        def part(b: Builder, old: Value, new: Value, cut: Slice | None) -> Value:
            producer = graph.producer.get(old)
            if cut is None or (producer is not None and producer in plans):
                return new
            if (new, cut) not in parts:
                parts[new, cut] = b.apply(cut, new, name=f"{new.name}/part")
            return parts[new, cut]

        def rewritten(b: Builder, node: Node, inputs: tuple[Value, ...]) -> Sequence[Value] | None:
            if node in plans:
                plan = plans[node]
                values = [
                    part(b, old, new, cut) for old, new, cut in zip(node.inputs, inputs, plan.inputs, strict=True)
                ]
                return b.node(plan.op, *values, name=f"{node.name}/part")
            producer = graph.producer.get(node.inputs[0]) if node.of(Slice) else None
            return [inputs[0]] if producer is not None and producer in plans else None

        return rewrite(graph, rewritten)


push_slices = PushSlices()


def _wanted(graph: Graph, node: Node, plans: dict[Node, Narrowed]) -> Slice | None:
    """The one slice of a node's first output that all its readers read, if nobody reads anything else of it."""
    first, *others = node.outputs
    if any(graph.readers[value] or value in graph.returned for value in others) or first in graph.returned:
        return None
    wanted: set[Slice] = set()
    for reader in graph.readers[first]:
        if isinstance(reader.op, Slice) and reader not in plans:
            wanted.add(reader.op)
            continue
        cuts = plans[reader].inputs if reader in plans else []
        read = [cut for value, cut in zip(reader.inputs, cuts) if value is first]
        if not read or None in read:
            return None
        wanted.update(cut for cut in read if cut is not None)
    if len(wanted) != 1 or first.kind is not Kind.ACTIVATION:
        return None
    (cut,) = wanted
    return cut if first.type.with_shape(cut.shape).size * SHARE <= first.type.size else None

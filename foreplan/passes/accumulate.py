"""Sums of gradients → the op that computes the last of them adds it to the others, in place where they are dead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foreplan.graph import Builder, Graph, Node, Value
from foreplan.graph.value import Kind
from foreplan.ops.map import Map
from foreplan.ops.shape import Reshape
from foreplan.passes.base import Pass
from foreplan.passes.rewrite import rewrite


@dataclass(frozen=True)
class Accumulate(Pass, requires=("plain ops",), ensures=("plain ops", "live"), optional=True):
    """Let a product, a convolution's or normalisation's gradient or a scatter-add add its result to the other summand.

    Requires: a whole training step, its sums not fused yet. Ensures: the same results, up to the blocks in
    which products are computed. The summand that is computed later must come from an op that accumulates, and only the
    sum may read it. The other one must have bytes of its own (those of a result, or of an ACCUMULATOR, which last from
    micro-batch to micro-batch); otherwise nothing would be saved.
    """

    def _run(self, graph: Graph) -> Graph:
        position = {node: i for i, node in enumerate(graph.nodes)}
        sums: dict[Node, tuple[Node, Value]] = {}  # what computes the later summand → the sum, and the earlier summand
        for node in graph.nodes_of(Map):
            found = _summands(graph, node, position)
            if found is not None:
                sums.setdefault(found[0], (node, found[1]))
        done: dict[Node, Value] = {}
        now: dict[Value, Value] = {}

        def replace(b: Builder, node: Node, inputs: tuple[Value, ...]) -> Sequence[Value] | None:
            if node in sums:
                total, base = sums[node]
                found = b.node(node.op, *inputs, now.get(base, base), name=f"{node.name}/added")
                done[total] = found[0]
                now.update(zip(node.outputs[1:], found[1:]))
                return [node.outputs[0], *found[1:]]  # nobody but the sum would read the first
            if node in done:
                now[node.outputs[0]] = done[node]
                return [done[node]]
            return None

        return rewrite(graph, replace) if sums else graph


accumulate = Accumulate()


def _in_place(node: Node, base: Value) -> bool:
    """Whether the node's op would add its result to a stored value, in its place."""
    types = [value.type for value in (*node.inputs, base)]
    return (0, node.op.accumulates) in node.op.overwrites(types, [base.type])


def _summands(graph: Graph, node: Node[Map], position: dict[Node, int]) -> tuple[Node, Value] | None:
    """(node that computes the later summand and can add it to the other, the other) of a sum of two gradients."""
    if not node.op.is_sum or len(set(node.inputs)) != 2:
        return None
    if any(value.type != node.outputs[0].type for value in node.inputs):
        return None
    # What is stored is there before anything is computed.
    (before, base), (at, value) = sorted(
        ((position[graph.producer[x]] if x in graph.producer else -1, x) for x in node.inputs), key=lambda pair: pair[0]
    )
    if at < 0 or (before < 0 and base.kind is not Kind.ACCUMULATOR):
        return None
    last, owner = graph.nodes[at], graph.producer.get(base)
    fits = (
        node.outputs[0].kind is value.kind is Kind.GRADIENT
        and last is not owner
        and last.op.accumulates
        and value is last.outputs[0]
        and len(last.inputs) == last.op.accumulates
        and graph.only_reader(value, Map) is node
        and (_in_place(last, base) if owner is None else not owner.op.is_view or isinstance(owner.op, Reshape))
    )
    return (last, base) if fits else None

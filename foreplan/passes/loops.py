"""Loops written out, and loops without what nobody reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from foreplan.graph import Builder, Graph, Node, Value
from foreplan.graph.ir import live_nodes
from foreplan.ops.loop import Loop
from foreplan.passes.base import Pass
from foreplan.passes.rewrite import rewrite_ops


@dataclass(frozen=True)
class WriteOutLoops(Pass, requires=("forward",), ensures=("forward", "no loops"), optional=True):
    """The graph with the nodes of each loop's body once for each step.

    It serves targets without loops, and narrow types, whose conversions would have to enter the body.
    """

    def _run(self, graph: Graph) -> Graph:
        def replace(b: Builder, node: Node[Loop], inputs: tuple[Value, ...]) -> Sequence[Value] | None:
            b.scope = f"{node.name}/"
            return node.op.decompose(b, inputs)

        while graph.nodes_of(Loop):  # a body may hold another loop
            graph = rewrite_ops(graph, replace, Loop)
        return graph


write_out_loops = WriteOutLoops()


@dataclass(frozen=True)
class TrimLoops(Pass, requires=("plain ops",), ensures=("plain ops",), optional=True):
    """The graph with loops that compute nothing but what is read: no stacks, carries or histories without readers, and
    no stack beside a history that has it.

    It serves scans whose outputs or last carries are not all used, such as what is kept for a gradient that nobody asks
    for, and recurrent layers, whose outputs are carries.
    """

    def _run(self, graph: Graph) -> Graph:
        read = graph.returned.union(*(node.inputs for node in graph.nodes))

        def replace(b: Builder, node: Node[Loop], inputs: tuple[Value, ...]) -> Sequence[Value] | None:
            return _trimmed(b, node, inputs, [value in read for value in node.outputs])

        return rewrite_ops(graph, replace, Loop) if graph.nodes_of(Loop) else graph


trim_loops = TrimLoops()


def _trimmed(b: Builder, node: Node[Loop], inputs: Sequence[Value], wanted: Sequence[bool]) -> list[Value] | None:
    """The outputs of a smaller loop, and those that nobody reads as they were; None if it cannot be smaller."""
    op, body, last = node.op, node.op.graph, len(node.op.results)
    histories = [i for i, want in zip(op.histories, wanted[last:]) if want]
    after = {op.results[i]: i for i in histories}
    shared = {
        j: after[value]
        for j, value in enumerate(op.results)
        if wanted[j] and op.carries <= j < last - max(op.kept, 0) and value in after
    }
    needed = [want and j not in shared for j, want in enumerate(wanted[:last])]
    while True:  # a carry is needed if a step reads it for what is needed
        results = [value for i, value in enumerate(op.results) if needed[i] or i in histories]
        nodes = live_nodes(body, results)
        used = {value for each in nodes for value in each.inputs}.union(results)
        more = [
            need or (i < op.carries and (body.inputs[i] in used or i in histories)) for i, need in enumerate(needed)
        ]
        if more == needed:
            break
        needed = more
    keeps = [needed[i] if i < op.carries else value in used for i, value in enumerate(body.inputs)]
    if all(needed) and all(keeps) and len(histories) == len(op.histories):
        return None
    names = list(body.outputs)
    smaller = dataclasses.replace(
        body,
        inputs=tuple(value for value, keep in zip(body.inputs, keeps) if keep),
        nodes=nodes,
        outputs={name: body.outputs[name] for name, need in zip(names, needed) if need},
    )
    loop = dataclasses.replace(
        op,
        body=smaller.as_text(),
        carries=sum(needed[: op.carries]),
        slices=sum(keeps[op.carries : op.carries + op.slices]),
        kept=op.kept if op.kept < 0 else sum(needed[last - op.kept : last]),
        histories=tuple(sum(needed[:i]) for i in histories),
    )
    b.scope = ""
    made = b.node(loop, *(x for x, keep in zip(inputs, keeps) if keep), name=node.name)
    places = [*(i for i, need in enumerate(needed) if need), *(last + op.histories.index(i) for i in histories)]
    outputs = list(node.outputs)
    for place, value in zip(places, made):
        outputs[place] = value
    for j, i in shared.items():
        outputs[j] = loop.slices_of(b, outputs[last + op.histories.index(i)], after=True)
    return outputs

"""Loops written out, and loops without what nobody reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from foreplan.graph import Builder, Graph, Node, Value
from foreplan.graph.text import print_graph
from foreplan.graph.walk import live_nodes
from foreplan.ops.loop import Loop
from foreplan.passes.rewrite import rewrite


def write_out_loops(graph: Graph) -> Graph:
    """The graph with the nodes of each loop's body once for each step.

    It serves targets without loops, and narrow types, whose conversions would have to enter the body.
    """

    def replace(b: Builder, node: Node, inputs: tuple[Value, ...]) -> Sequence[Value] | None:
        if not isinstance(node.op, Loop):
            return None
        b.scope = f"{node.name}/"
        return node.op.decompose(b, inputs)

    while any(isinstance(node.op, Loop) for node in graph.nodes):  # a body may hold another loop
        graph = rewrite(graph, replace)
    return graph


def trim_loops(graph: Graph) -> Graph:
    """The graph with loops that compute nothing but what is read: no stacks and no carries without readers.

    It serves scans whose outputs or last carries are not all used, such as what is kept for a gradient that nobody asks
    for.
    """
    read = graph.returned.union(*(node.inputs for node in graph.nodes))

    def replace(b: Builder, node: Node, inputs: tuple[Value, ...]) -> Sequence[Value] | None:
        if not isinstance(node.op, Loop):
            return None
        wanted = [value in read for value in node.outputs]
        return _trimmed(b, node, node.op, inputs, wanted)

    return rewrite(graph, replace) if any(isinstance(node.op, Loop) for node in graph.nodes) else graph


def _trimmed(b: Builder, node: Node, op: Loop, inputs: Sequence[Value], wanted: list[bool]) -> list[Value] | None:
    """The outputs of a smaller loop, and those that nobody reads as they were; None if it cannot be smaller."""
    body, names = op.graph, list(op.graph.outputs)
    needed = list(wanted)
    while True:  # a carry is needed if a step reads it for what is needed
        results = [value for value, need in zip(op.results, needed) if need]
        nodes = live_nodes(body, results)
        used = {value for each in nodes for value in each.inputs}.union(results)
        more = [need or (i < op.carries and body.inputs[i] in used) for i, need in enumerate(needed)]
        if more == needed:
            break
        needed = more
    keeps = [needed[i] if i < op.carries else value in used for i, value in enumerate(body.inputs)]
    if all(needed) and all(keeps):
        return None
    smaller = dataclasses.replace(
        body,
        inputs=tuple(value for value, keep in zip(body.inputs, keeps) if keep),
        nodes=nodes,
        outputs={name: body.outputs[name] for name, need in zip(names, needed) if need},
    )
    last = len(names) - max(op.kept, 0)
    loop = dataclasses.replace(
        op,
        body=print_graph(smaller),
        carries=sum(needed[: op.carries]),
        slices=sum(keeps[op.carries : op.carries + op.slices]),
        kept=op.kept if op.kept < 0 else sum(needed[last:]),
    )
    b.scope = ""
    made = iter(b.node(loop, *(x for x, keep in zip(inputs, keeps) if keep), name=node.name))
    return [next(made) if need else value for need, value in zip(needed, node.outputs)]

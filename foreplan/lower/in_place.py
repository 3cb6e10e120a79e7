"""What is gathered as the next content of a stored value, such as updated parameters of all ranks."""

from __future__ import annotations

from dataclasses import replace

from foreplan.graph import Graph, Node
from foreplan.ops.collective import Begin, Finish
from foreplan.passes.ranks import Beside


def gathered_in_place(graph: Graph, beside: Beside) -> Graph:
    """The graph in which the next content of a stored value arrives in the place of the old one, by an action that
    begins and waits at once. What waits later needs a place of its own beside that, and a copy.

    Args:
        beside: whether an exchange goes on beside computing: of those alone that do not, nothing is lost.
    """
    begun = {
        first.outputs[0]: first
        for first in graph.nodes_of(Begin)
        if first.op.kind == "all_gather" and not first.op.wait and not beside(first.op)
    }
    contents = set(graph.updates.values())
    ends = [node for node in graph.nodes_of(Finish) if node.outputs[0] in contents]
    at_once = {node.inputs[0]: node for node in ends if node.inputs[0] in begun}
    nodes = list[Node]()
    for node in graph.nodes:
        if node.outputs[0] in at_once:
            continue
        if node.inputs and at_once.get(node.inputs[0]) is node:
            first = begun[node.inputs[0]]
            node = replace(node, op=replace(first.op, wait=True), inputs=first.inputs)
        elif node.of(Finish):  # which need not wait for the others any more
            node = replace(node, inputs=tuple(x for x in node.inputs if x not in at_once))
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes)) if at_once else graph

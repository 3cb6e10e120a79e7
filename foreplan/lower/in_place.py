"""What is gathered as the next content of a stored value, such as updated parameters of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from foreplan.graph import Graph, Node, Value
from foreplan.ops.collective import Begin, Finish


def gathered_in_place(graph: Graph, beside: Callable[[Begin], bool]) -> Graph:
    """The graph in which the next content of a stored value arrives in the place of the old one, by an action that
    begins and waits at once. What waits later needs a place of its own beside that, and a copy.

    Args:
        beside: whether an exchange goes on beside computing: of those alone that do not, nothing is lost.
    """
    begun = dict[Value, tuple[Begin, Node]]()
    for node in graph.nodes:
        if isinstance(node.op, Begin) and node.op.kind == "all_gather" and not node.op.wait and not beside(node.op):
            begun[node.outputs[0]] = node.op, node
    contents = set(graph.updates.values())
    ends = [node for node in graph.nodes if isinstance(node.op, Finish) and node.outputs[0] in contents]
    at_once = {node.inputs[0]: node for node in ends if node.inputs[0] in begun}
    nodes = list[Node]()
    for node in graph.nodes:
        if node.outputs[0] in at_once:
            continue
        if node.inputs and at_once.get(node.inputs[0]) is node:
            op, first = begun[node.inputs[0]]
            node = replace(node, op=replace(op, wait=True), inputs=first.inputs)
        elif isinstance(node.op, Finish):  # which need not wait for the others any more
            node = replace(node, inputs=tuple(x for x in node.inputs if x not in at_once))
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes)) if at_once else graph

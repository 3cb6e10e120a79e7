"""Gradients of inputs, of which each rank of a group has a summand."""

from __future__ import annotations

from foreplan.graph import Builder, Graph
from foreplan.ops.collective import AllReduce


def sum_input_gradients(graph: Graph, ranks: int) -> Graph:
    """The step that returns their sums; what it returns of parameters stays as it is."""
    b = Builder(base=graph)
    gradients = dict(graph.gradients)
    for name in sorted(gradients.keys() & {value.name for value in graph.inputs}):
        gradients[name] = b.apply(AllReduce(ranks), gradients[name], name=f"{name}/sum")
    return b.finish(graph.outputs, graph.updates, graph.loss, gradients)

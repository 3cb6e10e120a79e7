"""Properties of graphs that passes require and ensure, and their checks."""

from __future__ import annotations

from typing import Literal

from foreplan.graph import Graph, Kind, Window
from foreplan.passes.decompose import Machine
from foreplan.passes.training import training_form

Property = Literal["loss", "training form", "backward", "kernels"]


def complaint(wanted: Property, graph: Graph, machine: Machine | None) -> str:
    """Why a graph lacks a property; empty if it has it."""
    if wanted == "loss":
        return "" if graph.loss is not None else "it has none"
    if wanted == "training form":
        pairs = zip(graph.nodes, training_form(graph).nodes)
        return next((f"{node.name} is not in it" for node, other in pairs if node.op != other.op), "")
    if wanted == "backward":
        found = any(value.kind is Kind.GRADIENT for node in graph.nodes for value in node.outputs)
        return "" if found or graph.gradients else "nothing in it is a gradient"
    assert machine is not None
    for node in graph.nodes:
        reads, writes = ([Window.dense(value.type) for value in values] for values in (node.inputs, node.outputs))
        if not node.op.is_view and not machine.kernels(node.op, reads, writes):
            return f"there is none for {node.name}"
    return ""

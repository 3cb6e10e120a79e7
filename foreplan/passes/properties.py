"""Properties of graphs that passes require and ensure, and their checks."""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakKeyDictionary

from foreplan.graph import Graph, Kind, Op, Window
from foreplan.graph.ir import live_nodes
from foreplan.ops.conv.mapped import ConvMap
from foreplan.ops.loop import Loop
from foreplan.ops.marks import Gradient, Mark
from foreplan.ops.matmul_map import MatMulMap
from foreplan.ops.multi_map import MultiMap
from foreplan.passes.base import Property
from foreplan.passes.decompose import Machine
from foreplan.passes.missing_gradients import NOTHING
from foreplan.passes.quantised_weights import schemes
from foreplan.passes.training import training_form

_found: WeakKeyDictionary[Graph, dict[Property, str]] = WeakKeyDictionary()


def complaint(wanted: Property, graph: Graph, machine: Machine | None = None) -> str:
    """Why a graph lacks a property; empty if it has it.

    Args:
        machine: the target, for what is asked of its kernels.
    """
    if wanted == "kernels":
        return "" if machine is None else _without_kernel(graph, machine)
    known = _found.setdefault(graph, {})
    if wanted not in known:
        known[wanted] = _CHECKS[wanted](graph)
    return known[wanted]


def _without_kernel(graph: Graph, machine: Machine) -> str:
    for node in graph.nodes:
        reads, writes = ([Window.dense(value.type) for value in values] for values in (node.inputs, node.outputs))
        if not node.op.is_view and not machine.kernels(node.op, reads, writes):
            return f"there is none for {node.name}"
    return ""


def _not_forward(graph: Graph) -> str:
    used = [*graph.gradients, *(old.name for old, new in graph.updates.items() if new.kind is Kind.GRADIENT)]
    return f"it has what backward makes of {used[0]!r}" if used else ""


def _not_in_training_form(graph: Graph) -> str:
    formed = {node.name: node.op for node in training_form(graph).nodes}
    live = [node for node in live_nodes(graph, graph.results) if formed.get(node.name) != node.op]
    names = (node.name for node in live if not node.of(Loop))  # whose derivative takes the form by itself
    return next((f"{name} is not in it" for name in names), "")


def _without_backward(graph: Graph) -> str:
    told = any(note.startswith(NOTHING) for note in graph.notes)  # every gradient ends on the way
    return "" if told or _not_forward(graph) else "it returns no gradient, and updates nothing by one"


def _dead(graph: Graph) -> str:
    live = set(live_nodes(graph, graph.results))
    return next((f"nothing reads {node.name}" for node in graph.nodes if node not in live), "")


def _lacking(*ops: type[Op]) -> Callable[[Graph], str]:
    """The check that no node is of these ops."""
    return lambda graph: next((f"{node.name} is one" for node in graph.nodes_of(*ops)), "")


def _narrow(graph: Graph) -> str:
    return next((f"{value!r} is not" for value in graph.parameters if value.dtype.is_narrow), "")


def is_step(graph: Graph) -> bool:
    """Whether a graph has its backward pass already."""
    return bool(_not_forward(graph))


_CHECKS: dict[Property, Callable[[Graph], str]] = {
    "forward": _not_forward,  # nothing that it returns or updates comes from a backward pass
    "loss": lambda graph: "" if graph.loss is not None else "it has none",
    "training form": _not_in_training_form,  # its ops are as training wants them: batch statistics, random masks
    "backward": _without_backward,  # it returns gradients, or updates what they are for
    "live": _dead,  # every node is needed by a result
    "no loops": _lacking(Loop),
    "no marks": _lacking(Mark),  # for differentiation, which is over
    "no inner gradients": _lacking(Gradient),  # that the model itself asks for
    "floating-point weights": lambda graph: "it has quantised weights" if schemes(graph) else "",
    "wide weights": _narrow,  # parameters are at least float32
    "plain ops": _lacking(ConvMap, MatMulMap, MultiMap),  # none that passes of a target make of several
}

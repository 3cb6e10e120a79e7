"""Which parameters get no gradient, or one that is zero for certain, and which nodes stop it."""

from __future__ import annotations

from collections.abc import Iterator

from foreplan.base.units import listed
from foreplan.graph import Graph, Node, Value
from foreplan.ops.custom_gradient import CustomGradient
from foreplan.ops.expr import Arg, Call, Expr, derivative, subexpressions
from foreplan.ops.expr.nodes import is_literal
from foreplan.ops.map import Map
from foreplan.ops.marks import StopGradient, StraightThrough

NOTHING = "nothing is trained"  # how the note begins that says so


def missing_gradient_notes(graph: Graph) -> Iterator[str]:
    """What a person should know of parameters that no step changes by their gradients.

    Args:
        graph: a forward graph with its loss.
    """
    assert graph.loss is not None
    read, reached, stops = {graph.loss}, {graph.loss}, []
    parameters = set(graph.parameters)
    behind = _behind(graph, parameters)
    for node in reversed(graph.nodes):
        if read.isdisjoint(node.outputs):
            continue
        read.update(_read(node))
        if reached.isdisjoint(node.outputs):
            continue
        passed = _passed(node)
        reached.update(passed)
        if not behind.isdisjoint(node.inputs) and behind.isdisjoint(passed):
            stops.append(f"{node.name!r} ({node.op.name})")
    if unread := [value.name for value in graph.parameters if value not in read]:
        yield f"the loss does not depend on {listed(unread, 5)}: no gradient, no update"
    stopped = [value.name for value in graph.parameters if value in read and value not in reached]
    if stopped:
        verb = "passes" if len(stops) == 1 else "pass"
        yield f"no gradient reaches {listed(stopped, 5)}: {listed(stops, 3)} {verb} none back"
    if stopped and parameters.isdisjoint(reached):
        yield (
            f"{NOTHING}: none of {len(parameters)} parameters gets a gradient. Put straight_through(y, x) or "
            "a function with a derivative in the place of what passes none, or train what lies behind it"
        )


def _behind(graph: Graph, parameters: set[Value]) -> set[Value]:
    """All that is computed from parameters, of any type."""
    found = set(parameters)
    for node in graph.nodes:
        if not found.isdisjoint(_read(node)):
            found.update(node.outputs)
    return found


def _read(node: Node) -> tuple[Value, ...]:
    """The inputs that a result, or its gradient, depends on."""
    if isinstance(node.op, StopGradient):
        return ()
    return node.inputs[1:] if isinstance(node.op, StraightThrough) else node.inputs


def _passed(node: Node) -> set[Value]:
    """The inputs that get a gradient."""
    inputs = _read(node)
    if isinstance(node.op, Map):
        count, found = len(node.inputs), set()
        for i, expr in enumerate(node.op.parsed):
            flows = derivative(expr, Arg(count + len(node.outputs) + i), Arg(count + i))
            found |= {index for index, flow in flows.items() if not _is_zero(flow)}
        inputs = tuple(node.inputs[index] for index in found)
    if isinstance(node.op, CustomGradient):
        inputs = tuple(node.op.reached(node.inputs))
    return {value for value in inputs if value.dtype.is_float}


def _is_zero(flow: Expr) -> bool:
    """Whether a derivative is a product with zero."""
    zero: dict[Expr, bool] = {}
    for part in subexpressions(flow):
        args = [zero[arg] for arg in part.args] if isinstance(part, Call) else []
        if isinstance(part, Call) and part.function == "mul":
            zero[part] = any(args)
        elif isinstance(part, Call):
            zero[part] = part.function in ("add", "sub", "neg") and all(args)
        else:
            zero[part] = is_literal(part, 0)
    return zero[flow]

"""Which parameters get no gradient, or one that is zero for certain, and which nodes stop it."""

from __future__ import annotations

from collections.abc import Iterator

from foreplan.base.units import listed
from foreplan.graph import Graph, Value

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
        read.update(node.op.dependencies(node.inputs))
        if reached.isdisjoint(node.outputs):
            continue
        passed = set(node.op.reached(node.inputs))
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
        if not found.isdisjoint(node.op.dependencies(node.inputs)):
            found.update(node.outputs)
    return found

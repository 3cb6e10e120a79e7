"""The graph as a networkx DiGraph, and the walks that passes share."""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import TYPE_CHECKING

from foreplan.errors import UsageError
from foreplan.graph.ir import Graph, Node, Value

if TYPE_CHECKING:
    import networkx


def networkx_here() -> ModuleType:
    """The module networkx, which is an extra.

    Raises:
        UsageError: it is not installed.
    """
    try:
        import networkx
    except ImportError as error:
        raise UsageError(
            f"this needs networkx, which cannot be imported ({error}); "
            "install it with `pip install 'foreplan[networkx]'`"
        ) from error
    return networkx


def to_networkx(graph: Graph) -> networkx.DiGraph:
    """A DiGraph over Values and Nodes: value → node that reads it, node → value it computes.

    Attributes: `label` on every vertex; on the graph, `name`.

    Raises:
        UsageError: networkx is not installed.
    """
    digraph: networkx.DiGraph = networkx_here().DiGraph(name=graph.name)
    for value in graph.values():
        digraph.add_node(value, label=repr(value))
    for node in graph.nodes:
        digraph.add_node(node, label=f"{node.name}: {node.op.name}")
        digraph.add_edges_from((value, node) for value in node.inputs)
        digraph.add_edges_from((node, value) for value in node.outputs)
    return digraph


def live_nodes(graph: Graph, results: Iterable[Value]) -> tuple[Node, ...]:
    """The nodes that the results depend on, in order."""
    needed = set(results)
    kept = []
    for node in reversed(graph.nodes):
        if not needed.isdisjoint(node.outputs):
            kept.append(node)
            needed.update(node.inputs)
    return tuple(reversed(kept))

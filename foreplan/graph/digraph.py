"""A graph as a networkx DiGraph."""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import TYPE_CHECKING

from foreplan.base.errors import UsageError
from foreplan.graph.op import Node
from foreplan.graph.value import Value

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


def to_networkx(name: str, values: Iterable[Value], nodes: Iterable[Node]) -> networkx.DiGraph:
    """A DiGraph over Values and Nodes: value → node that reads it, node → value it computes.

    Attributes: `label` on every vertex; on the graph, `name`.

    Raises:
        UsageError: networkx is not installed.
    """
    digraph: networkx.DiGraph = networkx_here().DiGraph(name=name)
    for value in values:
        digraph.add_node(value, label=repr(value))
    for node in nodes:
        digraph.add_node(node, label=f"{node.name}: {node.op.name}")
        digraph.add_edges_from((value, node) for value in node.inputs)
        digraph.add_edges_from((node, value) for value in node.outputs)
    return digraph

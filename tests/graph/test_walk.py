"""A graph as a DiGraph of networkx, which is an extra."""

from __future__ import annotations

import sys

import pytest

from foreplan.base.errors import UsageError
from foreplan.graph import Graph, GraphBuilder, TensorType, as_dtype
from foreplan.ops.map import elementwise


def small() -> Graph:
    b = GraphBuilder()
    x, y = (b.input(name, TensorType(as_dtype("float32"), (3,))) for name in "xy")
    return b.finish({"z": elementwise(b, lambda x, y: x * y, x, y)})


def test_edges_follow_the_data() -> None:
    graph = small()
    (node,) = graph.nodes
    found = graph.to_networkx()
    assert set(found.edges) == {*((value, node) for value in graph.inputs), (node, graph.outputs["z"])}
    assert found.graph["name"] == graph.name
    assert found.nodes[node]["label"] == f"{node.name}: map"


def test_without_networkx_an_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "networkx", None)
    with pytest.raises(UsageError, match=r"pip install 'foreplan\[networkx\]'"):
        small().to_networkx()

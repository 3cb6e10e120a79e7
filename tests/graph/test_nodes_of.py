"""Nodes by the type of their op: all of a graph, what makes a value, what alone reads it."""

from __future__ import annotations

from foreplan.graph import Graph, Node, Op, parse_graph
from foreplan.ops.map import Map
from foreplan.ops.matmul import MatMul
from foreplan.ops.shape import Reshape, Transpose, ViewOp
from foreplan.passes.rewrite import rewrite_ops

TEXT = """graph %g
input %x: float32[2,3]
%t: float32[3,2] = transpose(perm=(1, 0)) [%x] as %t
%r: float32[2,3] = reshape(shape=(2, 3)) [%t] as %r
%p: float32[2,2] = matmul(transpose_b=True) [%r, %r] as %p
%y: float32[2,2] = map(exprs=('exp(a0)',)) [%p] as %y
%z: float32[2,2] = map(exprs=('(a0 + a1)',)) [%y, %p] as %z
output %y = %y
output %z = %z
"""


def graph_and_values() -> tuple[Graph, dict]:
    graph = parse_graph(TEXT)
    return graph, {value.name: value for value in graph.values()}


def names(nodes: tuple[Node, ...]) -> list[str]:
    return [node.name for node in nodes]


def test_nodes_come_in_order_by_one_or_several_types_and_by_what_these_inherit() -> None:
    graph, _ = graph_and_values()
    assert names(graph.nodes_of(Map)) == ["y", "z"]
    assert names(graph.nodes_of(Map, Reshape)) == ["r", "y", "z"]
    assert names(graph.nodes_of(ViewOp)) == ["t", "r"]
    assert graph.nodes_of(Op) == graph.nodes


def test_a_node_is_itself_or_none() -> None:
    graph, _ = graph_and_values()
    node = graph.nodes[0]
    assert node.of(Transpose) is node and node.of(Map, ViewOp) is node and node.of(Map) is None


def test_what_makes_a_value() -> None:
    graph, values = graph_and_values()
    made = graph.made_by(values["p"], MatMul)
    assert made is graph.nodes[2] and made.op.transpose_b
    assert graph.made_by(values["p"], Map, Reshape) is None
    assert graph.made_by(values["x"], Op) is None  # an input


def test_what_alone_reads_a_value() -> None:
    graph, values = graph_and_values()
    assert graph.only_reader(values["x"], Op) is graph.nodes[0]
    assert graph.only_reader(values["x"], Map) is None
    assert graph.only_reader(values["r"], MatMul) is graph.nodes[2]  # which reads it twice
    assert graph.only_reader(values["p"], Op) is None  # two nodes read it
    assert graph.only_reader(values["y"], Op) is None  # a result
    assert graph.only_reader(values["z"], Op) is None  # nothing does


def test_whether_a_map_is_a_sum() -> None:
    graph, _ = graph_and_values()
    assert [node.op.is_sum for node in graph.nodes_of(Map)] == [False, True]
    assert not Map(("(a0 + a0)",)).is_sum and not Map(("(a0 + a1)", "a0")).is_sum


def test_a_rewrite_of_some_ops_copies_all_others() -> None:
    graph, _ = graph_and_values()
    asked: list[str] = []
    same = rewrite_ops(graph, lambda b, node, inputs: asked.append(node.name), Map, Transpose)
    assert same is graph and asked == ["t", "y", "z"]
    passed = rewrite_ops(graph, lambda b, node, inputs: inputs[:1], Map)
    assert names(passed.nodes) == ["t", "r", "p"] and {value.name for value in passed.outputs.values()} == {"p"}

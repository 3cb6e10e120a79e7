"""What a graph must obey: types are checked wherever they were not inferred."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from foreplan.base.errors import ModelError
from foreplan.graph import Builder, Fill, Graph, GraphBuilder, Kind, Node, Value
from foreplan.graph.types import TensorType, tensor_type
from foreplan.ops.map import Map
from foreplan.ops.matmul import MatMul
from foreplan.passes.rewrite import rewrite

TWO, SIX = tensor_type("float32[2,3]"), tensor_type("float32[6]")


def lying(type: TensorType) -> Node:
    """A node that says that it gives another type than it does."""
    x = Value("x", TWO, Kind.INPUT)
    return Node(Map(("a0 + 1.0",)), (x,), (Value("y", type),), "add")


def finished(b: Builder, node: Node) -> Graph:
    b.inputs.append(node.inputs[0])
    b.append(node)
    return b.finish({"y": node.outputs[0]})


def test_a_node_that_is_taken_over_is_checked() -> None:
    assert finished(GraphBuilder(), lying(TWO)).outputs["y"].type == TWO
    with pytest.raises(
        ModelError, match=r"node 'add' .* map gives float32\[2,3\], but its outputs are %y: float32\[6\]"
    ):
        finished(GraphBuilder(), lying(SIX))


def test_a_copy_that_reads_another_type_is_checked() -> None:
    """A pass puts a scalar in the place of what a node reads: what the node gives is no longer what it says."""
    b = GraphBuilder()
    x = b.input("x", TWO)
    y = b.apply(Map(("exp(a0)",)), b.apply(Map(("a0 + 1.0",)), x, name="first"), name="second")
    graph = b.finish({"y": y})

    def replace(b: Builder, node: Node, inputs: tuple[Value, ...]) -> Sequence[Value] | None:
        return b.node(Map(("a0 * 2.0",)), b.input("s", tensor_type("float32[]"))) if node.name == "first" else None

    with pytest.raises(ModelError, match=r"node 'second' .* gives float32\[\], but its outputs are %second"):
        rewrite(graph, replace)


def test_a_copy_that_reads_what_its_op_cannot_take_is_refused_by_name() -> None:
    b = GraphBuilder()
    x, w = b.input("x", TWO), b.input("w", tensor_type("float32[3,4]"))
    graph = b.finish({"y": b.apply(MatMul(), b.apply(Map(("a0 + 1.0",)), x, name="first"), w, name="product")})

    def replace(b: Builder, node: Node, inputs: tuple[Value, ...]) -> Sequence[Value] | None:
        return b.node(Map(("a0 * 2.0",)), b.input("s", tensor_type("float32[2,5]"))) if node.name == "first" else None

    with pytest.raises(ModelError, match="node 'product' of graph"):
        rewrite(graph, replace)


@pytest.mark.parametrize("which", ["input", "stored", "node", "output"])
def test_a_name_that_no_file_can_hold_is_refused(which: str) -> None:
    """As Python reads the name of a file that is not UTF-8."""
    names = {each: each for each in ("input", "stored", "node", "output")} | {which: "caf\udce9"}
    b = GraphBuilder()
    x = b.input(names["input"], TWO)
    w = b.store(names["stored"], TWO, Kind.PARAMETER, Fill(0.0))
    y = b.apply(Map(("(a0 + a1)",)), x, w, name=names["node"])
    with pytest.raises(ModelError, match=r"the name 'caf\\udce9' .* cannot be written as UTF-8"):
        b.finish({names["output"]: y})

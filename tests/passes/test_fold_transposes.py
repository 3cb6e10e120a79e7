"""Transposes before products, and what is left of them in a training step."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import foreplan as fp
from foreplan.graph import Graph, GraphBuilder, TensorType
from foreplan.graph.types import FLOAT32
from foreplan.ops.matmul import MatMul, matmul
from foreplan.ops.shape import Transpose, transpose
from foreplan.passes import fold_transposes

RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("turn_a", [False, True])
@pytest.mark.parametrize("turn_b", [False, True])
def test_the_flags_say_what_the_transposes_did(turn_a: bool, turn_b: bool) -> None:
    """Also those of products, which are folded themselves."""
    a, b = normal(5, 7), normal(7, 6)
    given = [x.T.copy() if turn else x for x, turn in ((a, turn_a), (b, turn_b))]
    builder = GraphBuilder("products")
    x, y = (builder.input(name, TensorType(FLOAT32, array.shape)) for name, array in zip("xy", given))
    left = transpose(builder, x, (1, 0)) if turn_a else x
    right = transpose(builder, y, (1, 0)) if turn_b else y
    product = matmul(builder, left, right)
    graph = fold_transposes(builder.finish({"z": matmul(builder, product, transpose(builder, product, (1, 0)))}))
    products = [node for node in graph.nodes if isinstance(node.op, MatMul)]
    read = [graph.producer.get(value) for node in products for value in node.inputs]
    assert not any(node is not None and isinstance(node.op, Transpose) for node in read)
    first, last = (node.op for node in products)
    assert (first.transpose_a, first.transpose_b, last.transpose_a, last.transpose_b) == (turn_a, turn_b, False, True)
    found = fp.compile(graph, target="numpy").bind().step(dict(zip("xy", given))).outputs["z"]
    np.testing.assert_allclose(found, (a @ b) @ (a @ b).T, rtol=1e-5)


def test_other_transposes_stay() -> None:
    builder = GraphBuilder("heads")
    x, y = (builder.input(name, TensorType(FLOAT32, shape)) for name, shape in (("x", (3, 7, 5)), ("y", (3, 7, 6))))
    graph = builder.finish({"z": matmul(builder, transpose(builder, x, (0, 2, 1)), y)})
    assert [node.op for node in fold_transposes(graph).nodes] == [node.op for node in graph.nodes]


def linear_layers(turned: bool) -> Graph:
    """Three layers of 64 x 64, of ONNX's Gemm, or of a transpose and a product as PyTorch's exporter writes them."""
    nodes, weights = [], [helper.make_tensor(f"w{i}", TensorProto.FLOAT, (64, 64), normal(64, 64)) for i in range(3)]
    for i in range(3):
        if turned:
            nodes.append(helper.make_node("Transpose", [f"w{i}"], [f"t{i}"], perm=[1, 0]))
            nodes.append(helper.make_node("MatMul", [f"x{i}", f"t{i}"], [f"y{i}"]))
        else:
            nodes.append(helper.make_node("Gemm", [f"x{i}", f"w{i}"], [f"y{i}"], transB=1))
        nodes.append(helper.make_node("Relu", [f"y{i}"], [f"x{i + 1}"]))
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, (16, 64)) for name in ("x0", "x3")]
    graph = helper.make_graph(nodes, "layers", ends[:1], ends[1:], weights)
    return fp.from_onnx(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", onnx.defs.onnx_opset_version())])
    )


def test_gradients_lie_as_their_weights() -> None:
    """An update reads all along rows, and the step takes no more bytes than one without transposes."""
    plain, found = (
        fp.compile(linear_layers(turned), loss="mean", optimizer=fp.optim.Nesterov(0.1), target="cpu:threads=1")
        for turned in (False, True)
    )
    assert found.arena_bytes == plain.arena_bytes
    updates = [call for call in found.program.calls if call.node.endswith("/update")]
    assert updates or any(call.op.name == "matmul_map" for call in found.program.calls)
    for operand in (operand for call in updates for operand in (*call.inputs, *call.outputs)):
        strides = [step for extent, step in zip(operand.type.shape, operand.strides) if extent > 1]
        assert strides == sorted(strides, reverse=True), operand

"""What is left of transposes in a training step: beside the texts of `fold_transposes/`."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper

import foreplan as fp
from foreplan.graph import Graph


def linear_layers(turned: bool) -> Graph:
    """Three layers of 64 x 64, of ONNX's Gemm, or of a transpose and a product as PyTorch's exporter writes them."""
    rng = np.random.default_rng(0)
    given = [rng.standard_normal((64, 64)).astype(np.float32) for _ in range(3)]
    nodes, weights = [], [helper.make_tensor(f"w{i}", TensorProto.FLOAT, w.shape, w) for i, w in enumerate(given)]
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

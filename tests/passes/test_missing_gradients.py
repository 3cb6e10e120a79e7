"""Parameters that get no gradient, beside the texts of `differentiate/`: in whole steps."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import foreplan as fp
from foreplan.frontend.onnx import from_onnx
from tests.frontend.onnx.models import info, node


def test_rounding_straight_through_is_no_note() -> None:
    def rounded(x: fp.Tensor) -> fp.Tensor:
        y = fp.nn.linear(x, 3, name="first")
        return fp.nn.linear(fp.straight_through(np.round(y), y), 2, name="last")

    step = fp.compile(fp.trace(rounded, fp.spec((4, 6))), fp.losses.mse, fp.optim.SGD(0.1), target="numpy")
    assert not [note for note in step.program.notes if "gradient" in note]


def test_a_model_of_integers_alone_is_refused_with_what_to_do() -> None:
    """QLinearMatMul and its like give no gradient."""
    rng = np.random.default_rng(0)
    held = {"s": np.float32(0.1), "z": np.uint8(3), "w": rng.integers(0, 255, (8, 4)).astype(np.uint8)}
    nodes = [
        node("QuantizeLinear", "x s z", "q"),
        node("QLinearMatMul", "q s z w s z s z", "p"),
        node("DequantizeLinear", "p s z", "y"),
    ]
    tensors = [numpy_helper.from_array(np.asarray(array), name) for name, array in held.items()]
    outputs = [info("y", None, TensorProto.FLOAT)]
    graph = helper.make_graph(nodes, "integers", [info("x", (2, 8))], outputs, tensors)
    imported = from_onnx(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))
    with pytest.raises(
        fp.ModelError, match=r"'w' are integers that QLinearMatMul reads.*; train the model before it is"
    ):
        fp.compile(imported, fp.losses.mse, fp.optim.SGD(0.1), target="numpy")

"""Notes on parameters that get no gradient: what stops it is named, and a step that trains nothing is told as such."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import foreplan as fp
from foreplan.frontend.onnx import from_onnx
from tests.frontend.onnx.models import info, model, node, random

ROUNDING = ["Round", "Floor", "Ceil", "Sign"]


def notes_of(nodes: list[onnx.NodeProto], *weights: str) -> list[str]:
    graph = from_onnx(model(nodes, {"x": (2, 8)}, ["y"], {name: random(8, 8) for name in weights}))
    return list(fp.compile(graph, fp.losses.mse, fp.optim.SGD(0.1), target="numpy").program.notes)


@pytest.mark.parametrize("op", ROUNDING)
def test_what_lies_before_a_rounding_gets_no_gradient_and_a_note_names_both(op: str) -> None:
    nodes = [node("MatMul", "x w", "h"), node(op, "h", "k", "rounding"), node("MatMul", "k v", "y")]
    assert notes_of(nodes, "w", "v") == ["no gradient reaches w: 'rounding' (map) passes none back"]


@pytest.mark.parametrize("op", ROUNDING)
def test_a_step_that_trains_nothing_is_told(op: str) -> None:
    told = notes_of([node("MatMul", "x w", "h"), node(op, "h", "k"), node("Relu", "k", "y")], "w")
    assert any(note.startswith("nothing is trained: none of 1 parameters gets a gradient") for note in told)


@pytest.mark.parametrize("op", ["Relu", "Abs", "Sigmoid", "Clip", "Identity"])
def test_a_gradient_that_may_be_zero_is_no_note(op: str) -> None:
    assert not notes_of([node("MatMul", "x w", "h"), node(op, "h", "k"), node("MatMul", "k v", "y")], "w", "v")


def test_a_second_way_around_a_rounding_lets_the_gradient_pass() -> None:
    nodes = [node("MatMul", "x w", "h"), node("Round", "h", "k"), node("Add", "h k", "y")]
    assert not notes_of(nodes, "w")


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

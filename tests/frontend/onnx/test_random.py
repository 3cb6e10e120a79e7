"""Random tensors and dropout of ONNX models."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import foreplan as fp
from foreplan.frontend import from_onnx
from foreplan.graph.value import Kind
from tests.frontend.onnx.models import model, node, random, run


def test_random_tensors_differ_from_each_other_and_the_state_moves_on() -> None:
    nodes = [node("RandomNormalLike", "x", "a"), node("RandomUniform", "", "b", shape=[64], low=2.0, high=3.0)]
    nodes[1].input.pop() if nodes[1].input else None
    graph = from_onnx(model([*nodes, node("RandomNormalLike", "x", "c")], {"x": (64,)}, ["a", "b", "c"]))
    got = run(graph, x=random(64))
    assert not np.array_equal(got["a"], got["c"]) and (got["b"] >= 2).all() and (got["b"] < 3).all()
    (state,) = graph.updates
    assert state.kind is Kind.STATE and state.type.dtype.name == "uint64"


def dropout(training: bool, ratio: float = 0.25) -> onnx.ModelProto:
    constants = {"r": np.array(ratio, np.float32), "t": np.array(training)}
    constants["w"] = np.ones((100, 100), np.float32)
    nodes = [node("Mul", "x w", "p"), node("Dropout", "p r t", "y mask", "drop")]
    return model(nodes, {"x": (100, 100)}, ["y", "mask"], constants, opset=13)


@pytest.mark.parametrize("trained", [False, True])
def test_dropout_in_training_mode_drops_in_every_step(trained: bool) -> None:
    graph = from_onnx(dropout(training=True))
    (note,) = graph.notes
    assert "node 'drop' (Dropout): training_mode is true" in note
    x = np.ones((100, 100), np.float32)
    loss = (lambda y, mask: y.mean()) if trained else None
    session = fp.compile(graph, loss, outputs=["y", "mask"]).bind()
    first, second = (session.step({"x": x}).outputs for _ in range(2))
    for got in (first, second):
        y, mask = got["y"], got["mask"]
        assert mask.dtype == np.bool_ and abs(mask.mean() - 0.75) < 0.02  # 4.6 standard deviations
        np.testing.assert_allclose(y, np.where(mask, np.float32(1 / 0.75), np.float32(0)), rtol=1e-6)
    assert not np.array_equal(first["mask"], second["mask"])


@pytest.mark.parametrize(("training", "ratio"), [(False, 0.25), (True, 0.0)])
def test_dropout_out_of_training_mode_changes_nothing(training: bool, ratio: float) -> None:
    graph, x = from_onnx(dropout(training, ratio)), random(100, 100)
    got = fp.compile(graph).bind().step({"x": x}).outputs
    np.testing.assert_array_equal(got["y"], x)
    assert got["mask"].all() and not graph.notes

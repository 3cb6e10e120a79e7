"""Ops of ONNX's training domain, against ONNX's reference evaluator and by hand."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

import foreplan as fp
from foreplan.base.errors import UnsupportedError

DOMAIN = "ai.onnx.preview.training"
Given = dict[str, np.ndarray]


def model(nodes: list[onnx.NodeProto], inputs: Given, outputs: list[str], kept: Given | None = None) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "training",
        [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
            for name, x in inputs.items()
        ],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [onnx.numpy_helper.from_array(x, name) for name, x in (kept or {}).items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def drawn(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize(
    ("op", "states", "attributes"),
    [
        ("Adagrad", 1, {"decay_factor": 0.1, "epsilon": 1e-3, "norm_coefficient": 0.02}),
        ("Adam", 2, {"alpha": 0.8, "beta": 0.95, "norm_coefficient": 0.01, "norm_coefficient_post": 0.02}),
        ("Momentum", 1, {"alpha": 0.9, "beta": 0.7, "norm_coefficient": 0.01, "mode": "standard"}),
        ("Momentum", 1, {"alpha": 0.9, "beta": 0.7, "norm_coefficient": 0.01, "mode": "nesterov"}),
    ],
)
def test_updates_are_those_of_onnx(op: str, states: int, attributes: dict[str, float | str], steps: int) -> None:
    rng, count = np.random.default_rng(steps), 2
    shapes = [(2, 3), (4,)]
    given: Given = {"r": np.array(0.1, np.float32), "t": np.array(steps, np.int64)}
    for part in ("x", "g", "v", "h")[: 2 + states]:
        given |= {f"{part}{i}": drawn(rng, *shape) for i, shape in enumerate(shapes)}
    last = "vh"[states - 1]  # squares, of which a root is taken
    given |= {f"{last}{i}": np.abs(given[f"{last}{i}"]) for i in range(count)}
    outputs = [f"new{k}" for k in range(count * (1 + states))]
    file = model([helper.make_node(op, list(given), outputs, domain=DOMAIN, **attributes)], given, outputs)
    found = fp.compile(fp.from_onnx(file)).bind().step(given).outputs
    for name, wanted in zip(outputs, ReferenceEvaluator(file).run(None, given), strict=True):
        np.testing.assert_allclose(found[name], wanted, rtol=1e-5, atol=1e-6, err_msg=name)


def squared_sum(xs: list[str], y: str, *inputs: str) -> list[onnx.NodeProto]:
    """y = (a + b)², and its gradient; the node that asks for it comes first in the file."""
    return [
        helper.make_node("Gradient", list(inputs), [f"d{x}" for x in xs], domain=DOMAIN, xs=xs, y=y),
        helper.make_node("Add", ["a", "b"], ["sum"]),
        helper.make_node("Mul", ["sum", "sum"], ["y"]),
    ]


def test_a_gradient_is_that_of_all_elements() -> None:
    rng = np.random.default_rng(0)
    given = {"a": drawn(rng, 2, 3), "b": drawn(rng, 3)}
    file = model(squared_sum(["a", "b"], "y", "a", "b"), given, ["da", "db"])
    found = fp.compile(fp.from_onnx(file)).bind().step(given).outputs
    slope = 2 * (given["a"] + given["b"])
    np.testing.assert_allclose(found["da"], slope, rtol=1e-6)
    np.testing.assert_allclose(found["db"], slope.sum(0), rtol=1e-6)


def test_gradients_that_would_be_wrong_are_refused() -> None:
    rng = np.random.default_rng(0)
    given = {"a": drawn(rng, 3), "b": drawn(rng, 3), "c": drawn(rng, 3)}
    with pytest.raises(UnsupportedError, match="other tensors than those"):
        fp.from_onnx(model(squared_sum(["a", "b"], "y", "a", "c"), given, ["da", "db"]))
    part = {"a": given["a"]}
    nodes = squared_sum(["b"], "y", "b")
    nodes[1:1] = [helper.make_node("Constant", [], ["b"], value_floats=[1.0, 2.0, 3.0])]
    with pytest.raises(UnsupportedError, match="computed at import"):
        fp.from_onnx(model(nodes, part, ["db"]))

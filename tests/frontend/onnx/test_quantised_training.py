"""Files in QDQ form are trained straight through: float32 weights, rounded in each step to what integers give.

What is expected is written out in NumPy, and is PyTorch's `fake_quantize_per_channel_affine` where that is installed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import foreplan as fp
from foreplan.frontend.onnx import from_onnx
from foreplan.graph import Graph
from tests.oracle.peers import onnxruntime

RATE = 0.1
TARGETS = ["numpy", "cpu:threads=1"]


@dataclass
class Layer:
    """y = dq(q(x)) · dq(w) + dq(b), then dq(q(y)): as ONNX Runtime's `quantize_static` writes a linear layer.

    Attributes:
        axis: along which the weight has one scale each; None: one for all.
        codes: the integers of the weight.
    """

    codes: np.ndarray
    scale: np.ndarray
    zero: np.ndarray
    axis: int | None
    bias: np.ndarray
    x_scale: np.floating = field(default_factory=lambda: np.float32(0.02))
    x_zero: np.integer = field(default_factory=lambda: np.uint8(120))
    names: tuple[str, str] = ("fc.weight_quantized", "fc.bias_quantized")

    @staticmethod
    def drawn(
        dtype: str, axis: int | None, names: tuple[str, str] = ("fc.weight_quantized", "fc.bias_quantized")
    ) -> Layer:
        rng = np.random.default_rng(0)
        limits = np.iinfo(dtype)
        codes = rng.integers(limits.min, limits.max + 1, (6, 4)).astype(dtype)
        count = () if axis is None else (codes.shape[axis],)
        scale = rng.uniform(0.004, 0.01, count).astype(np.float32)
        zero = (rng.integers(-5, 6, count) + (128 if dtype == "uint8" else 0)).astype(dtype)
        return Layer(codes, scale, zero, axis, rng.integers(-999, 1000, 4).astype(np.int32), names=names)

    def along(self, array: np.ndarray) -> np.ndarray:
        """A scale or zero point, so that it broadcasts to the weight."""
        return array if self.axis is None else array.reshape([-1 if i == self.axis else 1 for i in range(2)])

    @property
    def bias_scale(self) -> np.float32:
        return np.float32(self.x_scale * np.float32(0.005))

    def proto(self) -> onnx.ModelProto:
        held = {"x_scale": self.x_scale, "x_zero": self.x_zero, self.names[0]: self.codes, "w_scale": self.scale}
        held |= {"w_zero": self.zero, self.names[1]: self.bias, "b_scale": self.bias_scale, "b_zero": np.int32(0)}
        along = {} if self.axis is None else {"axis": self.axis}
        nodes = [
            helper.make_node("QuantizeLinear", ["x", "x_scale", "x_zero"], ["xq"]),
            helper.make_node("DequantizeLinear", ["xq", "x_scale", "x_zero"], ["xf"]),
            helper.make_node("DequantizeLinear", [self.names[0], "w_scale", "w_zero"], ["w"], **along),
            helper.make_node("DequantizeLinear", [self.names[1], "b_scale", "b_zero"], ["b"]),
            helper.make_node("Gemm", ["xf", "w", "b"], ["y"]),
        ]
        info = helper.make_tensor_value_info
        graph = helper.make_graph(
            nodes, "qdq", [info("x", TensorProto.FLOAT, (5, 6))], [info("y", TensorProto.FLOAT, (5, 4))],
            [numpy_helper.from_array(np.asarray(array), name) for name, array in held.items()],
        )  # fmt: skip
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)

    def restored(self) -> np.ndarray:
        return (self.codes.astype(np.float32) - self.along(self.zero).astype(np.float32)) * self.along(self.scale)


def fake(x: np.ndarray, scale: np.ndarray, zero: np.ndarray, low: float, high: float) -> tuple[np.ndarray, np.ndarray]:
    """Fake quantisation, and where a gradient passes, as PyTorch documents it."""
    whole = np.rint(x / scale) + zero
    return ((np.clip(whole, low, high) - zero) * scale).astype(np.float32), (low <= whole) & (whole <= high)


def by_formula(
    layer: Layer, x: np.ndarray, target: np.ndarray, steps: int
) -> tuple[list[float], np.ndarray, np.ndarray]:
    """Losses of gradient descent on the mean square, and the float32 weights at the end."""
    limits = np.iinfo(layer.codes.dtype)
    w, b = layer.restored(), layer.bias.astype(np.float32) * layer.bias_scale
    losses = []
    for _ in range(steps):
        wq, of_w = fake(w, layer.along(layer.scale), layer.along(layer.zero).astype(np.float32), limits.min, limits.max)
        bq, of_b = fake(b, layer.bias_scale, np.float32(0), -(2.0**31), 2.0**31)
        xq, _ = fake(x, layer.x_scale, np.float32(layer.x_zero), 0, 255)
        off = xq @ wq + bq - target
        losses.append(float((off.astype(np.float64) ** 2).mean()))
        cotangent = 2 * off / off.size
        w = w - np.float32(RATE) * (xq.T @ cotangent) * of_w
        b = b - np.float32(RATE) * cotangent.sum(0) * of_b
    return losses, w, b


def batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {"x": rng.normal(size=(5, 6)).astype(np.float32), "target": 3 * rng.normal(size=(5, 4)).astype(np.float32)}


def session_of(graph: Graph, target: str, **options: object) -> fp.Session:
    return fp.compile(graph, fp.losses.mse, fp.optim.SGD(RATE), target=target, **options).bind()


def as_written(model: bytes, x: np.ndarray) -> np.ndarray:
    """What ONNX Runtime gives, node by node: its products of integers take the bias's scale for granted."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"]).run(["y"], {"x": x})[0]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("axis", [None, 0, 1])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16"])
def test_losses_and_weights_are_those_of_fake_quantisation(dtype: str, axis: int | None, target: str) -> None:
    layer, given = Layer.drawn(dtype, axis), batch()
    losses, w, b = by_formula(layer, given["x"], given["target"], 6)
    session = session_of(from_onnx(layer.proto()), target)
    found = [float(session.step(given).loss) for _ in range(6)]
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    assert losses[-1] < losses[0]
    np.testing.assert_allclose(session.parameters[layer.names[0]], w, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(session.parameters[layer.names[1]], b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("axis", [None, 1])
def test_gradients_are_those_of_pytorch(axis: int | None) -> None:
    torch = pytest.importorskip("torch", reason="make setup-torch")
    layer, given = Layer.drawn("int8", axis), batch()
    layer.codes[0] = (127, -128, 127, -128)  # at the ends of the range
    x, w = torch.tensor(given["x"], requires_grad=True), torch.tensor(layer.restored(), requires_grad=True)
    scale, zero = torch.tensor(layer.scale), torch.tensor(layer.zero.astype(np.int32))
    if axis is None:
        wq = torch.fake_quantize_per_tensor_affine(w, scale, zero, -128, 127)
    else:
        wq = torch.fake_quantize_per_channel_affine(w, scale, zero, axis, -128, 127)
    xq = torch.fake_quantize_per_tensor_affine(x, float(layer.x_scale), int(layer.x_zero), 0, 255)
    b = torch.tensor(layer.bias.astype(np.float32) * layer.bias_scale)
    loss = torch.nn.functional.mse_loss(xq @ wq + b, torch.tensor(given["target"]))
    loss.backward()
    step = fp.compile(from_onnx(layer.proto()), fp.losses.mse, None, target="numpy", gradients=["x"])
    result = step.bind().step(given)
    np.testing.assert_allclose(float(result.loss), loss.item(), rtol=1e-5)
    np.testing.assert_allclose(result.gradients[layer.names[0]], w.grad.numpy(), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(result.gradients["x"], x.grad.numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("names", [("fc.weight_quantized", "fc.bias_quantized"), ("v1", "v2"), ("12", "13")])
def test_a_written_model_has_integers_that_give_what_was_trained(tmp_path: Path, names: tuple[str, str]) -> None:
    layer, given = Layer.drawn("int8", 1, names), batch()
    graph = from_onnx(layer.proto())
    session = session_of(graph, "numpy")
    for _ in range(6):
        session.step(given)
    measured = fp.compile(fp.evaluation(graph, fp.losses.mse)).bind(share=session)
    loss = float(measured.step(given).outputs["loss"])
    for form in ("model", "graph"):
        path = tmp_path / f"{form}.onnx"
        session.to_onnx(path, form)
        proto = onnx.load(path)
        held = {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
        assert held[names[0]].dtype == np.int8 and not np.array_equal(held[names[0]], layer.codes)
        np.testing.assert_array_equal(held["w_scale"], layer.scale)
        y = as_written(path.read_bytes(), given["x"])
        np.testing.assert_allclose(((y - given["target"]) ** 2).mean(), loss, rtol=1e-4)


def test_a_model_that_is_not_trained_keeps_its_integers() -> None:
    layer, given = Layer.drawn("int8", 1), batch()
    graph = from_onnx(layer.proto())
    assert {value.name for value in graph.stored if value.dtype.name == "int8"} >= {layer.names[0]}
    step = fp.compile(graph)
    assert all(value.dtype.name != "float32" for value in step.graph.stored if value.name == layer.names[0])
    found = step.bind().step({"x": given["x"]}).outputs["y"]
    np.testing.assert_allclose(found, as_written(layer.proto().SerializeToString(), given["x"]), rtol=1e-5, atol=1e-5)


def test_integers_do_not_take_the_place_of_trained_weights_in_silence(tmp_path: Path) -> None:
    layer, given = Layer.drawn("int8", 1), batch()
    graph = from_onnx(layer.proto())
    session = session_of(graph, "numpy")
    session.step(given)
    session.save(tmp_path / "w.safetensors")
    plain = fp.compile(graph, target="numpy")
    with pytest.raises(fp.SessionError, match=r"fc\.weight_quantized"):
        plain.bind(share=session)
    with pytest.raises(fp.SessionError, match=r"fc\.weight_quantized"):
        plain.bind().load(tmp_path / "w.safetensors")
    with pytest.raises(fp.UsageError, match="what measures it from `evaluation`"):
        fp.compile(graph, target="numpy", share=session)


def test_quantised_weights_are_frozen_by_name() -> None:
    layer, given = Layer.drawn("int8", 1), batch()
    at_import = from_onnx(layer.proto(), freeze=["fc.weight_quantized"])
    for graph, options in ((from_onnx(layer.proto()), {"freeze": ["fc.weight_quantized"]}), (at_import, {})):
        step = fp.compile(graph, fp.losses.mse, fp.optim.SGD(RATE), target="numpy", **options)
        assert [value.name for value in step.graph.parameters] == [layer.names[1]]
        assert graph is at_import or "freeze='fc.weight_quantized'" in str(step.weights)
        session = step.bind()
        losses = [float(session.step(given).loss) for _ in range(3)]
        assert losses[-1] < losses[0]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_straight_through_in_narrow_types(precision: str) -> None:
    layer, given = Layer.drawn("int8", 1), batch()
    losses, _, _ = by_formula(layer, given["x"], given["target"], 4)
    session = session_of(from_onnx(layer.proto()), "numpy", precision=precision)
    np.testing.assert_allclose([float(session.step(given).loss) for _ in range(4)], losses, rtol=0.01)


def test_weights_of_four_bits_are_told() -> None:
    proto = Layer.drawn("int8", 1).proto()
    proto.opset_import[0].version = 21
    for tensor in proto.graph.initializer:
        if tensor.name in ("fc.weight_quantized", "w_zero"):
            narrow = np.clip(numpy_helper.to_array(tensor), -8, 7).astype(ml_dtypes.int4)
            tensor.CopyFrom(numpy_helper.from_array(narrow, tensor.name))
    graph = from_onnx(proto)
    assert any("'fc.weight_quantized' are int4, and no gradient reaches them" in note for note in graph.notes)
    step = fp.compile(graph, fp.losses.mse, fp.optim.SGD(RATE), target="numpy")
    assert [value.name for value in step.graph.parameters] == ["fc.bias_quantized"]


def test_a_weight_that_is_quantised_within_the_model_is_trained() -> None:
    """Files of training that knew of quantisation hold floats, and quantise them."""
    layer, given = Layer.drawn("int8", 1), batch()
    proto = layer.proto()
    for tensor in proto.graph.initializer:
        if tensor.name == layer.names[0]:
            tensor.CopyFrom(numpy_helper.from_array(layer.restored(), layer.names[0]))
    quantise = helper.make_node("QuantizeLinear", [layer.names[0], "w_scale", "w_zero"], ["wq"], axis=1)
    proto.graph.node[2].input[0] = "wq"
    proto.graph.node.insert(0, quantise)
    losses, _, _ = by_formula(layer, given["x"], given["target"], 4)
    session = session_of(from_onnx(proto), "numpy")
    np.testing.assert_allclose([float(session.step(given).loss) for _ in range(4)], losses, rtol=1e-5)

"""The light models of the onnx package on the engine: forward as shipped, and training steps that train."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import foreplan as fp
from foreplan.runtime.session import Session
from tests.profile import cases

LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
NAMES = sorted(file.stem.removeprefix("light_") for file in LIGHT.glob("light_*.onnx"))

# Of like models the smaller trains: AlexNet for VGG-19 and ZFNet, Inception v1 with DenseNet's norms for v2.
TRAINED = [name for name in NAMES if name not in ("vgg19", "zfnet512", "inception_v2")]

pytestmark = pytest.mark.slow


def test_there_are_nine() -> None:
    assert len(NAMES) == 9


def shipped(name: str) -> np.ndarray:
    """The output that a model was shipped with."""
    return onnx.numpy_helper.to_array(onnx.load_tensor(LIGHT / f"light_{name}_output_0.pb"))


def forward(step: fp.Compiled) -> list[np.ndarray]:
    """What a model gives for the input that its output was shipped for."""
    (slot,) = step.program.inputs
    type = slot.operand.type
    data = (np.arange(type.size).reshape(type.shape) / type.size).astype(np.float32)
    return list(step.bind().step({slot.name: data.astype(type.dtype.numpy)}).outputs.values())


def with_scores(name: str, dtype: str = "float32") -> onnx.ModelProto:
    """A model whose last output is what its softmax reads, if it ends in one; computed in a type."""
    model = onnx.load(LIGHT / f"light_{name}.onnx")
    graph, kinds = model.graph, onnx.TensorProto
    (last,) = (node for node in graph.node if graph.output[0].name in node.output)
    if last.op_type == "Softmax":
        graph.output.append(onnx.helper.make_tensor_value_info(last.input[0], kinds.FLOAT, None))
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.tensor_type.elem_type == kinds.FLOAT:
            value.type.tensor_type.elem_type = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    inside = [each.t for node in graph.node for each in node.attribute if each.HasField("t")]
    for tensor in (*graph.initializer, *inside):
        if tensor.data_type == kinds.FLOAT:
            array = onnx.numpy_helper.to_array(tensor).astype(dtype)
            tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    return model


@pytest.mark.parametrize("name", cases(NAMES, thorough=("densenet121", "inception_v2", "vgg19")))
def test_forward_equals_the_shipped_output(name: str) -> None:
    step = fp.compile(fp.from_onnx(LIGHT / f"light_{name}.onnx"))
    (got,) = forward(step)
    np.testing.assert_allclose(got, shipped(name), rtol=1e-3, atol=1e-7)
    assert step.plan.arena_bytes <= 1.02 * step.plan.lower_bound_bytes


def draw_weights(session: Session) -> None:
    """He initialisation: the light models ship with every weight alike, from which no network learns."""
    rng = np.random.default_rng(0)
    for name in session.parameters:
        shape = session.parameters[name].shape
        if len(shape) >= 2:
            std = np.sqrt(2 / np.prod(shape[1:]))
            session.parameters[name] = (rng.standard_normal(shape) * std).astype(np.float32)
        elif "bias" not in name and "_b" not in name:
            session.parameters[name] = np.ones(shape, np.float32)


LATER = ("densenet121", "inception_v1", "resnet50", "bvlc_alexnet", "squeezenet")


@pytest.mark.parametrize("name", cases(TRAINED, thorough=LATER))
def test_training_steps_lower_the_loss(name: str) -> None:
    graph = fp.from_onnx(LIGHT / f"light_{name}.onnx", batch=2)
    step = fp.compile(graph, loss=fp.losses.cross_entropy, optimizer=fp.optim.Adam(1e-4))
    session = step.bind()
    draw_weights(session)
    slots = {slot.name: slot.operand.type for slot in step.program.required_inputs}
    target = np.array([3, 7]).reshape(slots.pop("target").shape)  # two of the models keep the pooled axes: [2, 1, 1]
    ((images, type),) = slots.items()
    data = {images: np.random.default_rng(1).standard_normal(type.shape).astype(np.float32), "target": target}
    losses = [session.step(data).loss for _ in range(6)]
    assert np.isfinite(losses).all()
    assert min(losses[-2:]) < losses[0]

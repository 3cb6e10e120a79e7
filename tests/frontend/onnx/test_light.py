"""The light models that ONNX ships: import and forward."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from foreplan.frontend import from_onnx
from foreplan.graph.value import Kind
from tests.ops.check import evaluate
from tests.profile import cases

LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
# name → (trained tensors, running statistics). ResNet-50, for one: 53 convolutions with a weight each, as many batch
# norms with two parameters and two statistics, and a classifier with two parameters.
MODELS = {
    "bvlc_alexnet": (16, 0),
    "densenet121": (606, 242),
    "inception_v1": (116, 0),
    "inception_v2": (347, 138),
    "resnet50": (161, 106),
    "shufflenet": (150, 98),
    "squeezenet": (52, 0),
    "vgg19": (38, 0),
    "zfnet512": (16, 0),
}
# Softmax of equal numbers near 1e10, where the next float32 is 1,024 away: a BLAS that adds some channels in another
# order gives exp(-1024) for them.
LARGE_LOGITS = {"squeezenet"}


def in_float64(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with every float32 tensor in float64."""
    found = onnx.ModelProto()
    found.CopyFrom(model)
    for value in (*found.graph.input, *found.graph.output, *found.graph.value_info):
        if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT:
            value.type.tensor_type.elem_type = onnx.TensorProto.DOUBLE
    attributes = (attribute.t for node in found.graph.node for attribute in node.attribute if attribute.HasField("t"))
    for tensor in (*found.graph.initializer, *attributes):
        if tensor.data_type == onnx.TensorProto.FLOAT:
            array = onnx.numpy_helper.to_array(tensor).astype(np.float64)
            tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    return found


@pytest.mark.parametrize("name", MODELS)
def test_imports_with_every_weight_a_parameter(name: str) -> None:
    graph = from_onnx(LIGHT / f"light_{name}.onnx")
    assert [value.shape for value in graph.inputs] == [(1, 3, 224, 224)]
    kinds = [value.kind for value in graph.stored]
    assert (kinds.count(Kind.PARAMETER), kinds.count(Kind.BUFFER)) == MODELS[name]
    assert len(kinds) == sum(MODELS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", cases(MODELS, thorough=("vgg19", "zfnet512", "inception_v1")))  # of like ones one
def test_forward_equals_what_onnx_ships(name: str) -> None:
    model = onnx.load(LIGHT / f"light_{name}.onnx")
    graph = from_onnx(in_float64(model) if name in LARGE_LOGITS else model)
    (x,), ((output, y),) = graph.inputs, graph.outputs.items()
    # The input that ONNX's runner gives to these models.
    data = (np.arange(x.type.size).reshape(x.shape) / x.type.size).astype(x.dtype.numpy)
    expected = onnx.numpy_helper.to_array(onnx.load_tensor(LIGHT / f"light_{name}_output_0.pb"))
    got = evaluate(graph, {x.name: data}, hard=False)[y]
    np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-7, err_msg=output)


@pytest.mark.parametrize("name", MODELS)
def test_another_batch(name: str) -> None:
    graph = from_onnx(LIGHT / f"light_{name}.onnx", batch=4)
    assert graph.inputs[0].shape == (4, 3, 224, 224)
    assert all(value.shape[0] == 4 for value in graph.outputs.values())
    assert all("batch 1 → 4" in note for note in graph.notes)


def test_items_of_a_larger_batch_do_not_mix() -> None:
    path = LIGHT / "light_shufflenet.onnx"
    single, pair = from_onnx(path), from_onnx(path, batch=2)
    rng = np.random.default_rng(0)
    weights = {value.name: (rng.random(value.shape) * 0.3).astype(np.float32) for value in single.stored}
    items = rng.random((2, 3, 224, 224)).astype(np.float32)
    name = single.inputs[0].name
    together = evaluate(pair, {name: items}, weights, hard=False)[next(iter(pair.outputs.values()))]
    for i in range(2):
        alone = evaluate(single, {name: items[i : i + 1]}, weights, hard=False)[next(iter(single.outputs.values()))]
        np.testing.assert_allclose(together[i : i + 1], alone, rtol=1e-4, atol=1e-7)

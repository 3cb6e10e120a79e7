"""Graphs as ONNX files: the zoo and traced functions, checked by ONNX and equal in ONNX Runtime."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

import foreplan as fp
from foreplan.base.errors import UnsupportedError, UsageError
from foreplan.frontend.losses import attach_loss
from foreplan.graph import Array
from foreplan.runtime.inputs import made_up
from tests.export.runtime import near, opened, run
from tests.oracle.peers import onnx
from tests.profile import cases

ZOO = (
    "mlp:width=16,layers=2,batch=4",
    "resnet18:batch=1,size=32,classes=10",
    "mobilenet_v2:batch=2,size=32,classes=10",
    "unet:batch=1,size=32,width=4",
    "conv_chain:batch=1,size=16",
    "vit_b16:batch=2,size=32,layers=2,width=32,heads=4,classes=10",
    "efficientnet_b0:batch=2,size=64,classes=10,width=0.5,depth=0.5",
    "convnext_tiny:batch=2,size=64,blocks=1,classes=10,width=16,layer_scale=1.0",
    "swin_t:batch=2,size=21,blocks=1,classes=10,width=8,heads=1,window=3,patch=1",
    "gpt2_small:batch=2,seq=16,layers=2,width=32,heads=4,vocabulary=100",
    "bert_base:batch=2,seq=16,layers=2,width=32,heads=4,vocabulary=100,dropout=0.1",
    "mixer_b16:batch=2,size=32,layers=2,width=32,classes=10,patch=8",
    "ddpm_unet:batch=2,size=16,width=8,groups=4,dropout=0.1",
    "dlrm:batch=4,dense=5,tables=4,rows=20,width=8,hidden=16",
    "llama:batch=2,seq=16,layers=2,width=32,heads=4,kv_heads=2,features=48,vocabulary=60",
    "t5_small:batch=2,seq=16,decoder_seq=12,layers=1,width=32,heads=4,depth=8,features=48,vocabulary=60",
    "lstm_lm:batch=2,seq=5,width=32,vocabulary=60",
)


@pytest.mark.parametrize("name", cases(ZOO, thorough=("llama", "t5_small", "lstm_lm")))
def test_a_zoo_model_is_the_same_in_onnx_runtime(name, tmp_path):
    session = fp.compile(fp.models.build(name)).bind(seed=3)
    inputs = made_up(session.program, 5)
    (path,) = session.to_onnx(tmp_path / "model.onnx")
    found, wanted = run(path, inputs), session.step(inputs).outputs
    assert found.keys() == wanted.keys()
    assert all(near(found[name], wanted[name]) for name in wanted)


def test_weights_are_initializers_of_their_names_and_only_standard_ops_are_there(tmp_path):
    session = fp.compile(fp.models.build(ZOO[1])).bind()
    session.to_onnx(tmp_path / "model.onnx")
    proto = onnx.load(tmp_path / "model.onnx")
    held = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    assert all(np.array_equal(held[name], array) for name, array in session.state_dict().items())
    assert {node.domain for node in proto.graph.node} == {""}
    assert [entry.domain for entry in proto.opset_import] == [""]


def test_a_traced_function(tmp_path):
    """Outputs that are inputs, that have an input's name, that are equal, and of several types."""
    rng = np.random.default_rng(0)
    w = rng.normal(size=(6, 3)).astype(np.float32)

    def model(x, unused):
        y = np.tanh(x @ fp.nn.parameter("w", (6, 3), Array(w)))
        return {"y": y, "again": y, "same": x, "x": y + 1, "count": np.sum(x > 0), "large": np.argmax(x, axis=1)}

    session = fp.compile(fp.trace(model, fp.spec((4, 6)), fp.spec((2,)))).bind()
    x = rng.normal(size=(4, 6)).astype(np.float32)
    session.to_onnx(tmp_path / "model.onnx")
    found = run(tmp_path / "model.onnx", {"x": x, "unused": np.zeros(2, np.float32)})
    assert list(found) == ["y", "again", "same", "x.1", "count", "large"]
    assert near(found["y"], np.tanh(x @ w)) and near(found["x.1"], np.tanh(x @ w) + 1)
    assert np.array_equal(found["again"], found["y"]) and np.array_equal(found["same"], x)
    assert found["count"] == (x > 0).sum() and np.array_equal(found["large"], x.argmax(1))


def test_the_weights_are_the_trained_ones_and_the_loss_stays_behind(tmp_path):
    name = "mlp:width=8,layers=1,batch=4,inputs=6,classes=3"
    model = attach_loss(fp.models.build(name), "cross_entropy", ["logits"])
    session = fp.compile(model, optimizer=fp.optim.Momentum(0.1)).bind()
    inputs = made_up(session.program, 2)
    for _ in range(3):
        session.step(inputs)
    session.to_onnx(tmp_path / "model.onnx")
    assert [each.name for each in opened(tmp_path / "model.onnx").get_inputs()] == ["x"]
    fresh = fp.compile(fp.models.build(name)).bind()
    before = fresh.step({"x": inputs["x"]}).outputs["logits"]
    for key in fresh.parameters:
        fresh.parameters[key] = session.parameters[key]
    found = run(tmp_path / "model.onnx", inputs)["logits"]
    assert near(found, fresh.step({"x": inputs["x"]}).outputs["logits"]) and not near(found, before, 1e-3)


def test_what_standard_onnx_cannot_say_is_named(tmp_path):
    name = "mlp:width=8,layers=1,batch=4"
    session = fp.compile(fp.models.build(name), fp.losses.cross_entropy, fp.optim.SGD(0.1), accumulate=2).bind()
    with pytest.raises(UsageError, match="accumulates gradients is two graphs"):
        session.to_onnx(tmp_path / "x.onnx", "step")
    with pytest.raises(UsageError, match="form"):
        session.to_onnx(tmp_path / "x.onnx", "whole")
    fp.compile(fp.models.build(name)).save(tmp_path / "x.plan")
    with pytest.raises(UsageError, match="a plan file has no graph"):
        fp.load_plan(tmp_path / "x.plan").bind().to_onnx(tmp_path / "x.onnx")

    def shifted(x):
        return np.right_shift(x, 1)

    session = fp.compile(fp.trace(shifted, fp.spec((4,), "int32"))).bind()
    with pytest.raises(UnsupportedError, match=r"shift.*shifts unsigned integers alone"):
        session.to_onnx(tmp_path / "x.onnx")
    assert not list(tmp_path.glob("x.onnx*"))


def test_a_compiled_step_is_written_after_pickling(tmp_path):
    compiled = pickle.loads(pickle.dumps(fp.compile(fp.models.build("mlp:width=8,layers=1,batch=4"))))
    (path,) = compiled.bind().to_onnx(tmp_path / "model.onnx")
    assert opened(path)

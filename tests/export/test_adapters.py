"""Models with adapters as ONNX: merged into the weights, or apart, as nodes of their own."""

from __future__ import annotations

import numpy as np
import pytest

import foreplan as fp
from foreplan.graph import Graph
from tests.export.runtime import near, run
from tests.export.test_source import INPUTS, TARGET, classifier
from tests.oracle.peers import onnx


def traced() -> Graph:
    def network(x: fp.frontend.Tensor, places: fp.frontend.Tensor) -> fp.frontend.Tensor:
        rows = fp.nn.embedding(places, 40, 30, name="table")
        return fp.nn.linear(fp.nn.relu(fp.nn.linear(x, 30, name="w1") + rows), 5, name="w2")

    return fp.trace(network, fp.spec((4, 12)), fp.spec((4,), "int64"))


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("make", [lambda: fp.from_onnx(classifier(), batch=4), traced], ids=["imported", "traced"])
def test_adapters_are_merged_or_apart(make, dora, tmp_path):
    base = make()
    adapted = fp.lora(fp.lora(base, targets=["w1*"], rank=2, dora=dora), targets=["w2*"], rank=3)
    session = fp.compile(adapted, fp.losses.cross_entropy, fp.optim.Momentum(0.5)).bind()
    for _ in range(3):
        session.step({**INPUTS, "target": TARGET})
    (wanted,) = fp.compile(adapted).bind(share=session).step(INPUTS).outputs.values()
    (plain,) = fp.compile(base).bind().step(INPUTS).outputs.values()
    assert not near(wanted, plain, 1e-2)
    for form, has_adapters in (("model", False), ("graph", True)):
        session.to_onnx(tmp_path / "m.onnx", form=form)
        (found,) = run(tmp_path / "m.onnx", INPUTS).values()
        assert near(found, wanted)
        names = {tensor.name for tensor in onnx.load(tmp_path / "m.onnx").graph.initializer}
        assert any("lora_A" in name for name in names) is has_adapters
    if base.origin is not None:
        session.to_onnx(tmp_path / "m.onnx")
        assert [n.name for n in onnx.load(tmp_path / "m.onnx").graph.node] == [n.name for n in classifier().graph.node]


def test_a_cut_model_with_adapters_is_written_as_it_is(tmp_path):
    adapted = fp.lora(traced(), targets=["w1*"], rank=2).until("w1")
    session = fp.compile(adapted).bind()
    for name in session.parameters:
        session.parameters[name] = np.random.default_rng(0).normal(size=session.parameters[name].shape)
    (wanted,) = session.step({"x": INPUTS["x"]}).outputs.values()
    session.to_onnx(tmp_path / "m.onnx")
    (found,) = run(tmp_path / "m.onnx", INPUTS).values()
    assert near(found, wanted)

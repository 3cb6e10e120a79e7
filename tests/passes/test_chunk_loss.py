"""The loss over a large vocabulary, beside the texts of `chunk_losses/`: when it is made in chunks, and in models."""

from __future__ import annotations

import numpy as np
import pytest

import foreplan as fp
from foreplan import passes
from foreplan.compiler.pipeline import passes_of_training
from foreplan.frontend.losses import attach_loss
from foreplan.graph import Graph, parse_graph
from foreplan.ops.linear_cross_entropy import LinearCrossEntropy
from foreplan.options import Options
from foreplan.passes import simplified
from foreplan.passes.chunk_loss import ChunkLosses
from tests.ops.check import evaluate
from tests.passes.steps import training_step

RNG = np.random.default_rng(0)


def fused(graph: Graph) -> list[LinearCrossEntropy]:
    return [node.op for node in graph.nodes if isinstance(node.op, LinearCrossEntropy)]


@pytest.mark.parametrize(
    "name,expected", [("gpt2_small:batch=1,seq=128,layers=1", 0), ("gpt2_small:seq=512,layers=1", 1)]
)
def test_only_where_it_saves_a_mebibyte(name: str, expected: int) -> None:
    graph = fp.models.build(name)
    step = fp.compile(graph, loss=fp.losses.cross_entropy, optimizer=fp.optim.SGD(0.1), remat="off")
    assert sum(isinstance(call.op, LinearCrossEntropy) for call in step.program.calls) == expected
    assert any("never whole" in note for note in step.program.notes) == bool(expected)
    step = fp.compile(graph, loss=fp.losses.cross_entropy, optimizer=fp.optim.SGD(0.1), remat="off", outputs=["logits"])
    assert not any(isinstance(call.op, LinearCrossEntropy) for call in step.program.calls)


@pytest.mark.parametrize("name", ["gpt2_small", "bert_base"])
def test_zoo_models_keep_loss_and_gradients(name: str) -> None:
    graph = fp.models.build(f"{name}:batch=2,seq=6,layers=1,width=8,heads=2,vocabulary=40")
    graph = parse_graph(graph.as_text().replace("float32", "float64"))
    forward = simplified(passes.training_form(passes.SelectOutputs([])(attach_loss(graph, "cross_entropy"))))
    inputs = {v.name: RNG.integers(0, 2 if v.name == "segments" else 40, v.shape) for v in forward.inputs}
    stored = {v.name: RNG.normal(size=v.shape) for v in forward.parameters}
    with_op, without = training_step(ChunkLosses(least=-(1 << 40))(forward)), training_step(forward)
    assert fused(with_op) and not fused(without)
    got, expected = evaluate(with_op, inputs, stored), evaluate(without, inputs, stored)
    assert with_op.loss is not None and without.loss is not None
    np.testing.assert_allclose(got[with_op.loss], expected[without.loss], rtol=1e-12)
    assert set(with_op.gradients) == set(without.gradients)
    for parameter, gradient in with_op.gradients.items():
        wanted = expected[without.gradients[parameter]]
        np.testing.assert_allclose(got[gradient], wanted, rtol=1e-8, atol=1e-9, err_msg=parameter)


@pytest.mark.parametrize(("precision", "chunked"), [("float32", True), ("bf16", True), ("fp16", False)])
def test_no_loss_is_made_in_chunks_where_gradients_need_a_scale(precision: str, chunked: bool) -> None:
    """In chunks the gradient is made, and rounded, with the loss: before it has the scale."""
    entries = passes_of_training(Options("cross_entropy", precision=precision, target="numpy"))
    assert ("chunk_losses" in {each.name for each in entries}) is chunked

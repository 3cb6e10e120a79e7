"""Gradients of queries, keys and values written side by side."""

from __future__ import annotations

import numpy as np
import pytest

import foreplan as fp
from foreplan import passes
from foreplan.frontend.losses import attach_loss
from foreplan.graph import Graph, parse_graph
from foreplan.passes import differentiate, pack_attention, share_common
from tests.ops.check import evaluate

RNG = np.random.default_rng(0)


def step(name: str) -> Graph:
    graph = parse_graph(fp.models.build(name).as_text().replace("float32", "float64"))
    forward = passes.training_form(passes.select_outputs(attach_loss(graph, "cross_entropy"), []))
    return share_common(differentiate(share_common(forward)))


def count(graph: Graph, op: str) -> int:
    return sum(node.op.name == op for node in graph.nodes)


@pytest.mark.parametrize(
    "name",
    [
        "gpt2_small:batch=2,seq=6,layers=2,width=8,heads=2,vocabulary=12",
        "vit_b16:batch=2,size=32,layers=2,width=8,heads=2,classes=3",
    ],
)
def test_one_product_for_queries_keys_and_values(name: str) -> None:
    before = step(name)
    after = pack_attention(before)
    assert (count(before, "attention_grad"), count(before, "packed_attention_grad")) == (2, 0)
    assert (count(after, "attention_grad"), count(after, "packed_attention_grad")) == (0, 2)
    assert count(after, "concat") == count(before, "concat") - 2
    inputs = {
        v.name: RNG.normal(size=v.shape) if v.dtype.is_float else RNG.integers(0, 3, v.shape) for v in before.inputs
    }
    stored = {v.name: RNG.normal(size=v.shape) for v in before.parameters}
    old, new = (evaluate(g, inputs, stored, hard=False) for g in (before, after))
    for parameter, gradient in before.gradients.items():
        expected = old[gradient]
        np.testing.assert_allclose(new[after.gradients[parameter]], expected, rtol=1e-9, atol=1e-12, err_msg=parameter)


def test_three_products_stay_three() -> None:
    before = step("bert_base:batch=2,seq=6,layers=1,width=8,heads=2,vocabulary=12")
    assert pack_attention(before) is before


def test_a_gradient_that_is_returned_stays() -> None:
    before = step("gpt2_small:batch=1,seq=4,layers=1,width=8,heads=2,vocabulary=12")
    (grad,) = (node for node in before.nodes if node.op.name == "attention_grad")
    text = before.as_text() + f"output %dq = %{grad.outputs[0].name}\n"
    graph = parse_graph(text)
    assert pack_attention(graph) is graph

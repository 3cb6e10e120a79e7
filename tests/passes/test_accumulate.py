"""Gradients added in place by the op that computes the last of them, in whole steps: beside `accumulate/`."""

from __future__ import annotations

import numpy as np
import pytest

import foreplan as fp
from foreplan import passes
from foreplan.frontend.losses import attach_loss
from foreplan.graph import parse_graph
from foreplan.passes import accumulate, differentiate, share_common
from tests.passes.texts import hold_same


@pytest.mark.parametrize(
    "name,added",
    [
        ("resnet18:batch=1,size=32,classes=3", "conv_data_grad"),
        ("bert_base:batch=1,seq=4,layers=1,width=8,heads=2,vocabulary=12", "matmul"),
        ("gpt2_small:batch=1,seq=4,layers=1,width=8,heads=2,vocabulary=12", "scatter_add"),
        ("gpt2_small:batch=1,seq=4,layers=2,width=8,heads=2,vocabulary=12", "layer_norm_grad"),
    ],
)
def test_zoo_models_keep_their_gradients(name: str, added: str) -> None:
    graph = parse_graph(fp.models.build(name).as_text().replace("float32", "float64"))
    forward = passes.training_form(passes.SelectOutputs([])(attach_loss(graph, "cross_entropy")))
    before = share_common(differentiate(passes.simplified(forward)))
    after = accumulate(before)
    assert any(node.op.name == added and len(node.inputs) > node.op.accumulates > 0 for node in after.nodes)
    hold_same(before, after, np.random.default_rng(0), far=1e-9)

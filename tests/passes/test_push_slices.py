"""Only what is read is computed, in whole models: beside the texts of `push_slices/`."""

from __future__ import annotations

import numpy as np

import foreplan as fp
from foreplan import passes
from foreplan.frontend.losses import attach_loss
from foreplan.graph import parse_graph
from foreplan.passes import push_slices, share_common
from tests.passes.texts import hold_same


def test_a_vision_transformer_keeps_its_loss_and_gradients() -> None:
    graph = fp.models.build("vit_b16:batch=2,size=32,layers=2,width=8,heads=2,classes=3")
    graph = parse_graph(graph.as_text().replace("float32", "float64"))
    forward = share_common(passes.training_form(passes.SelectOutputs([])(attach_loss(graph, "cross_entropy"))))
    after = push_slices(forward)
    assert len([n for n in after.nodes if n.name.endswith("/part") and n.outputs[0].shape == (2, 1, 8)]) >= 5
    hold_same(forward, after, np.random.default_rng(0), far=1e-9)


def test_the_last_positions_logits_alone_are_computed() -> None:
    def last(tokens: fp.Tensor) -> fp.Tensor:
        x = fp.nn.embedding(tokens, 50, 8)
        return (fp.nn.layer_norm(x) @ fp.nn.parameter("head", (8, 50)))[:, -1]

    graph = passes.simplified(fp.trace(last, fp.spec((2, 16), "int64")))
    products = [node for node in graph.nodes if node.op.name == "matmul"]
    assert [node.outputs[0].shape for node in products] == [(2, 1, 50)]

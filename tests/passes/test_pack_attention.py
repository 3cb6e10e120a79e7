"""Gradients of queries, keys and values written side by side, in whole steps: beside the texts of `pack_attention/`."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import foreplan as fp
from foreplan import passes
from foreplan.frontend.losses import attach_loss
from foreplan.graph import parse_graph
from foreplan.passes import differentiate, pack_attention, share_common
from tests.passes.texts import hold_same


@pytest.mark.parametrize(
    "name",
    [
        "gpt2_small:batch=2,seq=6,layers=2,width=8,heads=2,vocabulary=12",
        "vit_b16:batch=2,size=32,layers=2,width=8,heads=2,classes=3",
    ],
)
def test_one_product_for_queries_keys_and_values(name: str) -> None:
    graph = parse_graph(fp.models.build(name).as_text().replace("float32", "float64"))
    forward = passes.training_form(passes.SelectOutputs([])(attach_loss(graph, "cross_entropy")))
    before = share_common(differentiate(share_common(forward)))
    after = pack_attention(before)
    old, new = (Counter(node.op.name for node in each.nodes) for each in (before, after))
    assert old["attention_grad"] == new["packed_attention_grad"] == old["concat"] - new["concat"] == 2
    assert not new["attention_grad"]
    hold_same(before, after, np.random.default_rng(0), far=0.0)

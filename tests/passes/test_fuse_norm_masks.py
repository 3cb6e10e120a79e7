"""Gradients of batch normalisation that take in the mask before them: in steps, beside `fuse_norm_masks/`."""

from __future__ import annotations

import numpy as np
import pytest

import foreplan as fp
from foreplan.graph import Graph
from foreplan.ops.norm.masked import MaskedBatchNormGrad
from foreplan.passes.fuse_norm_masks import FuseNormMasks
from tests.passes.texts import hold_same


def training(residual: bool) -> Graph:
    """A step with a ReLU behind a normalisation; with a residual, its gradient goes two ways."""

    def model(x: fp.frontend.Tensor) -> fp.frontend.Tensor:
        x = fp.nn.conv(x, 16, 3, padding=1, name="first")
        y = fp.nn.batch_norm(fp.nn.conv(x, 16, 3, padding=1, name="second"), name="norm")
        y = fp.nn.relu(y + x if residual else y)
        return fp.nn.linear(fp.nn.flatten(fp.nn.conv(y, 4, 3, name="last")), 3, name="head")

    return fp.compile(fp.trace(model, fp.spec((4, 3, 20, 20))), fp.losses.mse, fp.optim.SGD(0.1)).graph


@pytest.mark.parametrize("residual", [False, True])
def test_the_same_results_in_fewer_ops(residual: bool) -> None:
    graph = training(residual)
    after = FuseNormMasks(lambda op, inputs, outputs: True)(graph)
    assert [node.op.keeps for node in after.nodes if isinstance(node.op, MaskedBatchNormGrad)] == [residual]
    assert len(after.nodes) == len(graph.nodes) - 1
    assert not any(each.op.name in ("masked_map", "batch_norm_grad") for each in after.nodes)
    hold_same(graph, after, np.random.default_rng(0), far=0.0)

"""Gradients of batch normalisation that take in the mask before them: which do, and that nothing changes."""

from __future__ import annotations

import numpy as np
import pytest

import foreplan as fp
from foreplan.graph import Graph, Node
from foreplan.ops.norm.masked import MaskedBatchNormGrad
from foreplan.passes import fuse_norm_masks
from tests.ops.check import evaluate

RNG = np.random.default_rng(0)


def training(residual: bool) -> Graph:
    """A step with a ReLU behind a normalisation; with a residual, its gradient goes two ways."""

    def model(x: fp.frontend.Tensor) -> fp.frontend.Tensor:
        x = fp.nn.conv(x, 16, 3, padding=1, name="first")
        y = fp.nn.batch_norm(fp.nn.conv(x, 16, 3, padding=1, name="second"), name="norm")
        y = fp.nn.relu(y + x if residual else y)
        return fp.nn.linear(fp.nn.flatten(fp.nn.conv(y, 4, 3, name="last")), 3, name="head")

    return fp.compile(fp.trace(model, fp.spec((4, 3, 20, 20))), fp.losses.mse, fp.optim.SGD(0.1)).graph


def masks(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if isinstance(node.op, MaskedBatchNormGrad)]


@pytest.mark.parametrize("residual", [False, True])
def test_the_same_results_in_fewer_ops(residual: bool) -> None:
    graph = training(residual)
    after = fuse_norm_masks(graph, lambda op, inputs, outputs: True)
    (node,) = masks(after)
    assert isinstance(node.op, MaskedBatchNormGrad) and node.op.keeps == residual
    assert len(after.nodes) == len(graph.nodes) - 1
    assert not any(each.op.name in ("masked_map", "batch_norm_grad") for each in after.nodes)
    inputs, stored = (
        {value.name: (0.1 * RNG.standard_normal(value.shape)).astype(value.dtype.numpy) for value in values}
        for values in (graph.inputs, graph.stored)
    )
    old, new = evaluate(graph, inputs, stored), evaluate(after, inputs, stored)
    for before, behind in zip(graph.results, after.results, strict=True):
        assert old[before].tobytes() == new[behind].tobytes(), before.name


def test_where_there_is_no_kernel_nothing_is_done() -> None:
    graph = training(False)
    assert fuse_norm_masks(graph, lambda op, inputs, outputs: False) is graph
    seen = []
    fuse_norm_masks(graph, lambda op, inputs, outputs: bool(seen.append((op, inputs, outputs))))
    ((op, inputs, outputs),) = seen
    assert list(op.infer(inputs)) == list(outputs)

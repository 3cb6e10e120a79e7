"""Convolutions over concatenated channels in a whole step: beside the texts of `split_concats/`."""

from __future__ import annotations

import numpy as np

import foreplan as fp
from foreplan.ops.conv.ops import ConvDataGrad
from tests.ops.check import allocated_bytes


def test_unet_concatenates_nothing() -> None:
    graph = fp.models.build("unet:batch=2,size=16,width=16")
    step = fp.compile(graph, fp.losses.cross_entropy, fp.optim.SGD(0.1))
    assert any(node.op.name == "concat" for node in graph.nodes)
    images = [call for call in step.program.calls if call.op.name == "concat" and call.outputs[0].type.shape[0] == 2]
    assert not images


def test_weights_of_a_range_of_channels_are_not_copied() -> None:
    for kernel, pad in ((3, 1), (1, 0)):
        op = ConvDataGrad((1, 1), ((pad, pad),) * 2, (1, 1), spatial=(6, 6))
        g, w = np.ones((1, 128, 6, 6), np.float32), np.ones((128, 256, kernel, kernel), np.float32)
        part = w[:, 64:192]
        assert allocated_bytes(op, g, part) < part.nbytes // 2 and not part.flags.c_contiguous

"""Where means over channels are taken as means over images of one channel."""

from __future__ import annotations

from foreplan.graph import Graph, GraphBuilder, TensorType
from foreplan.graph.types import FLOAT32
from foreplan.lower import lower
from foreplan.lower.fallbacks import fallbacks
from foreplan.ops.pool import lrn
from tests.cpu.check import needs_onednn

pytestmark = needs_onednn()


def normalised(shape: tuple[int, ...]) -> Graph:
    """Local response normalisation behind a convolution, whose channels lie side by side."""
    from foreplan.ops.conv.ops import conv

    b = GraphBuilder("g")
    x = b.input("x", TensorType(FLOAT32, shape))
    w = b.input("w", TensorType(FLOAT32, (shape[1], shape[1], 1, 1)))
    return b.finish({"y": lrn(b, conv(b, x, w), 5)})


def test_normalisation_over_channels_falls_back_nowhere_and_takes_channels_as_they_lie() -> None:
    program = lower(normalised((2, 24, 10, 10)), "cpu:threads=1")
    assert not fallbacks(program)
    (call,) = (call for call in program.calls if call.op.name == "avg_pool")
    assert call.inputs[0].window.strides[2] == call.outputs[0].window.strides[2] == FLOAT32.itemsize

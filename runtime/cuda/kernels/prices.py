"""Assumed times of kernels, in nanoseconds: by the roofline, at the share of a card's peak that they reach.

Every share was measured on an H100; it is the median of the cases that stand beside it.
"""

from __future__ import annotations

from foreplan.graph import Op
from foreplan.graph.op import Windows
from foreplan.ops.attention.ops import Attention
from foreplan.ops.conv.ops import ConvWeightGrad
from foreplan.runtime.cuda.device import Device
from foreplan.units import align_up

# Foreplan's own kernels, which use no tensor cores: convolutions, and gradients of their weights; and how many channels
# of the result they compute together.
CONVOLUTION, WEIGHT_GRADIENT, TOGETHER = 0.03, 0.01, 16
# Attention and its gradient in float32: GPT-2 small (batch 16, 1,024 tokens, causal).
ATTENTION, ATTENTION_GRADIENT = 0.24, 0.17


def roofline(
    op: Op, inputs: Windows, outputs: Windows, device: Device, precision: str, reached: float, nbytes: int = 0
) -> float:
    """Nanoseconds at the share `reached` of the card's peak; `nbytes` are read and written besides the op's own."""
    cost = op.cost([x.type for x in inputs], [y.type for y in outputs])
    moved = (cost.nbytes + nbytes) / device.bytes_per_second
    return max(cost.flops / (device.peak(precision) * reached), moved) * 1e9


def convolution(op: Op, inputs: Windows, outputs: Windows, device: Device) -> int:
    """The time of foreplan's own kernel for a convolution or a gradient of one."""
    of_weights = isinstance(op, ConvWeightGrad)
    channels = outputs[0].shape[0 if of_weights else 1]
    reached = (WEIGHT_GRADIENT if of_weights else CONVOLUTION) * channels / max(1, align_up(channels, TOGETHER))
    return round(roofline(op, inputs, outputs, device, "float32", reached or CONVOLUTION))


def attention(op: Op, inputs: Windows, outputs: Windows, device: Device) -> int:
    """The time of foreplan's own kernels for attention or its gradient."""
    reached = ATTENTION if isinstance(op, Attention) else ATTENTION_GRADIENT
    return round(roofline(op, inputs, outputs, device, "float32", reached))

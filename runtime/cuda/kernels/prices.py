"""Assumed times of kernels, in nanoseconds: by the roofline, at the share of a card's peak that they reach.

Shares were measured on an H100, and are medians of the cases that stand beside them, except where another card is named
or a share is called assumed.
"""

from __future__ import annotations

from math import prod

from foreplan.base.units import align_up, ceil_div
from foreplan.graph import Op
from foreplan.graph.op import Windows
from foreplan.ops.attention.blocks import AttentionOp
from foreplan.ops.attention.ops import Attention
from foreplan.ops.attention.packed import PackedAttentionGrad
from foreplan.ops.conv.common import ConvOp
from foreplan.ops.conv.ops import ConvDataGrad, ConvWeightGrad
from foreplan.runtime.cuda.device import Device
from foreplan.runtime.cuda.kernels import depthwise
from foreplan.runtime.cuda.kernels.attention_tiles import FORWARD, QUERIES, tile_for
from foreplan.runtime.cuda.kernels.product import DEPTH, parts_of, tile_of

# Foreplan's own convolutions, and gradients of weights, which use no tensor cores: of what is computed, in whole tiles
# of so many rows and columns, if there are BLOCKS tiles of 32 x 32 for each multiprocessor (H200: ResNet-50, batch 32,
# and a chain of nine). In several groups, a tile has results of one group alone (EfficientNet-B0, as products).
CONVOLUTION, WEIGHT_GRADIENT = {64: 0.125, 32: 0.085}, {64: 0.15, 32: 0.085}
GROUPED, BLOCKS = 0.055, 5
# Depthwise convolutions and their data gradients, and gradients of their weights (H200: MobileNetV2, EfficientNet-B0
# and ConvNeXt in bfloat16, the first two in float32 too; batch 64 and 128).
DEPTHWISE, DEPTHWISE_WEIGHTS = 0.075, 0.055
# Likewise with several filters for each channel (H200: 64 for one).
SEVERAL, SEVERAL_WEIGHTS = 0.017, 0.03
# Attention and its gradient in float32, and on tensor cores in TensorFloat-32. With few blocks, some of the card waits
# for the longest: IDLE times the work of a mean block (H200: heads of GPT-2 small, causal, batch 1 and 16).
ATTENTION, ATTENTION_GRADIENT, IDLE = 0.521, 0.388, 2.6
ATTENTION_TF32, ATTENTION_GRADIENT_TF32 = 0.179, 0.144


def roofline(
    op: Op, inputs: Windows, outputs: Windows, device: Device, precision: str, reached: float, nbytes: int = 0
) -> float:
    """Nanoseconds at the share `reached` of the card's peak; `nbytes` are read and written besides the op's own."""
    cost = op.cost([x.type for x in inputs], [y.type for y in outputs])
    moved = (cost.nbytes + nbytes) / device.bytes_per_second
    return max(cost.flops / (device.peak(precision) * reached), moved) * 1e9


def convolution(op: Op, inputs: Windows, outputs: Windows, device: Device) -> int:
    """The time of foreplan's own kernel for a convolution or a gradient of one."""
    assert isinstance(op, ConvOp)
    of_weights = isinstance(op, ConvWeightGrad)
    w = outputs[0] if of_weights else inputs[1]
    filters, own, taps = w.shape[0] // op.groups, w.shape[1], prod(w.shape[2:])
    if depthwise.serves(op, inputs, outputs):
        one, several = (DEPTHWISE_WEIGHTS, SEVERAL_WEIGHTS) if of_weights else (DEPTHWISE, SEVERAL)
        return round(roofline(op, inputs, outputs, device, "float32", one if filters == 1 else several))
    images = inputs[1] if of_weights else outputs[0]
    positions = images.shape[0] * prod(images.shape[2:])
    if of_weights:
        rows, columns, terms = filters, own * taps, positions
    elif isinstance(op, ConvDataGrad):
        rows, columns, terms = positions, own, filters * taps
    else:
        rows, columns, terms = positions, filters, own * taps
    tile = tile_of(rows, columns)
    tiles = op.groups * max(1, ceil_div(rows, tile) * ceil_div(columns, tile))
    share = op.flops([x.type for x in inputs], [y.type for y in outputs]) / _of_tiles(tile, tiles, terms, device)
    whole = GROUPED if op.groups > 1 else (WEIGHT_GRADIENT if of_weights else CONVOLUTION)[tile]
    return round(roofline(op, inputs, outputs, device, "float32", whole * share or whole))


def _of_tiles(tile: int, tiles: int, terms: int, device: Device) -> float:
    """Operations that the whole card would do in the time of so many tiles with sums of so many terms. A data gradient
    goes over all taps, also those that meet no window.
    """
    blocks = tiles * parts_of(terms, tiles, device) * (tile // 32) ** 2
    busy = min(1.0, blocks / (BLOCKS * device.multiprocessors))
    return 2 * tile**2 * tiles * max(DEPTH, align_up(terms, DEPTH)) / busy


def attention(op: Op, inputs: Windows, outputs: Windows, device: Device, tensor_cores: bool = False) -> int:
    """The time of foreplan's own kernels for attention or its gradient, a tile of queries a block."""
    types = [x.type for x in inputs]
    if isinstance(op, PackedAttentionGrad):
        e, causal = op.unpacked.sizes(op.unpacked_types(types)), op.causal
    else:
        assert isinstance(op, AttentionOp)
        e, causal = op.sizes(types), op.causal
    forward = isinstance(op, Attention)
    tile, _ = tile_for(FORWARD if forward else QUERIES, e, device, tensor_cores)
    filled = e.queries / max(1, align_up(e.queries, tile.rows)) * e.keys / max(1, align_up(e.keys, tile.columns))
    blocks = max(1, e.batch * e.heads * ceil_div(e.queries, tile.rows))
    whole = 1 + IDLE * (1 if causal else 0.5) * device.multiprocessors / blocks  # of a causal one, the last takes twice
    if tensor_cores:
        precision, reached = "tensorfloat32", ATTENTION_TF32 if forward else ATTENTION_GRADIENT_TF32
    else:
        precision, reached = "float32", ATTENTION if forward else ATTENTION_GRADIENT
    return round(roofline(op, inputs, outputs, device, precision, reached * (filled or 1.0) / whole))

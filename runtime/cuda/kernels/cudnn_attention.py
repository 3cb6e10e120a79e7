"""Attention by cuDNN, of bfloat16 and float16: each plan that it has for a card is a kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from foreplan.graph import Op
from foreplan.graph.op import Windows
from foreplan.ops.attention.gradient import AttentionGrad
from foreplan.ops.attention.ops import LOWEST, Attention
from foreplan.ops.expr import parse_expr
from foreplan.runtime.cuda.device import Device
from foreplan.runtime.cuda.kernels.cudnn_conv import CUDNN, RANK, WORD
from foreplan.runtime.cuda.kernels.map import Tensor, broadcast, map_launches
from foreplan.runtime.cuda.kernels.prices import roofline
from foreplan.runtime.cuda.launch import (
    Address,
    Arithmetic,
    Execute,
    Launch,
    LaunchKernel,
    Scratch,
    input_at,
    output_at,
)
from foreplan.runtime.cuda.libraries.cudnn import ADDRESS_ALIGNMENT
from foreplan.runtime.cuda.libraries.cudnn_sdpa import attention_plans, expanded_mask, unmasked
from foreplan.runtime.kernel import Refused

# Of a card's peak in the narrow type, reached by attention and by its gradient: GPT-2 small (batch 16, 1,024 tokens,
# causal, bfloat16, deterministic) on an H100 with cuDNN 9.19.
REACHED, REACHED_BACKWARD = 0.15, 0.145

# The mask of a hidden key; and the log-sum-exp below which all keys of a query are hidden. Low enough that exponentials
# are 0 beside a key that is read; high enough that float32 tells scores apart, which cuDNN's sums need.
HIDDEN, NONE = -32768.0, -30000.0
_RAISED = parse_expr(f"max(float32(a0), {HIDDEN})")
_ZERO = parse_expr(f"where((a1 < {NONE}), 0.0, float32(a0))")
_LOWEST = parse_expr(f"where((a0 < {NONE}), {LOWEST}, a0)")
_ENDLESS = parse_expr(f"where((a0 < {NONE}), 1e30, a0)")


def attention_kernels(
    op: Op, inputs: Windows, outputs: Windows, device: Device, how: Arithmetic
) -> Mapping[str, LaunchKernel]:
    """The kernels of attention or its gradient, by name; none where cuDNN is not installed, or has none."""
    found = {}
    for rank, plan in enumerate(attention_plans(op, inputs, outputs, device, deterministic=how.deterministic)):
        reached = REACHED if isinstance(op, Attention) else REACHED_BACKWARD
        kernel = attention_kernel(op, plan.workspace.to_bytes(WORD, "little") + plan.blob, inputs, outputs)
        # Data in the workspace is written and read once; with a mask, the output once more.
        again = 2 * kernel.workspace + 2 * outputs[0].type.nbytes * (len(kernel.instructions) > 1)
        least = roofline(op, inputs, outputs, device, inputs[0].type.dtype.name, reached, again)
        found[f"{CUDNN} {plan.name}"] = replace(kernel, nanoseconds=round(least * (1 + RANK * rank)))
    return found


def attention_kernel(op: Op, payload: bytes, inputs: Windows, outputs: Windows) -> LaunchKernel:
    """The kernel whose payload is in a plan. cuDNN checks its stated workspace when it is bound.

    A mask is expanded to cuDNN's form, and numbers below `HIDDEN` are raised to it. A query with only hidden keys then
    gets a weighted mean of values; zeros replace it, and its log-sum-exp becomes the op's. Its gradient gets a
    log-sum-exp that makes all its probabilities zero.

    Raises:
        Refused: it is no such plan.
    """
    if not isinstance(op, Attention | AttentionGrad) or len(payload) <= WORD:
        raise Refused(f"no plan of cuDNN's for {op.name}")
    nbytes, blob, count = int.from_bytes(payload[:WORD], "little"), payload[WORD:], unmasked(op)
    places: list[Address] = [*map(input_at, range(count)), *map(output_at, range(len(outputs)))]
    mask, scratch = expanded_mask(op, inputs), Scratch()
    at = scratch.take(nbytes)
    before: tuple[Launch, ...] = ()
    after: tuple[Launch, ...] = ()
    if mask is not None:
        places.append(scratch.take(mask.nbytes))
        given = broadcast(input_at(count), inputs[count], mask.shape)
        before += map_launches([_RAISED], mask.shape, [given], [Tensor(places[-1], mask.dtype, mask.strides)])
        if isinstance(op, AttentionGrad):
            own = broadcast(input_at(4), inputs[4], inputs[4].shape)
            places[4] = scratch.take(inputs[4].type.nbytes)
            before += map_launches([_ENDLESS], inputs[4].shape, [own], [replace(own, start=places[4])])
        else:
            o, sums = outputs
            result, own = (broadcast(output_at(i), y, y.shape) for i, y in enumerate(outputs))
            batch, head, query = own.strides
            along = (batch, query, head, 0) if op.heads_last else (batch, head, query, 0)
            after += map_launches([_ZERO], o.shape, [result, replace(own, strides=along)], [result])
            after += map_launches([_LOWEST], sums.shape, [own], [own])
    run = Execute(blob, tuple(enumerate(places, 1)), at, nbytes)
    return LaunchKernel((*before, run, *after), scratch.nbytes, payload=payload, alignment=ADDRESS_ALIGNMENT)

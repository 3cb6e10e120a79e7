"""Attention by cuDNN, of bfloat16 and float16: each plan that it has for a card is a kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from foreplan.gpu.cudnn import ADDRESS_ALIGNMENT
from foreplan.gpu.cudnn_conv import CUDNN, RANK, WORD, roofline
from foreplan.gpu.cudnn_sdpa import attention_plans
from foreplan.gpu.device import Device
from foreplan.gpu.launch import Address, Execute, LaunchKernel, Refused, Windows, input_at, output_at, workspace_at
from foreplan.graph import Op
from foreplan.ops.attention import Attention
from foreplan.ops.attention_grad import AttentionGrad

# Of a card's peak in the narrow type, reached by attention and by its gradient: assumed, none was measured. Of fused
# kernels on an H100, 0.35 and 0.75 were published (Shah et al., 2024, arXiv:2407.08608), and gradients take longer.
REACHED, REACHED_BACKWARD = 0.5, 0.35


def attention_kernels(
    op: Op, inputs: Windows, outputs: Windows, device: Device, *, deterministic: bool
) -> Mapping[str, LaunchKernel]:
    """The kernels of attention or its gradient, by name; none where cuDNN is not installed, or has none."""
    found = {}
    for rank, plan in enumerate(attention_plans(op, inputs, outputs, device, deterministic=deterministic)):
        reached = REACHED if isinstance(op, Attention) else REACHED_BACKWARD
        # What lies in the workspace is written and read once.
        least = roofline(op, inputs, outputs, device, inputs[0].type.dtype.name, reached, 2 * plan.workspace)
        kernel = attention_kernel(op, plan.workspace.to_bytes(WORD, "little") + plan.blob, inputs, outputs)
        found[f"{CUDNN} {plan.name}"] = replace(kernel, nanoseconds=round(least * (1 + RANK * rank)))
    return found


def attention_kernel(op: Op, payload: bytes, inputs: Windows, outputs: Windows) -> LaunchKernel:
    """The kernel whose payload is in a plan. Whether it says its workspace truly, cuDNN tells when it is bound.

    Raises:
        Refused: it is none.
    """
    if not isinstance(op, Attention | AttentionGrad) or len(payload) <= WORD:
        raise Refused(f"no plan of cuDNN's for {op.name}")
    nbytes, blob = int.from_bytes(payload[:WORD], "little"), payload[WORD:]
    places: list[Address] = [*map(input_at, range(len(inputs))), *map(output_at, range(len(outputs)))]
    run = Execute(blob, tuple(enumerate(places, 1)), workspace_at(), nbytes)
    return LaunchKernel((run,), nbytes, payload=payload, alignment=ADDRESS_ALIGNMENT)

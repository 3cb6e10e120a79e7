"""Convolutions by cuDNN: each plan that it has for a card is a kernel; its first is predicted to be the fastest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from foreplan.gpu.cudnn import UIDS, convolution_plans, missing
from foreplan.gpu.device import Device
from foreplan.gpu.launch import Execute, LaunchKernel, Refused, Scratch, Windows, input_at, output_at
from foreplan.gpu.map import broadcast, map_launches
from foreplan.graph import Op
from foreplan.graph.layouts import lie_alike
from foreplan.ops.conv import Conv, ConvDataGrad, ConvWeightGrad
from foreplan.ops.expr import parse_expr

# cuDNN ranks its engines by predicted time and does not say it: what a place further down is taken to cost.
RANK = 0.1
CUDNN = "cudnn"  # how its kernels' names begin
WORD = 8  # bytes of a payload that say how much workspace it takes; the plan follows
REACHED, OWN = 0.6, 0.2  # of a card's peak: by the first, and by kernels of ours


def cudnn_kernels(
    op: Op, inputs: Windows, outputs: Windows, device: Device, *, tf32: bool, deterministic: bool
) -> Mapping[str, LaunchKernel]:
    """The kernels of a convolution or of a gradient of one, by name; none where cuDNN is not installed, or has none.

    What is added to the result (a bias, or a tensor of its shape) is a launch of its own.
    """
    if not isinstance(op, Conv | ConvDataGrad | ConvWeightGrad) or missing():
        return {}
    plans = convolution_plans(op, inputs[:2], outputs, device, tf32=tf32, deterministic=deterministic)
    narrow = inputs[0].type.dtype.name
    least = _nanoseconds(
        op, inputs, outputs, device, "tensorfloat32" if tf32 and narrow == "float32" else narrow, REACHED
    )
    found = {}
    for rank, plan in enumerate(plans):
        payload = plan.workspace.to_bytes(WORD, "little") + plan.blob
        kernel = _kernel(payload, inputs, outputs)
        found[f"{CUDNN} {plan.name}"] = replace(kernel, nanoseconds=round(least * (1 + RANK * rank)))
    return found


def cudnn_kernel(op: Op, payload: bytes, inputs: Windows, outputs: Windows) -> LaunchKernel:
    """The kernel whose payload is in a plan. Whether it says its workspace truly, cuDNN tells when it is bound.

    Raises:
        Refused: it is none.
    """
    if not isinstance(op, Conv | ConvDataGrad | ConvWeightGrad) or len(payload) <= WORD:
        raise Refused(f"no plan of cuDNN's for {op.name}")
    return _kernel(payload, inputs, outputs)


def _kernel(payload: bytes, inputs: Windows, outputs: Windows) -> LaunchKernel:
    """The plan; where something is added, a map behind it, over a result of its own where that is a whole tensor."""
    (y,), scratch = outputs, Scratch()
    nbytes, blob = int.from_bytes(payload[:WORD], "little"), payload[WORD:]
    at = scratch.take(nbytes)
    places = (input_at(0), input_at(1), output_at(0))
    if len(inputs) == 2:
        return LaunchKernel((Execute(blob, tuple(zip(UIDS, places)), at, nbytes),), scratch.nbytes, payload=payload)
    other = inputs[2]
    whole = other.shape == y.shape
    here = scratch.take(y.type.nbytes) if whole else output_at(0)
    terms = [broadcast(here, y, y.shape), broadcast(input_at(2), other, y.shape)]
    add = map_launches([parse_expr("(a0 + a1)")], y.shape, terms, [broadcast(output_at(0), y, y.shape)])
    run = Execute(blob, tuple(zip(UIDS, (*places[:2], here))), at, nbytes)
    overwrites = ((0, 2),) if whole and lie_alike(other, y) else ()
    return LaunchKernel((run, *add), scratch.nbytes, overwrites, payload=payload)


def own_nanoseconds(op: Op, inputs: Windows, outputs: Windows, device: Device) -> int:
    """What a kernel of ours takes for a convolution, which uses no tensor cores."""
    return round(_nanoseconds(op, inputs, outputs, device, "float32", OWN))


def _nanoseconds(op: Op, inputs: Windows, outputs: Windows, device: Device, precision: str, reached: float) -> float:
    """The roofline of a convolution at so much of the card's peak."""
    cost = op.cost([x.type for x in inputs], [y.type for y in outputs])
    return max(cost.flops / (device.peak(precision) * reached), cost.nbytes / device.bytes_per_second) * 1e9

"""Convolutions by cuDNN: each plan that it has for a card is a kernel; its first is predicted to be the fastest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from foreplan.gpu.cudnn import ADDRESS_ALIGNMENT, UIDS, convolution_plans, missing
from foreplan.gpu.device import Device
from foreplan.gpu.launch import Execute, LaunchKernel, Refused, Scratch, Windows, input_at, output_at
from foreplan.gpu.map import broadcast, map_launches
from foreplan.graph import Op, Window
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
    made = [_as_cudnn_makes_it(inputs, outputs)]
    plans = convolution_plans(op, inputs[:2], made, device, tf32=tf32, deterministic=deterministic)
    narrow = inputs[0].type.dtype.name
    least = roofline(op, inputs, outputs, device, "tensorfloat32" if tf32 and narrow == "float32" else narrow, REACHED)
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


def _as_cudnn_makes_it(inputs: Windows, outputs: Windows) -> Window:
    """The result as it lies, in the element type of the inputs: cuDNN has no engine that writes another."""
    (y,), dtype = outputs, inputs[0].type.dtype
    strides = tuple(step // y.type.dtype.itemsize * dtype.itemsize for step in y.strides)
    return Window(y.type.with_dtype(dtype), strides)


def _kernel(payload: bytes, inputs: Windows, outputs: Windows) -> LaunchKernel:
    """The plan, and behind it a map where something is added, or where the result has another element type.

    Then, but for a bias, cuDNN's own result is workspace.
    """
    (y,), scratch = outputs, Scratch()
    nbytes, blob = int.from_bytes(payload[:WORD], "little"), payload[WORD:]
    at, made = scratch.take(nbytes), _as_cudnn_makes_it(inputs, outputs)
    added = inputs[2:]
    whole = any(x.shape == y.shape for x in added)
    here = scratch.take(made.type.nbytes) if whole or made != y else output_at(0)
    places = (input_at(0), input_at(1), here)
    run = Execute(blob, tuple(zip(UIDS, places)), at, nbytes)
    if not added and made == y:
        return LaunchKernel((run,), scratch.nbytes, payload=payload, alignment=ADDRESS_ALIGNMENT)
    ones = (1,) * (len(y.shape) - 2)  # a bias has one number a channel
    seen = [x if x.shape == y.shape else x.viewed(x.shape + ones, x.strides + ones) for x in added]
    terms = [broadcast(here, made, y.shape), *(broadcast(input_at(2), x, y.shape) for x in seen)]
    text = "(a0 + a1)" if added else "a0"
    after = map_launches([parse_expr(text)], y.shape, terms, [broadcast(output_at(0), y, y.shape)])
    overwrites = ((0, 2),) if whole and lie_alike(added[0], y) else ()
    return LaunchKernel((run, *after), scratch.nbytes, overwrites, payload=payload, alignment=ADDRESS_ALIGNMENT)


def own_nanoseconds(op: Op, inputs: Windows, outputs: Windows, device: Device) -> int:
    """What a kernel of ours takes for an op that cuDNN has plans of: it uses no tensor cores."""
    return round(roofline(op, inputs, outputs, device, "float32", OWN))


def roofline(
    op: Op, inputs: Windows, outputs: Windows, device: Device, precision: str, reached: float, nbytes: int = 0
) -> float:
    """Nanoseconds at so much of the card's peak, with so many bytes read and written besides the op's own."""
    cost = op.cost([x.type for x in inputs], [y.type for y in outputs])
    moved = (cost.nbytes + nbytes) / device.bytes_per_second
    return max(cost.flops / (device.peak(precision) * reached), moved) * 1e9

"""Convolutions by cuDNN: each plan that it has for a card is a kernel, priced by what its engine computes with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

from foreplan.graph import Op, Window
from foreplan.graph.layouts import channels_last, lie_alike
from foreplan.graph.op import Windows
from foreplan.ops.conv.ops import Conv, ConvDataGrad, ConvOp, ConvWeightGrad
from foreplan.ops.expr import parse_expr
from foreplan.runtime.cuda.device import Device
from foreplan.runtime.cuda.kernels.map import broadcast, copies, map_launches
from foreplan.runtime.cuda.launch import (
    Execute,
    Instruction,
    LaunchKernel,
    Scratch,
    added_in_place,
    input_at,
    output_at,
)
from foreplan.runtime.cuda.libraries.cudnn import ADDING, ADDRESS_ALIGNMENT, UIDS, CudnnPlan, busy, missing
from foreplan.runtime.cuda.libraries.cudnn_conv_plans import convolution_plans
from foreplan.runtime.kernel import Refused
from foreplan.units import align_up

# cuDNN ranks its engines by predicted time and does not say it: what a place further down is taken to cost.
RANK = 0.1
CUDNN = "cudnn"  # how its kernels' names begin
WORD = 8  # bytes of a payload that say how much workspace it takes; the plan follows
# Of a card's peak, or of reading and writing if that takes longer. Medians of 3,400 plans for convolutions of
# ResNet-50, MobileNetV2 and a chain of nine, on an H100 (cuDNN 9.19): engines on tensor cores, others, and engine 0,
# which there is for every shape and which takes one element of the result at a time; and kernels of ours.
REACHED, WITHOUT_TENSOR_CORES = 0.4, 0.3
PLAIN = "eng0"
REACHED_PLAIN, REACHED_PLAIN_OF_WEIGHTS = 0.007, 0.002
OWN, OWN_OF_WEIGHTS = 0.03, 0.01
TOGETHER = 16  # bytes of channels that tensor cores take together: fewer are filled up


def cudnn_kernels(
    op: Op, inputs: Windows, outputs: Windows, device: Device, *, tf32: bool, deterministic: bool
) -> Mapping[str, LaunchKernel]:
    """The kernels of a convolution or of a gradient of one, by name; none where cuDNN is not installed, or has none.

    What is added to the result lies where it goes, or is copied there first; a bias is added by a launch of its own.
    """
    if not isinstance(op, Conv | ConvDataGrad | ConvWeightGrad) or missing():
        return {}
    made, adds = _as_cudnn_makes_it(inputs, outputs), _adds(inputs, outputs)
    plans = convolution_plans(
        op,
        [inputs[0], _as_cudnn_reads_it(op, inputs)],
        [made],
        device,
        adds=adds,
        tf32=tf32,
        deterministic=deterministic,
    )
    found = {}
    for rank, plan in enumerate(plans):
        payload = plan.workspace.to_bytes(WORD, "little") + plan.blob
        kernel = _kernel(op, payload, inputs, outputs)
        mapped = not adds and (made != outputs[0] or len(inputs) > 2)  # which reads the result and writes it
        again = 2 * made.type.nbytes * mapped / device.bytes_per_second * 1e9
        least = _nanoseconds(op, plan, inputs, outputs, device)
        found[f"{CUDNN} {plan.name}"] = replace(kernel, nanoseconds=round(least * (1 + RANK * rank) + again))
    return found


def _nanoseconds(op: ConvOp, plan: CudnnPlan, inputs: Windows, outputs: Windows, device: Device) -> float:
    """What a plan takes: on tensor cores, if its engine has the note, else by float32 arithmetic; and besides, its
    workspace is written and read once, such as a copy of images with few channels that has eight.
    """
    moved = 2 * plan.workspace / device.bytes_per_second * 1e9
    if not plan.tensor_cores:
        of_weights = isinstance(op, ConvWeightGrad)
        plain = REACHED_PLAIN_OF_WEIGHTS if of_weights else REACHED_PLAIN
        reached = plain if plan.name == PLAIN else WITHOUT_TENSOR_CORES
        return roofline(op, inputs, outputs, device, "float32", reached) + moved
    dtype = inputs[0].type.dtype
    precision = "tensorfloat32" if dtype.name == "float32" else dtype.name
    w, together = (outputs[0] if isinstance(op, ConvWeightGrad) else inputs[1]).shape, TOGETHER // dtype.itemsize
    share = prod(n / align_up(n, together) for n in (w[0] // op.groups, w[1]))
    share *= busy(plan.blob, outputs[0].type.size, device)
    return roofline(op, inputs, outputs, device, precision, REACHED * share) + moved


def cudnn_kernel(op: Op, payload: bytes, inputs: Windows, outputs: Windows) -> LaunchKernel:
    """The kernel whose payload is in a plan. Whether it says its workspace truly, cuDNN tells when it is bound.

    Raises:
        Refused: it is none.
    """
    if not isinstance(op, Conv | ConvDataGrad | ConvWeightGrad) or len(payload) <= WORD:
        raise Refused(f"no plan of cuDNN's for {op.name}")
    if _adds(inputs, outputs) != (ADDING in payload):
        raise Refused(f"a plan of cuDNN's for {op.name} that adds its result, or not, where it should be otherwise")
    return _kernel(op, payload, inputs, outputs)


def _as_cudnn_makes_it(inputs: Windows, outputs: Windows) -> Window:
    """The result as it lies, in the element type of the inputs: cuDNN has no engine that writes another."""
    (y,), dtype = outputs, inputs[0].type.dtype
    strides = tuple(step // y.type.dtype.itemsize * dtype.itemsize for step in y.strides)
    return Window(y.type.with_dtype(dtype), strides)


def _as_cudnn_reads_it(op: Op, inputs: Windows) -> Window:
    """The second input: weights that are a range of others' channels, or whose taps lie in another order, are copied
    first. cuDNN has no engine for gaps; and an engine that takes any order reads it as if it were C order.
    """
    second = inputs[1]
    orders = Window.dense(second.type), channels_last(second.type)
    known = isinstance(op, ConvWeightGrad) or any(lie_alike(second, each) for each in orders)
    return second if known else Window.dense(second.type)


def _adds(inputs: Windows, outputs: Windows) -> bool:
    """Whether cuDNN adds its result to a tensor that lies where it goes: one of the type that cuDNN makes."""
    (y,) = outputs
    return any(x.shape == y.shape for x in inputs[2:]) and _as_cudnn_makes_it(inputs, outputs) == y


def _kernel(op: Op, payload: bytes, inputs: Windows, outputs: Windows) -> LaunchKernel:
    """The plan; behind copies of weights that have gaps, and of what it adds to, unless that is in place.

    Where it cannot add what is to be added, or its result has another element type, a map follows; then, but for a
    bias, cuDNN's own result is workspace.
    """
    (y,), scratch = outputs, Scratch()
    nbytes, blob = int.from_bytes(payload[:WORD], "little"), payload[WORD:]
    at, made, added = scratch.take(nbytes), _as_cudnn_makes_it(inputs, outputs), inputs[2:]
    adds = _adds(inputs, outputs)
    here = scratch.take(made.type.nbytes) if made != y else output_at(0)
    second = _as_cudnn_reads_it(op, inputs)
    there = input_at(1) if second == inputs[1] else scratch.take(second.type.nbytes)
    run: tuple[Instruction, ...] = (Execute(blob, tuple(zip(UIDS, (input_at(0), there, here))), at, nbytes),)
    if second != inputs[1]:
        run = (*copies(input_at(1), inputs[1], there, second), *run)
    if adds:
        run = (*copies(input_at(2), added[0], output_at(0), y), *run)
    elif added or made != y:
        ones = (1,) * (len(y.shape) - 2)  # a bias has one number a channel
        seen = [x if x.shape == y.shape else x.viewed(x.shape + ones, x.strides + ones) for x in added]
        terms = [broadcast(here, made, y.shape), *(broadcast(input_at(2), x, y.shape) for x in seen)]
        text = "(a0 + a1)" if added else "a0"
        run = (*run, *map_launches([parse_expr(text)], y.shape, terms, [broadcast(output_at(0), y, y.shape)]))
    overwrites = added_in_place(inputs, y)
    return LaunchKernel(run, scratch.nbytes, overwrites, payload=payload, alignment=ADDRESS_ALIGNMENT)


def own_nanoseconds(op: Op, inputs: Windows, outputs: Windows, device: Device) -> int:
    """What a kernel of ours takes for an op that cuDNN has plans of: it uses no tensor cores."""
    return round(
        roofline(op, inputs, outputs, device, "float32", OWN_OF_WEIGHTS if isinstance(op, ConvWeightGrad) else OWN)
    )


def roofline(
    op: Op, inputs: Windows, outputs: Windows, device: Device, precision: str, reached: float, nbytes: int = 0
) -> float:
    """Nanoseconds at so much of the card's peak, with so many bytes read and written besides the op's own."""
    cost = op.cost([x.type for x in inputs], [y.type for y in outputs])
    moved = (cost.nbytes + nbytes) / device.bytes_per_second
    return max(cost.flops / (device.peak(precision) * reached), moved) * 1e9

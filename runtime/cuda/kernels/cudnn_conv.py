"""Convolutions by cuDNN: each plan that it has for a card is a kernel, priced by the units that its engine uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

from foreplan.base.units import align_up, ceil_div
from foreplan.graph import Op, Window
from foreplan.graph.layouts import channels_last, lie_alike
from foreplan.graph.op import Windows
from foreplan.graph.types import Shape
from foreplan.ops.conv.ops import Conv, ConvDataGrad, ConvOp, ConvWeightGrad
from foreplan.ops.expr import parse_expr
from foreplan.runtime.cuda.device import Device
from foreplan.runtime.cuda.kernels.map import broadcast, copies, map_launches
from foreplan.runtime.cuda.kernels.prices import roofline
from foreplan.runtime.cuda.launch import (
    Arithmetic,
    Execute,
    Instruction,
    LaunchKernel,
    Scratch,
    added_in_place,
    input_at,
    output_at,
)
from foreplan.runtime.cuda.libraries.cudnn import ADDING, ADDRESS_ALIGNMENT, UIDS, CudnnPlan, busy, in_clusters, missing
from foreplan.runtime.cuda.libraries.cudnn_conv_plans import convolution_plans
from foreplan.runtime.kernel import Refused

# cuDNN ranks its engines by predicted time, but does not tell the time: the assumed cost of each further place.
RANK = 0.03
CUDNN = "cudnn"  # how its kernels' names begin
WORD = 8  # bytes of a payload with its workspace's size; the plan follows
# What follows was seen on an H100 (cuDNN 9.19): 3,400 plans for convolutions of ResNet-50 and a chain of nine in
# bfloat16 and TensorFloat-32, and 230 in float32, U-Net's too. Predicted over measured time is 0.57 to 2.06 for eight
# of ten; the chosen plans take 6 % longer than the best. Of a card's peak, or of reading and writing if that takes
# longer: Hopper's engines, other engines on tensor cores, and those without; among these, slow ones. Engine 0 is there
# for every shape, and takes one element of the result at a time.
HOPPERS, REACHED, WITHOUT_TENSOR_CORES, SLOW = 0.35, 0.15, 0.3, 0.15
HOPPERS_OF_WEIGHTS, REACHED_OF_WEIGHTS = 0.2, 0.25  # of TensorFloat-32's, for gradients of weights (H200 and H100)
PLAIN, PLAIN_OF_WEIGHTS = 0.007, 0.002
FEW, PLAIN_OF_FEW = (2, 8), 0.03  # filters of data gradients by engine 0 (H200 and H100)
PLAIN_AT_ONCE = 256  # gradients of weights that engine 0 makes together: 18 of them take as long (H200)
# Output and input channels that such engines compute together: fewer are filled up to this number.
TOGETHER_ON_HOPPER, TOGETHER, IN_FLOAT32, IN_NARROW = (64, 64), (64, 16), (32, 8), (32, 1)
# Engine 67 without tensor cores: one multiprocessor computes all sums of a weight's gradient.
GRADIENTS_AT_ONCE = 2048
# Data gradients of one tap with strides, in float32 without tensor cores: engine 2 reached 2.5, 9 and 12 % (ResNet-50's
# in layers 2 to 4, batch 32, H200).
STRIDED_TAP = 0.05


def cudnn_kernels(
    op: Op, inputs: Windows, outputs: Windows, device: Device, how: Arithmetic
) -> Mapping[str, LaunchKernel]:
    """The kernels of a convolution or of a gradient of one, by name; none where cuDNN is not installed, or has none.

    A summand lies in the result's place, or is copied there first; a launch of its own adds a bias.
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
        how=how,
    )
    found = {}
    for rank, plan in enumerate(plans):
        payload = plan.workspace.to_bytes(WORD, "little") + plan.blob
        kernel = _kernel(op, payload, inputs, outputs)
        mapped = not adds and (made != outputs[0] or len(inputs) > 2)  # the launch reads and writes the result
        again = 2 * made.type.nbytes * mapped / device.bytes_per_second * 1e9
        least = _nanoseconds(op, plan, inputs, outputs, device)
        found[f"{CUDNN} {plan.name}"] = replace(kernel, nanoseconds=round(least * (1 + RANK * rank) + again))
    return found


def _nanoseconds(op: ConvOp, plan: CudnnPlan, inputs: Windows, outputs: Windows, device: Device) -> float:
    """The time of a plan: on tensor cores if its engine has that note, else by float32 arithmetic. Its workspace, such
    as a copy of images with few channels filled up to eight, is also written and read once.
    """
    dtype, (y,) = inputs[0].type.dtype, outputs
    weights = (y if isinstance(op, ConvWeightGrad) else inputs[1]).shape
    if plan.tensor_cores:
        precision = "tensorfloat32" if dtype.name == "float32" else dtype.name
        hoppers = in_clusters(plan.blob)
        reached, together = (HOPPERS, TOGETHER_ON_HOPPER) if hoppers else (REACHED, TOGETHER)
        if isinstance(op, ConvWeightGrad) and precision == "tensorfloat32":
            reached = HOPPERS_OF_WEIGHTS if hoppers else REACHED_OF_WEIGHTS
    else:
        precision = "float32"
        reached, together = _without_tensor_cores(op, plan.name.partition("_")[0], y, weights, device)
    share = prod(n / align_up(n, many) for n, many in zip((weights[0] // op.groups, weights[1]), together))
    share *= busy(plan.blob, y.type.size, device)
    moved = 2 * plan.workspace / device.bytes_per_second * 1e9
    return roofline(op, inputs, outputs, device, precision, reached * share) + moved


def _without_tensor_cores(
    op: ConvOp, engine: str, y: Window, weights: Shape, device: Device
) -> tuple[float, tuple[int, int]]:
    """The share of float32's peak that an engine reaches, and the channels that it computes together."""
    of_weights = isinstance(op, ConvWeightGrad)
    if engine == "eng0" and of_weights:
        return PLAIN_OF_WEIGHTS * min(1, y.type.size / PLAIN_AT_ONCE), (1, 1)
    if engine == "eng0":
        few = isinstance(op, ConvDataGrad) and FEW[0] <= weights[0] <= FEW[1]
        return PLAIN_OF_FEW if few else PLAIN, (1, 1)
    if y.type.dtype.is_narrow:
        return SLOW if engine == "eng1" and of_weights else WITHOUT_TENSOR_CORES, IN_NARROW
    if engine == "eng67" and of_weights:
        return WITHOUT_TENSOR_CORES * device.at_work(ceil_div(y.type.size, GRADIENTS_AT_ONCE)), IN_FLOAT32
    if isinstance(op, ConvDataGrad) and prod(weights[2:]) == 1 and max(op.strides) > 1:
        return STRIDED_TAP, IN_FLOAT32
    slow = engine == "eng28" or (engine == "eng1" and of_weights)
    return SLOW if slow else WITHOUT_TENSOR_CORES, IN_FLOAT32


def cudnn_kernel(op: Op, payload: bytes, inputs: Windows, outputs: Windows) -> LaunchKernel:
    """The kernel whose payload is in a plan. cuDNN checks its stated workspace when it is bound.

    Raises:
        Refused: it is no such plan.
    """
    if not isinstance(op, Conv | ConvDataGrad | ConvWeightGrad) or len(payload) <= WORD:
        raise Refused(f"no plan of cuDNN's for {op.name}")
    if _adds(inputs, outputs) != (ADDING in payload):
        raise Refused(f"a plan of cuDNN's for {op.name} that adds its result, or not, where it should be otherwise")
    return _kernel(op, payload, inputs, outputs)


def _as_cudnn_makes_it(inputs: Windows, outputs: Windows) -> Window:
    """The result's window in the element type of the inputs: cuDNN has no engine that writes another."""
    (y,), dtype = outputs, inputs[0].type.dtype
    strides = tuple(step // y.type.dtype.itemsize * dtype.itemsize for step in y.strides)
    return Window(y.type.with_dtype(dtype), strides)


def _as_cudnn_reads_it(op: Op, inputs: Windows) -> Window:
    """The second input. Weights that are a range of others' channels, or with taps in another order, are copied first:
    cuDNN has no engine for gaps, and engines that accept any order read it as C order.
    """
    second = inputs[1]
    orders = Window.dense(second.type), channels_last(second.type)
    known = isinstance(op, ConvWeightGrad) or any(lie_alike(second, each) for each in orders)
    return second if known else Window.dense(second.type)


def _adds(inputs: Windows, outputs: Windows) -> bool:
    """Whether cuDNN adds its result to a tensor in the result's place, which needs cuDNN's result type."""
    (y,) = outputs
    return any(x.shape == y.shape for x in inputs[2:]) and _as_cudnn_makes_it(inputs, outputs) == y


def _kernel(op: Op, payload: bytes, inputs: Windows, outputs: Windows) -> LaunchKernel:
    """The plan, after copies of weights with gaps and of the summand, unless that is in place.

    If the plan cannot add the summand, or its result has another element type, a map follows. Then cuDNN's own result
    lies in the workspace, except with only a bias.
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

"""Convolutions whose groups have one input channel each, and their gradients: each channel by itself, weights and
elements read once for several neighbouring results.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from foreplan.base.units import ceil_div
from foreplan.graph import Op, Window
from foreplan.graph.op import Windows
from foreplan.graph.types import Shape
from foreplan.ops.conv.common import ConvOp
from foreplan.ops.conv.ops import ConvDataGrad, ConvWeightGrad
from foreplan.runtime.cuda.device import Device
from foreplan.runtime.cuda.kernels.map import index_type
from foreplan.runtime.cuda.kernels.reduce import Axis, Terms, power_of_2, reduction
from foreplan.runtime.cuda.kernels.windows import window_defines
from foreplan.runtime.cuda.launch import (
    THREADS,
    Address,
    Defines,
    LaunchKernel,
    Word,
    added_in_place,
    channels_side_by_side,
    input_at,
    launch,
    output_at,
    workspace_at,
)

MOST_AXES, MOST_TAPS = 3, 64
EACH = 4  # neighbouring results of a thread, or windows whose elements it reads together
COLUMNS = 32  # that a thread may read together
BYTES = 8  # of neighbouring channels, that a thread reads at a time
LANES = 64  # threads for neighbouring channels, at most
MOST_SUMS = 32  # of a thread for results; and for gradients of weights, MOST_TAPS
SHARED = 32768  # bytes of weights in shared memory
UNITS = 8  # blocks of neighbours that a thread takes, if there are enough
BUSY, BUSY_WITH_SUMS = 8, 4  # blocks that keep a multiprocessor busy
MOST_PARTS, PARTS_BYTES = 512, 4 << 20
MOST_BLOCKS = 65535  # along the second axis of a grid


@dataclass(frozen=True)
class _Blocks:
    """Neighbours along the last axis, in blocks: see cuda/depthwise.cuh."""

    each: int
    gap: int
    columns: int
    step: int
    begin: int
    shift: int
    count: int


def serves(op: Op, inputs: Windows, outputs: Windows) -> bool:
    """Whether these kernels take a convolution or a gradient of one: those of one input channel a group, with few taps,
    whose operands are not empty.
    """
    assert isinstance(op, ConvOp)
    w = outputs[0] if isinstance(op, ConvWeightGrad) else inputs[1]
    if not 1 <= len(op.strides) <= MOST_AXES or w.shape[1] != 1 or not all(x.type.size for x in (*inputs, *outputs)):
        return False
    taps, filters = math.prod(w.shape[2:]), w.shape[0] // op.groups
    blocks = _blocks(op, inputs, outputs)
    few = blocks.columns <= COLUMNS and blocks.each <= MOST_SUMS
    if isinstance(op, ConvDataGrad):
        few = few and filters * taps * inputs[0].type.dtype.itemsize <= SHARED // 8
    return few and taps <= MOST_TAPS and inputs[0].type.dtype.is_float


def results(op: Op, inputs: Windows, outputs: Windows, device: Device) -> LaunchKernel:
    """A convolution or its data gradient, in one launch."""
    assert isinstance(op, ConvOp)
    source, w, *rest = inputs
    (y,), filters = outputs, w.shape[0] // op.groups
    blocks, gradient = _blocks(op, inputs, outputs), isinstance(op, ConvDataGrad)
    counts = (*y.shape[2:-1], blocks.count)
    units, item = y.shape[0] * math.prod(counts), y.type.dtype.itemsize
    terms = math.prod(w.shape[2:]) * (filters if gradient else 1)
    vector = _vector(MOST_SUMS // blocks.each, filters, source, y)
    across, rows = _threads(source, y.shape[1], vector, units, SHARED // (terms * item * vector))
    chunks, wanted = ceil_div(y.shape[1], across * vector), ceil_div(units, rows)
    loops = max(1, min(UNITS, chunks * wanted // (BUSY * device.multiprocessors)))
    added, strides = y, y.strides
    if rest:
        added = rest[0]
        vector_added = len(added.shape) == 1
        strides = (0, *added.strides, *(0 for _ in op.strides)) if vector_added else added.strides
    words: list[Word] = [units, y.shape[1], y.shape[-1], *counts, *source.shape[2:]]
    words += [input_at(0), *source.strides, input_at(1), *w.strides, output_at(0), *y.strides]
    words += [input_at(2) if rest else output_at(0), *strides]
    defines = (
        *_defines(op, w.shape, blocks, source, units),
        ("GRADIENT", int(gradient)),
        ("VECTOR", vector),
        ("ACROSS", across),
        ("ROWS", rows),
        ("HAS_ADDED", int(bool(rest))),
        ("ADDED_ELEMENT", added.type.dtype),
    )
    grid = (chunks, min(ceil_div(wanted, loops), MOST_BLOCKS), 1)
    run = launch("depthwise.cu", "depthwise", grid, words, defines, threads=across * rows)
    return LaunchKernel((run,), overwrites=added_in_place(inputs, y))


def weights(op: Op, inputs: Windows, outputs: Windows, device: Device) -> LaunchKernel:
    """The gradient of weights: one launch, or one for parts of the sums and one that adds them up."""
    assert isinstance(op, ConvWeightGrad)
    x, g, *rest = inputs
    (dw,) = outputs
    blocks, taps = _blocks(op, inputs, outputs), math.prod(dw.shape[2:])
    counts = (*g.shape[2:-1], blocks.count)
    units = g.shape[0] * math.prod(counts)
    vector = _vector(MOST_TAPS // taps, dw.shape[0] // op.groups, x, g)
    across, rows = _threads(x, dw.shape[0], vector, units, LANES)
    chunks, wide = ceil_div(dw.shape[0], across * vector), x.type.dtype.wide
    nbytes = dw.type.size * wide.itemsize
    wanted = min(ceil_div(BUSY_WITH_SUMS * device.multiprocessors, chunks), units // (UNITS * rows))
    units_a_part = ceil_div(units, max(1, min(wanted, MOST_PARTS, PARTS_BYTES // nbytes)))
    parts = ceil_div(units, units_a_part)
    target: Address = output_at(0)
    made, strides, added = dw.type.dtype, dw.strides, rest[0] if rest else dw
    if parts > 1:  # which lie as the result does
        target, made, strides = workspace_at(), wide, tuple(step // made.itemsize * wide.itemsize for step in strides)
    words: list[Word] = [units, units_a_part, dw.shape[0], g.shape[-1], nbytes, *counts, *x.shape[2:]]
    words += [input_at(0), *x.strides, input_at(1), *g.strides, target, *strides]
    words += [input_at(2) if rest else output_at(0), *added.strides]
    defines = (
        *_defines(op, dw.shape, blocks, x, units),
        ("GRADIENT", 0),
        ("VECTOR", vector),
        ("ACROSS", across),
        ("ROWS", rows),
        ("RESULT", made),
        ("HAS_ADDED", int(bool(rest))),
        ("ADDED_ELEMENT", added.type.dtype),
    )
    grid = (chunks, parts, 1)
    first = launch("depthwise_weights.cu", "depthwise_weights", grid, words, defines, threads=across * rows)
    overwrites = added_in_place(inputs, dw)
    if parts == 1:
        return LaunchKernel((first,), overwrites=overwrites)
    stretch = (Axis(dw.type.size, wide.itemsize),), (Axis(parts, nbytes),)
    second = reduction("sum", Terms(workspace_at(), wide, *stretch), output_at(0), dw.type.dtype, 1, None)
    return LaunchKernel((first, second), parts * nbytes, overwrites)


def _blocks(op: ConvOp, inputs: Windows, outputs: Windows) -> _Blocks:
    """The blocks of an op's neighbours, along its last axis."""
    stride, (low, _), dilation = op.strides[-1], op.pads[-1], op.dilations[-1]
    if isinstance(op, ConvDataGrad):
        return _of_elements(outputs[0].shape[-1], stride, low, dilation, inputs[1].shape[-1])
    if isinstance(op, ConvWeightGrad):
        return _of_windows(inputs[1].shape[-1], stride, low, dilation, outputs[0].shape[-1])
    return _of_windows(outputs[0].shape[-1], stride, low, dilation, inputs[1].shape[-1])


def _of_windows(positions: int, stride: int, low: int, dilation: int, taps: int) -> _Blocks:
    """Windows that are neighbours, about as many a block; one a block, if many share nothing."""
    each, gap = ceil_div(positions, ceil_div(positions, EACH)), math.gcd(stride, dilation)
    columns = ((each - 1) * stride + (taps - 1) * dilation) // gap + 1
    if columns > COLUMNS:
        each, gap, columns = 1, dilation, taps
    return _Blocks(each, gap, columns, each * stride, -low, 0, ceil_div(positions, each))


def _of_elements(extent: int, stride: int, low: int, dilation: int, taps: int) -> _Blocks:
    """Elements that are neighbours; blocks begin at multiples of the stride."""
    lowest, gap = -((taps - 1) * dilation // stride), 1
    each = ceil_div(extent, ceil_div(extent, EACH)) if stride == 1 else stride * max(1, EACH // stride)
    columns = (each - 1) // stride - lowest + 1
    if columns > COLUMNS and stride == 1:
        each, gap, columns = 1, dilation, taps
    first, last = low // each, (low + extent - 1) // each
    step = each // stride
    return _Blocks(each, gap, columns, step, first * step + lowest, low - first * each, last - first + 1)


def _vector(most: int, filters: int, *tensors: Window) -> int:
    """Channels of a thread, a power of two: several only where each has one filter, and they lie side by side."""
    if filters > 1:
        return 1
    most = min(most, BYTES // tensors[0].type.dtype.itemsize)
    return channels_side_by_side(1 << most.bit_length() - 1, tensors)


def _threads(source: Window, channels: int, vector: int, units: int, most: int) -> tuple[int, int]:
    """Threads of a block for neighbouring channels, and for units: channels apart have blocks of their own."""
    across = 1
    if abs(source.strides[1]) <= abs(source.strides[-1]):
        vectors = ceil_div(channels, vector)
        across = ceil_div(vectors, ceil_div(vectors, min(LANES, most)))
    return across, min(THREADS // across, power_of_2(units, 1, THREADS))


def _defines(op: ConvOp, weights: Shape, blocks: _Blocks, source: Window, units: int) -> Defines:
    """The macros of cuda/depthwise.cuh but for the shares of threads."""
    reach = 0
    for step, extent, taps, stride, (low, high), gap in zip(
        source.strides[2:], source.shape[2:], weights[2:], op.strides, op.pads, op.dilations
    ):
        reach += abs(step) * (extent + taps * gap + blocks.each * stride + abs(low) + abs(high))
    return (
        ("ELEMENT", source.type.dtype),
        *window_defines(weights[2:], op.strides, op.pads, op.dilations),
        ("MULTIPLE", weights[0] // op.groups),
        ("EACH", blocks.each),
        ("GAP", blocks.gap),
        ("COLUMNS", blocks.columns),
        ("STEP", blocks.step),
        ("BEGIN", blocks.begin),
        ("SHIFT", blocks.shift),
        ("INDEX", index_type(units)),
        ("OFFSET", "i32" if reach < 1 << 31 else "i64"),
    )

"""Pooling and its gradients: neighbouring channels of an element a thread, the gradients gathered."""

from __future__ import annotations

import math

from foreplan.graph import Op, Window
from foreplan.graph.op import Windows
from foreplan.graph.types import DTYPES, Shape
from foreplan.ops.pool import AvgPool, AvgPoolGrad, MaxPool, MaxPoolGrad
from foreplan.runtime.cuda.device import Device
from foreplan.runtime.cuda.kernels.map import index_type
from foreplan.runtime.cuda.kernels.reduce import neutral
from foreplan.runtime.cuda.kernels.windows import window_defines
from foreplan.runtime.cuda.launch import LaunchKernel, Word, channels_side_by_side, for_each, input_at, output_at
from foreplan.runtime.kernel import Refused

MOST_AXES = 3
BYTES = 16  # of the widest elements, that a thread moves at a time
PoolOp = MaxPool | MaxPoolGrad | AvgPool | AvgPoolGrad


def pool(op: Op, inputs: Windows, outputs: Windows, device: Device) -> LaunchKernel:
    """One launch for any of the four."""
    assert isinstance(op, PoolOp)
    gradient = isinstance(op, MaxPoolGrad | AvgPoolGrad)
    source, target = inputs[-1], outputs[0]
    images, pooled = (target, source) if gradient else (source, target)
    if len(images.shape) - 2 > MOST_AXES:
        raise Refused(f"pooling over {len(images.shape) - 2} axes")
    if not target.type.size:
        return LaunchKernel(())
    saved, saved_at = target, output_at(0)  # nothing is saved
    if isinstance(op, MaxPoolGrad):
        saved, saved_at = inputs[0], input_at(0)
    elif len(outputs) == 2:
        saved, saved_at = outputs[1], output_at(1)
    dtype, windows = target.type.dtype, (source, target, saved)
    vector = _vector(*windows)
    firsts, lasts = _counted(op, images.shape[2:])
    blocks = _blocks(op, images.shape[2:])
    places = math.prod(blocks) if gradient else math.prod(pooled.shape[2:])
    threads = target.shape[0] * target.shape[1] // vector * places
    words: list[Word] = [threads, target.shape[1], *images.shape[2:], *pooled.shape[2:], *blocks, *firsts, *lasts]
    source_at = input_at(len(inputs) - 1) if source.type.size else output_at(0)  # where padding is all that there is
    for start, window in zip((source_at, output_at(0), saved_at), windows):
        words += [start, *window.strides]
    index = index_type(max(threads, *(_farthest(op, window) for window in windows)))
    defines = (
        ("ENTRY", op.name),
        *window_defines(op.kernel, op.strides, op.pads, op.dilations),
        ("VECTOR", vector),
        ("ELEMENT", dtype),
        ("PLACE", saved.type.dtype if saved is not target else DTYPES["uint8"]),
        ("SAVE", int(len(outputs) == 2)),
        ("NEUTRAL", neutral("max", dtype)),
        ("INDEX", index),
        ("OFFSET", {"u32": "i32", "u64": "i64"}[index]),
    )
    return LaunchKernel((for_each("pool.cu", op.name, threads, words, defines),))


def _vector(*tensors: Window) -> int:
    """Channels that lie side by side in every tensor, as many as are moved at a time."""
    return channels_side_by_side(BYTES // max(x.type.dtype.itemsize for x in tensors), tensors)


def _blocks(op: PoolOp, extents: Shape) -> list[int]:
    """Blocks along each axis of elements that lie in the same windows."""
    found = zip(extents, op.strides, op.pads)
    return [(extent - 1 + low) // stride - low // stride + 1 for extent, stride, (low, _) in found]


def _farthest(op: PoolOp, x: Window) -> int:
    """Bytes from an image's beginning within which all taps of windows lie, also those in the padding."""
    steps = [abs(step) for step in x.strides]
    found = sum(step * extent for step, extent in zip(steps, x.shape))
    for step, taps, gap, pads in zip(steps[2:], op.kernel, op.dilations, op.pads):
        found += step * (taps * gap + sum(map(abs, pads)))
    return found


def _counted(op: PoolOp, extents: Shape) -> tuple[list[int], list[int]]:
    """For each axis, the first element that counts for a mean, and the end of these elements."""
    if isinstance(op, MaxPool | MaxPoolGrad) or not op.count_include_pad:
        return [0] * len(extents), list(extents)
    beyond = op.beyond or (0,) * len(extents)
    lasts = [extent + high - more for extent, (_, high), more in zip(extents, op.pads, beyond)]
    return [-low for low, _ in op.pads], lasts

"""Pooling and its gradients: a thread an element, the gradients gathered."""

from __future__ import annotations

from foreplan.gpu.device import Device
from foreplan.gpu.expressions import stored
from foreplan.gpu.launch import (
    Address,
    LaunchKernel,
    Refused,
    Source,
    Windows,
    Word,
    ceil_div,
    input_at,
    launch,
    output_at,
)
from foreplan.gpu.map import index_type
from foreplan.gpu.reduce import neutral
from foreplan.graph import Op, Window
from foreplan.graph.types import DTYPES, Shape
from foreplan.ops.pool import AvgPool, AvgPoolGrad, MaxPool, MaxPoolGrad

THREADS = 256
AXES = 3


def pool(op: Op, inputs: Windows, outputs: Windows, device: Device) -> LaunchKernel:
    """One launch for any of the four."""
    assert isinstance(op, MaxPool | MaxPoolGrad | AvgPool | AvgPoolGrad)
    gradient = isinstance(op, MaxPoolGrad | AvgPoolGrad)
    source, target = inputs[-1], outputs[0]
    images, pooled = (target, source) if gradient else (source, target)
    if len(images.shape) - 2 > AXES:
        raise Refused(f"pooling over {len(images.shape) - 2} axes")
    if not target.type.size:
        return LaunchKernel(())
    saved, saved_at = target, output_at(0)  # nothing is saved
    if isinstance(op, MaxPoolGrad):
        saved, saved_at = inputs[0], input_at(0)
    elif len(outputs) == 2:
        saved, saved_at = outputs[1], output_at(1)
    words: list[Word] = [target.type.size, target.shape[1]]
    words += [*_three(images.shape[2:]), *_three(pooled.shape[2:])]
    words += [*_three(op.kernel), *_three(op.strides), *_three([low for low, _ in op.pads], 0), *_three(op.dilations)]
    firsts, lasts = _counted(op, images.shape[2:])
    words += [*_three(firsts, 0), *_three(lasts)]
    for start, window in ((input_at(len(inputs) - 1), source), (output_at(0), target), (saved_at, saved)):
        words += _tensor(start, window)
    dtype = target.type.dtype
    defines = (
        ("ELEMENT", stored(dtype)),
        ("PLACE", stored(saved.type.dtype if saved is not target else DTYPES["uint8"])),
        ("SAVE", int(len(outputs) == 2)),
        ("NEUTRAL", neutral("max", dtype)),
        ("INDEX", index_type(target.type.size)),
    )
    blocks = ceil_div(target.type.size, THREADS)
    return LaunchKernel((launch(Source("pool.cu", defines), op.name, blocks, THREADS, words),))


def _three(numbers: Shape | list[int], missing: int = 1) -> list[int]:
    return [missing] * (AXES - len(numbers)) + list(numbers)


def _tensor(start: Address, window: Window) -> list[Word]:
    return [start, *window.strides[:2], *_three(window.strides[2:], 0)]


def _counted(op: MaxPool | MaxPoolGrad | AvgPool | AvgPoolGrad, extents: Shape) -> tuple[list[int], list[int]]:
    """The first element of each axis that counts for a mean, and the one behind the last."""
    if isinstance(op, MaxPool | MaxPoolGrad) or not op.count_include_pad:
        return [0] * len(extents), list(extents)
    beyond = op.beyond or (0,) * len(extents)
    lasts = [extent + high - more for extent, (_, high), more in zip(extents, op.pads, beyond)]
    return [-low for low, _ in op.pads], lasts

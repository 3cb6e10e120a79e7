"""Slices read at, and added at, the places that indices name; sums are taken in the order of the indices."""

from __future__ import annotations

import math

from foreplan.gpu.device import Device
from foreplan.gpu.expressions import stored
from foreplan.gpu.launch import (
    Address,
    Clear,
    Instruction,
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
from foreplan.gpu.map import copies, index_type
from foreplan.graph import Op, Window
from foreplan.ops.index import Gather, ScatterAdd
from foreplan.ops.map import merged_axes

THREADS = 256
BYTES = 16  # that a thread reads at a time


def gather(op: Op, inputs: Windows, outputs: Windows, device: Device) -> LaunchKernel:
    """One launch."""
    assert isinstance(op, Gather)
    data, indices = inputs
    (y,), behind = outputs, len(data.shape) - op.axis - 1
    if not y.type.size:
        return LaunchKernel(())
    outer, inner = math.prod(data.shape[: op.axis]), math.prod(data.shape[op.axis + 1 :])
    vector = BYTES // y.type.dtype.itemsize
    while vector > inner:
        vector //= 2
    words: list[Word] = [outer, indices.type.size, inner, data.shape[op.axis], input_at(1)]
    words += _folded(input_at(0), data, op.axis, behind) + _folded(output_at(0), y, op.axis, behind)
    units = outer * indices.type.size * ceil_div(inner, vector)
    source = _source(y, indices, vector, units)
    return LaunchKernel((launch(source, "gather", ceil_div(units, THREADS), THREADS, words),))


def scatter_add(op: Op, inputs: Windows, outputs: Windows, device: Device) -> LaunchKernel:
    """Zeros, or what is added to, and one launch."""
    assert isinstance(op, ScatterAdd)
    indices, updates, *base = inputs
    (y,), behind = outputs, len(op.shape) - op.axis - 1
    if not y.type.dtype.is_float:
        raise Refused(f"sums of {y.type}")
    found: list[Instruction] = []
    if base:
        found += copies(input_at(2), base[0], output_at(0), y)
    elif y.type.size:
        found.append(Clear(output_at(0), y.type.nbytes))
    if updates.type.size:
        outer, inner = math.prod(op.shape[: op.axis]), math.prod(op.shape[op.axis + 1 :])
        words: list[Word] = [outer, indices.type.size, inner, op.shape[op.axis], input_at(0)]
        words += _folded(output_at(0), y, op.axis, behind) + _folded(input_at(1), updates, op.axis, behind)
        grid = (indices.type.size, ceil_div(inner, THREADS), outer)
        found.append(launch(_source(y, indices, 1, indices.type.size), "scatter_add", grid, THREADS, words))
    overwrites = ((0, 2),) if base and base[0].is_dense else ()
    return LaunchKernel(tuple(found), overwrites=overwrites)


def _source(y: Window, indices: Window, vector: int, units: int) -> Source:
    defines = (
        ("ELEMENT", stored(y.type.dtype)),
        ("PLACE", stored(indices.type.dtype)),
        ("VECTOR", vector),
        ("INDEX", index_type(units)),
    )
    return Source("index.cu", defines)


def _folded(start: Address, x: Window, axis: int, behind: int) -> list[Word]:
    """A tensor as [outer, n, inner]: the axes before `axis`, those that are one with it, and so many behind."""
    steps = _steps(x, axis, behind)
    assert steps is not None
    return [start, *steps]


def _steps(x: Window, axis: int, behind: int) -> tuple[int, int, int] | None:
    """Bytes from one to the next along the three, if each is one axis."""
    rank = len(x.shape)
    ranges = (range(axis), range(axis, rank - behind), range(rank - behind, rank))
    found = [merged_axes(x.shape, [x.strides], axes) for axes in ranges]
    if any(len(axes) > 1 for axes in found):
        return None
    outer, along, inner = (axes[0][1][0] for axes in found)
    return outer, along, inner


def gather_reads(op: Op, index: int, window: Window) -> Window:
    """Data as it lies, where its axes fold into three; indices in C order."""
    assert isinstance(op, Gather)
    folds = index == 0 and _steps(window, op.axis, len(window.shape) - op.axis - 1) is not None
    return window if folds else Window.dense(window.type)


def scatter_reads(op: Op, index: int, window: Window) -> Window:
    """Updates as they lie, where their axes fold into three; what is added to anyhow; indices in C order."""
    assert isinstance(op, ScatterAdd)
    folds = index == 1 and _steps(window, op.axis, len(op.shape) - op.axis - 1) is not None
    return window if folds or index == 2 else Window.dense(window.type)

"""Ops that move elements, and those that only mark them."""

from __future__ import annotations

import numpy as np

from foreplan.export.emitter import Emitter, ends_of
from foreplan.export.table import writes
from foreplan.graph import TensorType
from foreplan.ops.custom_gradient import CustomGradient
from foreplan.ops.join import Concat, Pad, Unslice
from foreplan.ops.marks import ByMode, Quantised, StopGradient, StraightThrough
from foreplan.ops.random import Dropout
from foreplan.ops.shape import Broadcast, Reshape, Slice, Transpose
from foreplan.ops.unstack import Unstack

_FIRST = -(2**63)  # as the end of a walk backward: past the first element


@writes(CustomGradient)
def _results(e: Emitter, op: CustomGradient, x: list[str], types: list[TensorType]) -> list[str]:
    return x[: op.results]


@writes(Dropout, ByMode, StopGradient, StraightThrough, Quantised)
def _identity(e: Emitter, op: Dropout, x: list[str], types: list[TensorType]) -> list[str]:
    return x[:1]


@writes(Reshape)
def _reshape(e: Emitter, op: Reshape, x: list[str], types: list[TensorType]) -> list[str]:
    return [e.reshape(x[0], op.shape)]


@writes(Transpose)
def _transpose(e: Emitter, op: Transpose, x: list[str], types: list[TensorType]) -> list[str]:
    return [e.transpose(x[0], op.perm)]


@writes(Broadcast)
def _broadcast(e: Emitter, op: Broadcast, x: list[str], types: list[TensorType]) -> list[str]:
    return [e.expand(x[0], types[0].shape, op.shape)]


@writes(Slice)
def _slice(e: Emitter, op: Slice, x: list[str], types: list[TensorType]) -> list[str]:
    chosen = []
    for axis, (start, count, step, extent) in enumerate(zip(op.starts, op.shape, op.steps, types[0].shape)):
        if (start, count, step) != (0, extent, 1):
            end = start + count * step
            chosen.append((start, _FIRST if end < 0 else end, axis, step) if count else (0, 0, axis, 1))
    return [e.op("Slice", x[0], *(e.ints(column) for column in zip(*chosen)))] if chosen else x


@writes(Concat)
def _concat(e: Emitter, op: Concat, x: list[str], types: list[TensorType]) -> list[str]:
    return [e.op("Concat", *x, axis=op.axis)]


@writes(Pad)
def _pad(e: Emitter, op: Pad, x: list[str], types: list[TensorType]) -> list[str]:
    if op.mode == "wrap":
        return [_wrapped(e, op, x[0], types[0])]
    value = (e.scalar(op.value, types[0].dtype),) if op.mode == "constant" else ()
    return [e.op("Pad", x[0], e.ints(ends_of(op.pads)), *value, mode=op.mode)]


def _wrapped(e: Emitter, op: Pad, x: str, type: TensorType) -> str:
    """Margins from the other end, an axis at a time: opset 18 has no such mode."""
    for axis, ((low, high), extent) in enumerate(zip(op.pads, type.shape)):
        if low or high:
            places = np.arange(-low, extent + high) % extent
            x = e.op("Gather", x, e.constant(places), axis=axis)
    return x


@writes(Unslice)
def _unslice(e: Emitter, op: Unslice, x: list[str], types: list[TensorType]) -> list[str]:
    (y,), (type,) = x, types
    if all(step == 1 for step in op.steps):
        ends = [(start, after - start - n) for start, n, after in zip(op.starts, type.shape, op.shape)]
        return [e.op("Pad", y, e.ints(ends_of(tuple(ends))), e.scalar(0, type.dtype), mode="constant")]
    shape = list(type.shape)
    for axis, (start, step, after) in enumerate(zip(op.starts, op.steps, op.shape)):
        count = shape[axis]
        if (start, step, after) == (0, 1, count):
            continue
        places = np.full(after, count, np.int64)  # the slice of zeros behind the last one
        places[start + step * np.arange(count)] = np.arange(count)
        shape[axis] = 1
        y = e.op("Concat", y, e.zeros(type.with_shape(tuple(shape))), axis=axis)
        y = e.op("Gather", y, e.constant(places), axis=axis)
        shape[axis] = after
    return [y]


@writes(Unstack)
def _unstack(e: Emitter, op: Unstack, x: list[str], types: list[TensorType]) -> list[str]:
    return [e.op("Gather", x[0], e.constant(np.array(i, np.int64)), axis=0) for i in range(types[0].shape[0])]

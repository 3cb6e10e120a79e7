"""`reduce` as compiled loops: for any axes and any layout."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from foreplan.graph import Op, Window
from foreplan.graph.op import Arrays, Windows
from foreplan.ops.reduce import Reduce
from foreplan.runtime.cpu.codegen.loops import CONTIGUOUS, STRIDED, Operand
from foreplan.runtime.cpu.codegen.reduction import COLUMNS, Reduction, compiled_reduction
from foreplan.runtime.cpu.kernel import LoopKernel
from foreplan.runtime.cpu.threads import current_threads, ranged
from foreplan.runtime.kernel import Refused, Run

PART = 64 * 1024  # elements that are worth a thread


@dataclass(frozen=True)
class _Axis:
    """An axis of the input: bytes from one element to the next, and so in the output, 0 where it is reduced."""

    extent: int
    step: int
    result: int
    kept: bool


def _kind(step: int, itemsize: int) -> str:
    return CONTIGUOUS if step == itemsize else STRIDED


def reduce(op: Op, inputs: Windows, outputs: Windows) -> LoopKernel:
    """The loop of a reduction, compiled when it is first bound."""
    assert isinstance(op, Reduce)
    (x,), (y,) = inputs, outputs
    if op.how == "mean" and not x.type.dtype.is_float:
        raise Refused("a mean of integers is no mean")
    if op.how in ("max", "min") and not x.type.size:
        raise Refused("nothing has no extreme")
    *before, inner = _axes(op, x, y)
    kept, reduced = ([axis for axis in before if axis.kept is which] for which in (True, False))

    def loops(inputs: Arrays, outputs: Arrays, scratch: Arrays) -> Run:
        steps = ((x.type.dtype, inner.step), (y.type.dtype, inner.result))
        operands = [Operand(t, _kind(step, t.itemsize)) for t, step in steps]
        loop = Reduction(op.how, operands[0], operands[1], inner.kept, len(kept), len(reduced))
        terms = x.type.size // max(1, y.type.size)
        factor = np.float64(1.0 / terms if terms else np.nan)
        table = [axis.extent for axis in (*kept, *reduced, inner)]
        table.append(int(factor.view(np.int64)))
        table += [inputs[0].ctypes.data, *(axis.step for axis in (*kept, *reduced, inner))]
        table += [outputs[0].ctypes.data, *(axis.result for axis in kept)]
        if inner.kept:
            table.append(inner.result)
        parts = math.prod(axis.extent for axis in kept) * (-(-inner.extent // COLUMNS) if inner.kept else 1)
        each = x.type.size // max(1, parts)
        packed = np.array(table, np.int64).tobytes()
        return ranged(compiled_reduction(loop), parts, -(-PART // max(1, each)), current_threads(), packed)

    return LoopKernel(loops)


def _axes(op: Reduce, x: Window, y: Window) -> list[_Axis]:
    """The input's axes longer than 1; neighbours that lie together are merged if both are kept or reduced."""
    left = iter(y.strides)
    results = [next(left) if op.keepdims or axis not in op.axes else 0 for axis in range(len(x.shape))]
    found = [
        _Axis(extent, step, 0 if axis in op.axes else results[axis], axis not in op.axes)
        for axis, (extent, step) in enumerate(zip(x.shape, x.strides))
        if extent != 1
    ]
    merged: list[_Axis] = []
    for axis in sorted(found, key=lambda axis: -abs(axis.step)):
        last = merged[-1] if merged else None
        follows = (axis.step * axis.extent, axis.result * axis.extent, axis.kept)
        if last and (last.step, last.result, last.kept) == follows:
            merged[-1] = _Axis(last.extent * axis.extent, axis.step, axis.result, axis.kept)
        else:
            merged.append(axis)
    return merged or [_Axis(1, 0, 0, False)]

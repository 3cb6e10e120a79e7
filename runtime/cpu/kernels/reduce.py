"""`reduce` as compiled loops: whatever the axes and however the tensor lies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foreplan.graph import Op, Window
from foreplan.graph.op import Windows
from foreplan.ops.reduce import Reduce
from foreplan.runtime.cpu.codegen.loops import CONTIGUOUS, STRIDED, Operand
from foreplan.runtime.cpu.codegen.reduction import COLUMNS, Reduction, compiled_reduction
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


@dataclass(frozen=True)
class Reducing:
    """A reduction.

    Attributes:
        axes: of the input as they lie in its memory, the innermost last.
    """

    how: str
    input: Window
    output: Window
    axes: tuple[_Axis, ...]
    workspace: int = 0
    overwrites: tuple[tuple[int, int], ...] = ()

    def bind(self, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], workspace: np.ndarray) -> Run:
        """The loop, compiled when it is first asked for."""
        *before, inner = self.axes
        kept, reduced = ([axis for axis in before if axis.kept is which] for which in (True, False))
        x, y = self.input.type.dtype, self.output.type.dtype
        operands = [Operand(t, _kind(step, t.itemsize)) for t, step in ((x, inner.step), (y, inner.result))]
        loop = Reduction(self.how, operands[0], operands[1], inner.kept, len(kept), len(reduced))
        terms = self.input.type.size // max(1, self.output.type.size)
        factor = np.float64(1.0 / terms if terms else np.nan)
        table = [axis.extent for axis in (*kept, *reduced, inner)]
        table.append(int(factor.view(np.int64)))
        table += [inputs[0].ctypes.data, *(axis.step for axis in (*kept, *reduced, inner))]
        table += [outputs[0].ctypes.data, *(axis.result for axis in kept)]
        if inner.kept:
            table.append(inner.result)
        parts = math.prod(axis.extent for axis in kept) * (-(-inner.extent // COLUMNS) if inner.kept else 1)
        each = self.input.type.size // max(1, parts)
        packed = np.array(table, np.int64).tobytes()
        return ranged(compiled_reduction(loop), parts, -(-PART // max(1, each)), current_threads(), packed)


def _kind(step: int, itemsize: int) -> str:
    return CONTIGUOUS if step == itemsize else STRIDED


def reduce(op: Op, inputs: Windows, outputs: Windows) -> Reducing:
    """The loop of a reduction."""
    assert isinstance(op, Reduce)
    (x,), (y,) = inputs, outputs
    if op.how == "mean" and not x.type.dtype.is_float:
        raise Refused("a mean of integers is no mean")
    if op.how in ("max", "min") and not x.type.size:
        raise Refused("nothing has no extreme")
    return Reducing(op.how, x, y, _axes(op, x, y))


def _axes(op: Reduce, x: Window, y: Window) -> tuple[_Axis, ...]:
    """The input's axes, those of extent 1 dropped, neighbours that lie together and are both kept or reduced as one."""
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
        if (
            last
            and last.kept == axis.kept
            and (last.step, last.result)
            == (
                axis.step * axis.extent,
                axis.result * axis.extent,
            )
        ):
            merged[-1] = _Axis(last.extent * axis.extent, axis.step, axis.result, axis.kept)
        else:
            merged.append(axis)
    return tuple(merged) or (_Axis(1, 0, 0, False),)

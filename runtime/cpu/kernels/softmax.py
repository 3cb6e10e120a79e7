"""Softmax, its logarithm and their gradients by compiled loops over rows that lie side by side."""

from __future__ import annotations

import numpy as np

from foreplan.graph import Op, TensorType, Window
from foreplan.graph.layouts import channels_last, lie_alike
from foreplan.graph.op import Arrays, Types, Windows
from foreplan.ops.softmax import LogSoftmax, LogSoftmaxGrad, RowOp, Softmax, SoftmaxGrad
from foreplan.runtime.cpu.codegen.elements import check_elements, number, written
from foreplan.runtime.cpu.codegen.functions import exp32
from foreplan.runtime.cpu.codegen.jit import FLOAT, compiled, looped, summing
from foreplan.runtime.cpu.kernel import LoopKernel
from foreplan.runtime.cpu.kernels.rows import Rows, flat, flat_input, rows_along
from foreplan.runtime.cpu.kernels.scores import BLOCK, LOWEST, largest, row_sum
from foreplan.runtime.cpu.threads import current_threads, ranged
from foreplan.runtime.kernel import Refused, Run

SEGMENTS = 16  # of rows, at most, each worked on by one thread
GRAIN = 1 << 13  # elements of a segment, at least, unless there are fewer


@summing
def exponentials(row, high):  # type: ignore[no-untyped-def]
    """Σ exp(x − high) in float64."""
    total = 0.0
    for first in range(0, len(row), BLOCK):
        part, block = row[first : first + BLOCK], np.float32(0)
        for k in range(len(part)):
            block += exp32(number(part[k]) - high)
        total += block
    return total


@summing
def _products(row, other):  # type: ignore[no-untyped-def]
    total = 0.0
    for first in range(0, len(row), BLOCK):
        part, there, block = row[first : first + BLOCK], other[first : first + BLOCK], np.float32(0)
        for k in range(len(part)):
            block += number(part[k]) * number(there[k])
        total += block
    return total


@looped(fastmath=FLOAT)
def highest(row):  # type: ignore[no-untyped-def]
    """The maximum of a row; if there is NaN, NaN or any of its numbers."""
    high = largest(row, len(row))
    if high <= LOWEST:
        high = number(row[0])
        for k in range(1, len(row)):
            high = max(high, number(row[k]))
    return high


@summing
def _exponentials_to(row, high, line):  # type: ignore[no-untyped-def]
    """exp(x − high), and their sum in float64.

    The sum is a loop of its own. In a loop that also writes, its order of additions would depend on the addresses of
    both arrays.
    """
    total = 0.0
    for first in range(0, len(row), BLOCK):
        part, there, block = row[first : first + BLOCK], line[first : first + BLOCK], np.float32(0)
        for k in range(len(part)):
            there[k] = exp32(number(part[k]) - high)
        for k in range(len(there)):
            block += there[k]
        total += block
    return total


@compiled
def _softmax(row, line):  # type: ignore[no-untyped-def]
    share = np.float32(1.0 / _exponentials_to(row, highest(row), line))
    for k in range(len(line)):
        line[k] *= share


@compiled
def _log_softmax(row, line):  # type: ignore[no-untyped-def]
    high = highest(row)
    total = np.float32(np.log(exponentials(row, high)))
    for k in range(len(line)):
        line[k] = (number(row[k]) - high) - total


@compiled
def _softmax_gradient(y, g, line):  # type: ignore[no-untyped-def]
    total = np.float32(_products(y, g))
    for k in range(len(line)):
        line[k] = number(y[k]) * (number(g[k]) - total)


@compiled
def _log_softmax_gradient(y, g, line):  # type: ignore[no-untyped-def]
    total = np.float32(row_sum(g))
    for k in range(len(line)):
        line[k] = number(g[k]) - exp32(number(y[k])) * total


@compiled
def _segments(start, stop, kind, rows, a, a_step, b, b_step, out, lines):  # type: ignore[no-untyped-def]
    """The segments [start, stop) of the rows, each by way of a line of scratch memory: outputs may lie over inputs."""
    count, width = lines.shape
    for segment in range(start, stop):
        line = lines[segment]
        for i in range(rows * segment // count, rows * (segment + 1) // count):
            row, other = a[i * a_step : i * a_step + width], b[i * b_step : i * b_step + width]
            if kind == 0:
                _softmax(row, line)
            elif kind == 1:
                _log_softmax(row, line)
            elif kind == 2:
                _softmax_gradient(row, other, line)
            else:
                _log_softmax_gradient(row, other, line)
            written(line, out[i * width : (i + 1) * width])


KINDS = (Softmax, LogSoftmax, SoftmaxGrad, LogSoftmaxGrad)  # as `_segments` numbers them


def row_kernel(op: Op, inputs: Windows, outputs: Windows) -> LoopKernel:
    """The kernel of an op on rows, by segments of rows; for softmax itself, the second input is the first one."""
    assert isinstance(op, RowOp)
    rows = [class_rows(x, op.axis) for x in inputs]
    count, width = rows[0].count, rows[0].width
    segments = max(1, min(SEGMENTS, count, count * width // GRAIN))

    def loops(inputs: Arrays, outputs: Arrays, scratch: Arrays) -> Run:
        given = [(flat_input(x), each.step) for x, each in zip(inputs, rows)]
        arguments = (KINDS.index(type(op)), count, *given[0], *given[-1], flat(outputs[0]), scratch[0])
        return ranged(_segments, segments, 1, current_threads(), *arguments)

    pairs = tuple((0, i) for i, x in enumerate(inputs) if lie_alike(x, outputs[0]))
    return LoopKernel(loops, (((segments, width), np.dtype(np.float32)),), pairs)


def class_rows(window: Window, axis: int) -> Rows:
    """Rows of float32 or bfloat16 along an axis.

    Raises:
        Refused: other tensors, or other layouts.
    """
    check_elements(window)
    rows = rows_along(window, axis)
    if rows is None:
        raise Refused(f"{window.type} with the strides {window.strides} along axis {axis}")
    return rows


def best(type: TensorType, axis: int) -> Window:
    """The best layout of rows along an axis: C order; for images, along channels, with channels last."""
    return channels_last(type) if axis == 1 else Window.dense(type)


def layout(op: Op, inputs: Windows, outputs: Types) -> list[Window]:
    """The best layout of rows."""
    assert isinstance(op, RowOp)
    return [best(type, op.axis) for type in outputs]


def reads(op: Op, index: int, window: Window) -> Window:
    """Rows evenly apart, or in their best layout."""
    assert isinstance(op, RowOp)
    return window if rows_along(window, op.axis) is not None else best(window.type, op.axis)

"""Cross-entropy and its gradient by compiled loops over rows of logits that lie side by side."""

from __future__ import annotations

import numpy as np

from foreplan.graph import Op, Window
from foreplan.graph.layouts import lie_alike
from foreplan.graph.op import Arrays, Types, Windows
from foreplan.ops.loss import CrossEntropy, CrossEntropyGrad
from foreplan.runtime.cpu.codegen.elements import check_float, lines, number, room, settled
from foreplan.runtime.cpu.codegen.functions import exp32
from foreplan.runtime.cpu.codegen.jit import compiled
from foreplan.runtime.cpu.kernel import LoopKernel
from foreplan.runtime.cpu.kernels.rows import even_step, flat, flat_input, rows_along, same_place
from foreplan.runtime.cpu.kernels.scores import FLUSH, ZERO
from foreplan.runtime.cpu.kernels.softmax import BLOCK, best, class_rows, exponentials, highest
from foreplan.runtime.cpu.threads import current_threads, ranged
from foreplan.runtime.kernel import Refused, Run

GRAIN = 1 << 13  # logits that are worth a thread of their own


@compiled
def _losses(start, stop, x, step, width, target, ignored, loss, lse):  # type: ignore[no-untyped-def]
    for i in range(start, stop):
        row, label = x[i * step : i * step + width], target[i]
        high = highest(row)
        total = np.log(exponentials(row, high))
        lse[i] = high + total
        if label == ignored:
            loss[i] = 0
        elif 0 <= label < width:
            # Close to 0 without cancellation where the target is the maximum.
            loss[i] = np.float64(high - number(row[label])) + total
        else:
            loss[i] = np.nan


@compiled
def _gradients(  # type: ignore[no-untyped-def]
    start, stop, x, step, out, over, width, target, ignored, lse, g, g_step, line
):
    """With `over`, the logits lie in `out`, and x is not looked at.

    Differences of a few logits are written before their exponentials: a loop with little work an element reads memory
    at full speed, a loop with much work waits for it.
    """
    for i in range(start, stop):
        label, less, factor = target[i], lse[i], g[i * g_step]
        if label == ignored:
            out[i * width : (i + 1) * width] = 0
            continue
        known = 0 <= label < width
        if not known:
            factor = np.float32(np.nan)
        for first in range(0, width, BLOCK):
            last = min(first + BLOCK, width)
            row = out[i * width + first : i * width + last]
            there = room(row, line)
            if over:
                for k in range(len(there)):
                    there[k] = number(row[k]) - less
            else:
                part = x[i * step + first : i * step + last]
                for k in range(len(there)):
                    there[k] = number(part[k]) - less
            for k in range(len(there)):
                p = exp32(there[k])
                there[k] = (ZERO if p < FLUSH else p) * factor
            if known and first <= label < last:
                there[np.int64(label) - first] -= factor
            settled(row, there)


def losses(op: Op, inputs: Windows, outputs: Windows) -> LoopKernel:
    """The kernel of `CrossEntropy`, by ranges of rows: a row's maximum, then the sum of its exponentials."""
    assert isinstance(op, CrossEntropy)
    check_float(*outputs)
    rows = class_rows(inputs[0], op.axis)

    def loops(inputs: Arrays, outputs: Arrays, scratch: Arrays) -> Run:
        x, target = map(flat_input, inputs)
        given = (x, rows.step, rows.width, target, op.ignore_index, *map(flat, outputs))
        return ranged(_losses, rows.count, max(1, GRAIN // rows.width), current_threads(), *given)

    return LoopKernel(loops)


def gradients(op: Op, inputs: Windows, outputs: Windows) -> LoopKernel:
    """The kernel of `CrossEntropyGrad`, by ranges of rows."""
    assert isinstance(op, CrossEntropyGrad)
    check_float(*inputs[2:])
    g_step = even_step(inputs[3])
    if g_step is None:
        raise Refused("a cotangent whose elements are not evenly apart")
    rows = class_rows(inputs[0], op.axis)

    def loops(inputs: Arrays, outputs: Arrays, scratch: Arrays) -> Run:
        x, target, lse, g = map(flat_input, inputs)
        over, width = same_place(inputs[0], outputs[0]), rows.width
        given = (x, rows.step, flat(outputs[0]), over, width, target, op.ignore_index, lse, g, g_step)
        return ranged(_gradients, rows.count, max(1, GRAIN // width), current_threads(), *given, own=scratch[0])

    pairs = ((0, 0),) if lie_alike(inputs[0], outputs[0]) else ()
    return LoopKernel(loops, (lines(outputs[0], BLOCK, current_threads()),), pairs)


def layout(op: Op, inputs: Windows, outputs: Types) -> list[Window]:
    """The logits' gradient as rows best lie; numbers of items in C order."""
    assert isinstance(op, CrossEntropy | CrossEntropyGrad)
    gradient = isinstance(op, CrossEntropyGrad)
    return [best(type, op.axis) if gradient else Window.dense(type) for type in outputs]


def reads(op: Op, index: int, window: Window) -> Window:
    """Logits as rows evenly apart, or in their best layout; a cotangent that may be one number for all."""
    assert isinstance(op, CrossEntropy | CrossEntropyGrad)
    if index == 0:
        return window if rows_along(window, op.axis) is not None else best(window.type, op.axis)
    as_it_lies = index == 3 and even_step(window) is not None
    return window if as_it_lies else Window.dense(window.type)

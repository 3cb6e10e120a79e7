"""Means over windows of images of one channel, by compiled loops along the axis whose elements lie side by side.

Local response normalisation takes such means over channels: [N, C, H, W] is [N, 1, C, H·W], in which elements may lie
side by side along either axis. Windows are transposed to match. As in `pool`, parts of the work are rows of the output.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from foreplan.graph import TensorType, Window
from foreplan.graph.op import Arrays, Types, Windows
from foreplan.ops.pool import AvgPool, AvgPoolGrad
from foreplan.runtime.cpu.codegen.elements import check_elements, lines, number, room, settled
from foreplan.runtime.cpu.codegen.jit import compiled, inlined
from foreplan.runtime.cpu.kernel import LoopKernel
from foreplan.runtime.cpu.kernels.rows import flat, flat_input, rows_along
from foreplan.runtime.cpu.threads import current_threads, ranged
from foreplan.runtime.kernel import Refused, Run

GRAIN = 1 << 15  # taps times elements that are worth a thread of their own
DOWN, ACROSS = 2, 3


@inlined
def _reached(offset, stride, extent, positions):  # type: ignore[no-untyped-def]
    """From which window to which a tap at `offset` of the first falls on a row."""
    return min(max(0, -(offset // stride)), positions), max(0, min(positions, (extent - 1 - offset) // stride + 1))


@compiled
def _mean(start, stop, x, step, y, shares, places, line):  # type: ignore[no-untyped-def]
    height, width, down, across, kh, kw, sh, sw, top, left, dh, dw = places
    for o in range(start, stop):
        row = y[o * across : (o + 1) * across]
        total = room(row, line)
        total[:] = 0
        for r in range(kh):
            h = (o % down) * sh - top + r * dh
            if h < 0 or h >= height:
                continue
            given = x[(o // down * height + h) * step : (o // down * height + h) * step + width]
            for s in range(kw):
                low, high = _reached(s * dw - left, sw, width, across)
                if sw == 1 and low < high:
                    seen, target = given[low + s * dw - left : high + s * dw - left], total[low:high]
                    for p in range(len(target)):
                        target[p] += number(seen[p])
                else:
                    for p in range(low, high):
                        total[p] += number(given[p * sw + s * dw - left])
        share = shares[o % down]
        for p in range(across):
            total[p] *= share[p]
        settled(row, total)


@compiled
def _mean_gradient(start, stop, g, step, dx, shares, places, line):  # type: ignore[no-untyped-def]
    height, width, down, across, kh, kw, sh, sw, top, left, dh, dw = places
    for i in range(start, stop):
        row = dx[i * width : (i + 1) * width]
        total = room(row, line)
        total[:] = 0
        for r in range(kh):
            o = (i % height + top - r * dh) // sh
            if o < 0 or o >= down or o * sh != i % height + top - r * dh:
                continue
            given = g[(i // height * down + o) * step : (i // height * down + o) * step + across]
            share = shares[o]
            for s in range(kw):
                low, high = _reached(s * dw - left, sw, width, across)
                if sw == 1 and low < high:
                    target, seen, part = (
                        total[low + s * dw - left : high + s * dw - left],
                        given[low:high],
                        share[low:high],
                    )
                    for p in range(len(target)):
                        target[p] += number(seen[p]) * part[p]
                else:
                    for p in range(low, high):
                        total[p * sw + s * dw - left] += number(given[p]) * share[p]
        settled(row, total)


def _turned(pair: Sequence[int]) -> tuple[int, int]:
    return pair[1], pair[0]


def is_plane(type: TensorType) -> bool:
    """Whether these are images of one channel."""
    return type.rank == 4 and type.shape[1] == 1


def side_by_side(x: Window) -> int | None:
    """Along which axis an image of one channel lies side by side, its rows evenly apart; None: along neither."""
    found = [(rows.width, axis) for axis in (ACROSS, DOWN) if (rows := rows_along(x, axis))]
    return max(found)[1] if found else None


def layout(inputs: Windows, outputs: Types) -> Sequence[Window]:
    """As the input lies."""
    (y,) = outputs
    if side_by_side(inputs[0]) != DOWN:
        return [Window.dense(y)]
    item, (*_, down, across) = y.dtype.itemsize, y.shape
    plane = down * across * item
    return [Window(y, (plane, plane, item, down * item))]


def reads(window: Window) -> Window:
    """As it lies, if rows along an axis do side by side."""
    return window if side_by_side(window) is not None else Window.dense(window.type)


def mean(op: AvgPool | AvgPoolGrad, inputs: Windows, outputs: Windows) -> LoopKernel:
    """The kernel for images of one channel, by ranges of rows of what is written.

    Raises:
        Refused: other elements, or other layouts.
    """
    (x,), (y,) = inputs, outputs
    check_elements(x, y)
    axis = side_by_side(x)
    written = rows_along(y, axis) if axis else None
    if axis is None or written is None or written.step != written.width:
        raise Refused(f"{x.type} with the strides {x.strides}")
    given = rows_along(x, axis)
    assert given is not None
    other = DOWN + ACROSS - axis
    image, pooled = ((window.shape[other], window.shape[axis]) for window in (x, y))
    if isinstance(op, AvgPoolGrad):
        image, pooled = pooled, image
    turn, count, step, width = _turned if axis == DOWN else tuple, written.count, given.step, given.width

    def loops(inputs: Arrays, outputs: Arrays, scratch: Arrays) -> Run:
        extent, positions = turn(image), turn(pooled)
        shares = np.ones(positions)
        op.divide(shares, op.windows(extent), (0, 0), positions)
        shares = shares.T if axis == DOWN else shares
        places = [turn(each) for each in (op.kernel, op.strides, [low for low, _ in op.pads], op.dilations)]
        numbers = tuple(int(n) for pair in (image, pooled, *places) for n in pair)
        arrays = (flat_input(inputs[0]), step, flat(outputs[0]), np.ascontiguousarray(shares, np.float32))
        grain = max(1, GRAIN // max(1, width * op.kernel[0] * op.kernel[1]))
        function = _mean if isinstance(op, AvgPool) else _mean_gradient
        return ranged(function, count, grain, current_threads(), *arrays, numbers, own=scratch[0])

    return LoopKernel(loops, (lines(y, written.width, current_threads()),))

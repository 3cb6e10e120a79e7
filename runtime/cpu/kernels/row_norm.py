"""Layer normalisation, its form without centring, and their gradients, by compiled loops over rows.

Sums along a row are taken in blocks, in float32 lanes within a block and in float64 over blocks. Sums over rows are
taken by segments. These depend only on the shape, so no result depends on the number of threads.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from foreplan.graph import Op, Window
from foreplan.graph.op import Arrays, Windows
from foreplan.ops.norm.rows import LayerNorm, LayerNormGrad, RMSNorm, RMSNormGrad
from foreplan.runtime.cpu.codegen.elements import as_in, check_elements, check_float, number, written
from foreplan.runtime.cpu.codegen.jit import compiled, inlined, summing
from foreplan.runtime.cpu.kernel import LoopKernel
from foreplan.runtime.cpu.kernels.rows import Rows, flat, flat_input, rows_from, same_place
from foreplan.runtime.cpu.kernels.scores import BLOCK, row_sum
from foreplan.runtime.cpu.threads import current_threads, ranged
from foreplan.runtime.kernel import Refused, Run, one_after_another

ROWS = 32  # summed in float32
SEGMENTS = 16  # at most
SEGMENT = 64  # rows, at least, unless there are fewer
GRAIN = 1 << 15  # elements that are worth a thread of their own

_FLOAT, _DOUBLE = np.dtype(np.float32), np.dtype(np.float64)


@summing
def _squares(row, mean):  # type: ignore[no-untyped-def]
    """Sum of squared differences from a number."""
    total = 0.0
    for first in range(0, len(row), BLOCK):
        part, block = row[first : first + BLOCK], np.float32(0)
        for k in range(len(part)):
            value = number(part[k]) - mean
            block += value * value
        total += block
    return total


@inlined
def _normal_row(row, out, at, scale, bias, epsilon, centred, means, deviations):  # type: ignore[no-untyped-def]
    width = len(out)
    mean = np.float32(0)
    if centred:
        mean = np.float32(row_sum(row) / width)
        means[at] = mean
    r = np.float32(1.0 / np.sqrt(_squares(row, mean) / width + epsilon))
    deviations[at] = r
    if len(bias):
        for k in range(width):
            out[k] = as_in(out, (number(row[k]) - mean) * r * scale[k] + bias[k])
    elif len(scale):
        for k in range(width):
            out[k] = as_in(out, (number(row[k]) - mean) * r * scale[k])
    else:
        for k in range(width):
            out[k] = as_in(out, (number(row[k]) - mean) * r)


@compiled
def _normal(  # type: ignore[no-untyped-def]
    start, stop, x, step, y, width, scale, bias, epsilon, centred, means, deviations
):
    for i in range(start, stop):
        row, out = x[i * step : i * step + width], y[i * width : (i + 1) * width]
        _normal_row(row, out, i, scale, bias, epsilon, centred, means, deviations)


@compiled
def _normal_over(  # type: ignore[no-untyped-def]
    start, stop, y, width, scale, bias, epsilon, centred, means, deviations
):
    for i in range(start, stop):
        row = y[i * width : (i + 1) * width]
        _normal_row(row, row, i, scale, bias, epsilon, centred, means, deviations)


@summing
def _row_sums(row, grad, mean, r, scale, dscale, dbias):  # type: ignore[no-untyped-def]
    """Σ h and Σ h · x̂ with x̂ = (x − mean) · r and h = g · scale; g · x̂ and g are added to the parameters' gradients."""
    plain, product = 0.0, 0.0
    for first in range(0, len(row), BLOCK):
        part, there, factor = row[first : first + BLOCK], grad[first : first + BLOCK], scale[first : first + BLOCK]
        left, right = dscale[first : first + BLOCK], dbias[first : first + BLOCK]
        some, other = np.float32(0), np.float32(0)
        for k in range(len(part)):
            normal, g = (number(part[k]) - mean) * r, number(there[k])
            h = g * factor[k]
            some += h
            other += h * normal
            left[k] += g * normal
            right[k] += g
        plain += some
        product += other
    return plain, product


@summing
def _plain_row_sums(row, grad, mean, r):  # type: ignore[no-untyped-def]
    """Σ g and Σ g · x̂."""
    plain, product = 0.0, 0.0
    for first in range(0, len(row), BLOCK):
        part, there = row[first : first + BLOCK], grad[first : first + BLOCK]
        some, other = np.float32(0), np.float32(0)
        for k in range(len(part)):
            g = number(there[k])
            some += g
            other += g * ((number(part[k]) - mean) * r)
        plain += some
        product += other
    return plain, product


@compiled
def _gradient_row(row, grad, scale, mean, r, plain, slope, line):  # type: ignore[no-untyped-def]
    """dx = (h − plain) · r − (x − mean) · slope."""
    if len(scale):
        for k in range(len(line)):
            line[k] = (number(grad[k]) * scale[k] - plain) * r - (number(row[k]) - mean) * slope
    else:
        for k in range(len(line)):
            line[k] = (number(grad[k]) - plain) * r - (number(row[k]) - mean) * slope


@compiled
def _add_row(there, line):  # type: ignore[no-untyped-def]
    for k in range(len(line)):
        line[k] += number(there[k])


@compiled
def _gradient(  # type: ignore[no-untyped-def]
    start,
    stop,
    rows,
    segments,
    x,
    x_step,
    g,
    g_step,
    added,
    added_step,
    dx,
    scale,
    means,
    deviations,
    centred,
    lines,
    sums,
    blocks,
):
    """The segments [start, stop): dx row by row, by way of a line of scratch memory; sums over their rows."""
    width = lines.shape[1]
    for segment in range(start, stop):
        low, high = rows * segment // segments, rows * (segment + 1) // segments
        line = lines[segment]
        if len(scale):
            sums[segment, :, :] = 0.0
        for first in range(low, high, ROWS):
            if len(scale):
                blocks[segment, :, :] = 0
            for i in range(first, min(first + ROWS, high)):
                row, grad = x[i * x_step : i * x_step + width], g[i * g_step : i * g_step + width]
                r, mean = deviations[i], means[i] if centred else np.float32(0)
                if len(scale):
                    plain, product = _row_sums(row, grad, mean, r, scale, blocks[segment, 0], blocks[segment, 1])
                else:
                    plain, product = _plain_row_sums(row, grad, mean, r)
                slope = np.float32(product / width * r * r)
                plain = plain / width if centred else 0.0
                _gradient_row(row, grad, scale, mean, r, np.float32(plain), slope, line)
                if len(added):
                    _add_row(added[i * added_step : i * added_step + width], line)
                written(line, dx[i * width : (i + 1) * width])
            if len(scale):
                for k in range(width):
                    sums[segment, 0, k] += blocks[segment, 0, k]
                    sums[segment, 1, k] += blocks[segment, 1, k]


@compiled
def _merge(sums, dscale, dbias):  # type: ignore[no-untyped-def]
    """The parameters' gradients, segment by segment."""
    for k in range(len(dscale)):
        total, other = 0.0, 0.0
        for segment in range(len(sums)):
            total += sums[segment, 0, k]
            other += sums[segment, 1, k]
        dscale[k] = total
        if len(dbias):
            dbias[k] = other


def _nothing() -> np.ndarray:
    return np.zeros(0, np.float32)


def _no_input() -> np.ndarray:
    return flat_input(_nothing())


def _rows(op: LayerNorm | RMSNorm | LayerNormGrad | RMSNormGrad, window: Window) -> Rows:
    check_elements(window)
    rows = rows_from(window, op.axis)
    if rows is None:
        raise Refused(f"{window.type} with the strides {window.strides}")
    return rows


def normal(op: Op, inputs: Windows, outputs: Windows) -> LoopKernel:
    """The kernel of `LayerNorm` and `RMSNorm`, by ranges of rows."""
    assert isinstance(op, LayerNorm | RMSNorm)
    check_float(*inputs[1:], *outputs[1:])
    rows = _rows(op, inputs[0])

    def loops(inputs: Arrays, outputs: Arrays, scratch: Arrays) -> Run:
        x, *parameters = inputs
        y, r = flat(outputs[0]), flat(outputs[-1])
        means = flat(outputs[1]) if op.centred else _nothing()
        scale, bias = [*map(flat_input, parameters), _no_input(), _no_input()][:2]
        rest = (scale, bias, np.float64(op.epsilon), op.centred, means, r)
        width, grain, threads = rows.width, max(1, GRAIN // rows.width), current_threads()
        if same_place(x, outputs[0]):
            return ranged(_normal_over, rows.count, grain, threads, y, width, *rest)
        return ranged(_normal, rows.count, grain, threads, flat_input(x), rows.step, y, width, *rest)

    return LoopKernel(loops, overwrites=((0, 0),) if inputs[0].is_dense else ())


def gradient(op: Op, inputs: Windows, outputs: Windows) -> LoopKernel:
    """The kernel of `LayerNormGrad` and `RMSNormGrad`, by segments of rows, whose sums are then added: a row is read
    twice while it is in the cache.
    """
    assert isinstance(op, LayerNormGrad | RMSNormGrad)
    check_float(*inputs[1 : op.g], *outputs[1:])
    x, g, *added = (_rows(op, window) for window in (inputs[0], *inputs[op.g :]))
    count, width = x.count, x.width
    segments = max(1, min(SEGMENTS, count // SEGMENT, count * width // GRAIN))
    total = (segments, 2, width if op.scaled else 0)  # of the parameters' gradients

    def loops(inputs: Arrays, outputs: Arrays, scratch: Arrays) -> Run:
        means = flat_input(inputs[op.g - 2]) if op.centred else _no_input()
        scale = flat_input(inputs[1]) if op.scaled else _no_input()
        more = (flat_input(inputs[-1]), added[0].step) if added else (_no_input(), 0)
        given = (flat_input(inputs[0]), x.step, flat_input(inputs[op.g]), g.step, *more, flat(outputs[0]))
        rest = (scale, means, flat_input(inputs[op.g - 1]), op.centred, *scratch)
        run = ranged(_gradient, segments, 1, current_threads(), count, segments, *given, *rest)
        if not op.scaled:
            return run
        dbias = flat(outputs[2]) if op.centred else _nothing()
        return one_after_another(run, partial(_merge, scratch[1], flat(outputs[1]), dbias))

    pieces = (((segments, width), _FLOAT), (total, _DOUBLE), (total, _FLOAT))
    pairs = tuple((0, i) for i in (*reversed(range(op.g, len(inputs))), 0) if inputs[i].is_dense)
    return LoopKernel(loops, pieces, pairs)


def reads(op: Op, index: int, window: Window) -> Window:
    """x, g and the summand as rows evenly apart; all else in C order."""
    assert isinstance(op, LayerNorm | RMSNorm | LayerNormGrad | RMSNormGrad)
    wide = index == 0 or (isinstance(op, LayerNormGrad | RMSNormGrad) and index >= op.g)
    return window if wide and rows_from(window, op.axis) is not None else Window.dense(window.type)

"""Batch normalisation by compiled loops, on images as rows of channels.

Sums over rows are taken in blocks, in float32 within a block and in float64 over blocks, for segments of rows. Segments
depend only on the shape, so no result depends on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from foreplan.graph import Op
from foreplan.graph.op import Arrays, Windows
from foreplan.ops.norm.batch import BatchNorm, BatchNormGrad
from foreplan.runtime.cpu.codegen.elements import as_in, check_float, number
from foreplan.runtime.cpu.codegen.jit import inlined, looped
from foreplan.runtime.cpu.kernel import LoopKernel
from foreplan.runtime.cpu.kernels.rows import flat, flat_input, image_rows, same_place
from foreplan.runtime.cpu.threads import current_threads, ranged
from foreplan.runtime.kernel import Run, one_after_another

ROWS = 32  # of a block, summed in float32
SEGMENTS = 8  # of rows, at most, each worked on by one thread
SEGMENT = 256  # rows, at least, unless there are fewer
GRAIN = 1 << 16  # elements that are worth a thread of their own
HUGE = np.float32(1e30)

FLOAT, DOUBLE = np.dtype(np.float32), np.dtype(np.float64)
_compiled = looped(fastmath={"contract", "nsz", "arcp"})


def _segments(rows: int) -> int:
    return max(1, min(SEGMENTS, rows // SEGMENT))


@_compiled
def _block_moments(x, first, last, step, shift, total, squares):  # type: ignore[no-untyped-def]
    """For each channel of rows [first, last): the first element (0 if it is infinite), and sums and squares around it.

    Rows are taken two by two: sums go through the cache half as often.
    """
    width = len(total)
    row = x[first * step : first * step + width]
    for c in range(width):
        value = number(row[c])
        shift[c] = value if abs(value) < HUGE else np.float32(0)
        total[c] = value - shift[c]
        squares[c] = total[c] * total[c]
    for r in range(first + 1, last - 1, 2):
        row, other = x[r * step : r * step + width], x[(r + 1) * step : (r + 1) * step + width]
        for c in range(width):
            value, following = number(row[c]) - shift[c], number(other[c]) - shift[c]
            total[c] = total[c] + value + following
            squares[c] = squares[c] + value * value + following * following
    if (last - first) % 2 == 0:
        row = x[(last - 1) * step : (last - 1) * step + width]
        for c in range(width):
            value = number(row[c]) - shift[c]
            total[c] += value
            squares[c] += value * value


@_compiled
def _moments(start, stop, x, rows, step, all_sums, all_spread, scratch):  # type: ignore[no-untyped-def]
    """Sum and spread of the segments [start, stop): blocks shifted by an element of their own, merged as Chan, Golub
    and LeVeque (1979) do, so that neither a large mean nor a drifting one costs digits.
    """
    segments = len(all_sums)
    for segment in range(start, stop):
        low, high = rows * segment // segments, rows * (segment + 1) // segments
        shift, total, squares = scratch[segment, 0], scratch[segment, 1], scratch[segment, 2]
        sums, spread = all_sums[segment], all_spread[segment]
        sums[:] = 0.0
        spread[:] = 0.0
        for first in range(low, high, ROWS):
            last = min(first + ROWS, high)
            _block_moments(x, first, last, step, shift, total, squares)
            new, old = np.float64(last - first), np.float64(first - low)
            share, weight = 1.0 / max(old, 1.0), old * new / (old + new)
            for c in range(len(total)):
                around = np.float64(total[c])
                block = new * np.float64(shift[c]) + around
                inner = max(np.float64(squares[c]) - around * around / new, 0.0)
                apart = block / new - sums[c] * share
                sums[c] += block
                spread[c] += inner + apart * apart * weight


@_compiled
def _merge_moments(rows, all_sums, all_spread, mean, variance):  # type: ignore[no-untyped-def]
    """Mean and variance, segment by segment."""
    segments = len(all_sums)
    for c in range(len(mean)):
        total, spread = all_sums[0, c], all_spread[0, c]
        for segment in range(1, segments):
            old = rows * segment // segments
            new = rows * (segment + 1) // segments - old
            apart = all_sums[segment, c] / new - total / old
            total += all_sums[segment, c]
            spread += all_spread[segment, c] + apart * apart * (np.float64(old) * new / (old + new))
        mean[c] = total / rows
        variance[c] = spread / rows


def moments(op: Op, inputs: Windows, outputs: Windows) -> LoopKernel:
    """The kernel of `ChannelMoments`, in one pass: by segments of rows, whose sums are then merged."""
    check_float(*outputs)
    x = image_rows(inputs[0])
    segments = _segments(x.count)
    sums = ((segments, x.width), DOUBLE)

    def loops(inputs: Arrays, outputs: Arrays, scratch: Arrays) -> Run:
        given = (flat_input(inputs[0]), x.count, x.step, *scratch)
        add = ranged(_moments, segments, 1, current_threads(), *given)
        return one_after_another(add, partial(_merge_moments, x.count, *scratch[:2], *outputs))

    return LoopKernel(loops, (sums, sums, ((segments, 3, x.width), FLOAT)))


@inlined
def _normalize(row, out, mean, factor, bias):  # type: ignore[no-untyped-def]
    for c in range(len(out)):
        out[c] = as_in(out, (number(row[c]) - mean[c]) * factor[c] + bias[c])


@_compiled
def _normal(start, stop, x, x_step, y, y_step, mean, factor, bias):  # type: ignore[no-untyped-def]
    for r in range(start, stop):
        row, out = x[r * x_step : r * x_step + len(mean)], y[r * y_step : r * y_step + len(mean)]
        _normalize(row, out, mean, factor, bias)


@_compiled
def _normal_over(start, stop, y, step, mean, factor, bias):  # type: ignore[no-untyped-def]
    for r in range(start, stop):
        row = y[r * step : r * step + len(mean)]
        _normalize(row, row, mean, factor, bias)


@_compiled
def _factor(scale, variance, epsilon, factor):  # type: ignore[no-untyped-def]
    for c in range(len(scale)):
        factor[c] = scale[c] / np.sqrt(variance[c] + epsilon)


def normal(op: Op, inputs: Windows, outputs: Windows) -> LoopKernel:
    """The kernel of `BatchNorm` with given statistics: a factor for each channel, then ranges of rows."""
    assert isinstance(op, BatchNorm)
    check_float(*inputs[1:])
    rows, target = image_rows(inputs[0]), image_rows(outputs[0])

    def loops(inputs: Arrays, outputs: Arrays, scratch: Arrays) -> Run:
        x, y = inputs[0], outputs[0]
        scale, bias, mean, variance = map(flat_input, inputs[1:])
        (factor,) = scratch
        prepare = partial(_factor, scale, variance, np.float32(op.epsilon), factor)
        vectors, grain = (mean, factor, bias), max(1, GRAIN // rows.width)
        function: Callable[..., object] = _normal
        given: tuple[object, ...] = (flat(y), target.step)
        if same_place(x, y):
            function = _normal_over
        else:
            given = (flat_input(x), rows.step, *given)
        return one_after_another(prepare, ranged(function, rows.count, grain, current_threads(), *given, *vectors))

    return LoopKernel(loops, (((rows.width,), FLOAT),), ((0, 0),))


@_compiled
def _gradient_sums(  # type: ignore[no-untyped-def]
    start, stop, x, x_step, g, g_step, rows, mean, all_sums, all_products, all_total, all_product
):
    """Σ g and Σ g · (x − mean) of the segments [start, stop)."""
    segments, width = all_sums.shape
    for segment in range(start, stop):
        low, high = rows * segment // segments, rows * (segment + 1) // segments
        sums, products = all_sums[segment], all_products[segment]
        total, product = all_total[segment], all_product[segment]
        sums[:] = 0.0
        products[:] = 0.0
        for first in range(low, high, ROWS):
            total[:] = 0
            product[:] = 0
            for r in range(first, min(first + ROWS, high)):
                row, grad = x[r * x_step : r * x_step + width], g[r * g_step : r * g_step + width]
                for c in range(width):
                    value = number(grad[c])
                    total[c] += value
                    product[c] += (number(row[c]) - mean[c]) * value
            for c in range(width):
                sums[c] += total[c]
                products[c] += product[c]


@_compiled
def _merge_sums(all_sums, all_products, total, moment):  # type: ignore[no-untyped-def]
    """The sums, segment by segment."""
    for c in range(len(total)):
        sums, products = 0.0, 0.0
        for segment in range(len(all_sums)):
            sums += all_sums[segment, c]
            products += all_products[segment, c]
        total[c] = sums
        moment[c] = products


def gradient_sums(op: Op, inputs: Windows, outputs: Windows) -> LoopKernel:
    """The kernel of `ChannelSums`: by segments of rows, whose sums are then merged."""
    check_float(inputs[1], *outputs)
    of_x, of_g = image_rows(inputs[0]), image_rows(inputs[2])
    count, width, segments = of_x.count, of_x.width, _segments(of_x.count)

    def loops(inputs: Arrays, outputs: Arrays, scratch: Arrays) -> Run:
        x, mean, g = map(flat_input, inputs)
        given = (x, of_x.step, g, of_g.step, count, mean, *scratch)
        add = ranged(_gradient_sums, segments, 1, current_threads(), *given)
        return one_after_another(add, partial(_merge_sums, *scratch[:2], *outputs))

    sums = (segments, width)
    return LoopKernel(loops, ((sums, DOUBLE), (sums, DOUBLE), (sums, FLOAT), (sums, FLOAT)))


@_compiled
def _gradient_vectors(  # type: ignore[no-untyped-def]
    rows, all_sums, all_products, scale, variance, epsilon, dscale, dbias, factor, slope, shift
):
    """dscale and dbias, and dx = g · factor + ((x − mean) · slope + shift)."""
    for c in range(len(scale)):
        sums, products = 0.0, 0.0
        for segment in range(len(all_sums)):
            sums += all_sums[segment, c]
            products += all_products[segment, c]
        r = 1.0 / np.sqrt(np.float64(variance[c]) + epsilon)
        dbias[c] = sums
        dscale[c] = products * r
        factor[c] = scale[c] * r
        slope[c] = -scale[c] * r * r * r * products / rows
        shift[c] = -scale[c] * r * sums / rows


@inlined
def _gradients(row, grad, out, mean, factor, slope, shift):  # type: ignore[no-untyped-def]
    for c in range(len(out)):
        value = (number(row[c]) - mean[c]) * slope[c] + shift[c]
        out[c] = as_in(out, number(grad[c]) * factor[c] + value)


@_compiled
def _gradient(  # type: ignore[no-untyped-def]
    start, stop, x, x_step, g, g_step, dx, step, mean, factor, slope, shift
):
    width = len(mean)
    for r in range(stop - 1, start - 1, -1):  # the last rows are still in the cache
        row, grad = x[r * x_step : r * x_step + width], g[r * g_step : r * g_step + width]
        _gradients(row, grad, dx[r * step : r * step + width], mean, factor, slope, shift)


@_compiled
def _gradient_over_g(start, stop, x, x_step, dx, step, mean, factor, slope, shift):  # type: ignore[no-untyped-def]
    width = len(mean)
    for r in range(stop - 1, start - 1, -1):
        row, out = x[r * x_step : r * x_step + width], dx[r * step : r * step + width]
        _gradients(row, out, out, mean, factor, slope, shift)


@_compiled
def _gradient_over_x(start, stop, g, g_step, dx, step, mean, factor, slope, shift):  # type: ignore[no-untyped-def]
    width = len(mean)
    for r in range(stop - 1, start - 1, -1):
        grad, out = g[r * g_step : r * g_step + width], dx[r * step : r * step + width]
        _gradients(out, grad, out, mean, factor, slope, shift)


def gradient(op: Op, inputs: Windows, outputs: Windows) -> LoopKernel:
    """The kernel of `BatchNormGrad`: a pass over x and g for the sums, by segments of rows, and one for the
    elements, by ranges of rows.
    """
    assert isinstance(op, BatchNormGrad)
    check_float(*inputs[1:4], *outputs[1:])
    of_x, of_g, of_dx = image_rows(inputs[0]), image_rows(inputs[4]), image_rows(outputs[0])
    count, width, segments = of_x.count, of_x.width, _segments(of_x.count)

    def loops(inputs: Arrays, outputs: Arrays, scratch: Arrays) -> Run:
        x, g, dx = inputs[0], inputs[4], outputs[0]
        scale, mean, variance = map(flat_input, inputs[1:4])
        sums, products, total, product, *vectors = scratch
        threads, both = current_threads(), (flat_input(x), of_x.step, flat_input(g), of_g.step)
        add = ranged(_gradient_sums, segments, 1, threads, *both, count, mean, sums, products, total, product)
        epsilon = np.float64(op.epsilon)
        finish = partial(_gradient_vectors, count, sums, products, scale, variance, epsilon, *outputs[1:], *vectors)
        function: Callable[..., object] = _gradient
        given: tuple[object, ...] = both
        if same_place(dx, g):
            function, given = _gradient_over_g, both[:2]
        elif same_place(dx, x):
            function, given = _gradient_over_x, both[2:]
        grain = max(1, GRAIN // width)
        write = ranged(function, count, grain, threads, *given, flat(dx), of_dx.step, mean, *vectors)
        return one_after_another(add, finish, write)

    sums, vector = (segments, width), ((width,), FLOAT)
    pieces = ((sums, DOUBLE), (sums, DOUBLE), (sums, FLOAT), (sums, FLOAT), vector, vector, vector)
    return LoopKernel(loops, pieces, ((0, 4), (0, 0)))

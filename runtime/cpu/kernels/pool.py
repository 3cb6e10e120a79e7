"""Pooling by compiled loops over the channels of images that lie with their channels last.

Parts of the work are rows of the output. Gradients are gathered, not scattered: no two parts write one place, and each
place adds in the order of the taps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from foreplan.graph import Op, Window
from foreplan.graph.op import Arrays, Windows
from foreplan.graph.types import Shape
from foreplan.ops.blocks import Piece
from foreplan.ops.pool import AvgPool, AvgPoolGrad, MaxPool, MaxPoolGrad
from foreplan.runtime.cpu.codegen.elements import as_in, lines, number, room, settled
from foreplan.runtime.cpu.codegen.jit import compiled, inlined
from foreplan.runtime.cpu.kernel import LoopKernel
from foreplan.runtime.cpu.kernels import planes
from foreplan.runtime.cpu.kernels.rows import Rows, channel_rows, flat, flat_input, image_rows
from foreplan.runtime.cpu.threads import current_threads, ranged
from foreplan.runtime.kernel import Refused, Run

AXES = 3  # of images, at most
GRAIN = 1 << 15  # taps times elements that are worth a thread of their own
LOWEST = np.float32(-np.inf)


@dataclass(frozen=True)
class Places:
    """How windows lie over images of one to three spatial axes.

    Attributes:
        image: extents of the pooled images.
        pooled: positions of windows.
        kernel, strides, low, dilations: of the windows; `low` is the padding before the first element.
    """

    image: Shape
    pooled: Shape
    kernel: Shape
    strides: Shape
    low: Shape
    dilations: Shape

    @property
    def numbers(self) -> tuple[int, ...]:
        """All of it, as compiled loops take it: three axes each, the missing ones of one element."""
        missing = AXES - len(self.image)
        ones = (self.image, self.pooled, self.kernel, self.strides)
        padded = [(1,) * missing + each for each in ones]
        return sum([*padded, (0,) * missing + self.low, (1,) * missing + self.dilations], ())

    @property
    def taps(self) -> int:
        """Of a window."""
        return math.prod(self.kernel)


def _places(op: MaxPool | MaxPoolGrad | AvgPool | AvgPoolGrad, image: Shape, pooled: Shape) -> Places:
    low = tuple(pads[0] for pads in op.pads)
    return Places(image[2:], pooled[2:], op.kernel, op.strides, low, op.dilations)


def _grain(places: Places, channels: int) -> int:
    """Rows of windows that are worth a thread."""
    return max(1, GRAIN // max(1, places.pooled[-1] * channels * places.taps))


@inlined
def _take(row, best):  # type: ignore[no-untyped-def]
    for c in range(len(best)):
        value, old = number(row[c]), number(best[c])
        best[c] = row[c] if value > old or value != value else best[c]


@inlined
def _take_at(row, best, at, tap):  # type: ignore[no-untyped-def]
    for c in range(len(best)):
        value, old = number(row[c]), number(best[c])
        wins = value > old or (value != value and old == old)
        best[c] = row[c] if wins else best[c]
        at[c] = tap if wins else at[c]


@inlined
def _add(row, total):  # type: ignore[no-untyped-def]
    for c in range(len(total)):
        total[c] += number(row[c])


@inlined
def _add_where(at, tap, row, total):  # type: ignore[no-untyped-def]
    for c in range(len(total)):
        total[c] += number(row[c]) if at[c] == tap else np.float32(0)


@inlined
def _add_share(row, share, total):  # type: ignore[no-untyped-def]
    for c in range(len(total)):
        total[c] += number(row[c]) * share


@compiled
def _largest(start, stop, x, step, y, channels, places):  # type: ignore[no-untyped-def]
    depth, height, width, deep, down, across, kd, kh, kw, sd, sh, sw, front, top, left, dd, dh, dw = places
    for o in range(start, stop):
        n, first, second = o // (deep * down), o // down % deep * sd - front, o % down * sh - top
        for p in range(across):
            best = y[(o * across + p) * channels : (o * across + p + 1) * channels]
            best[:] = as_in(best, LOWEST)
            for q in range(kd):
                d = first + q * dd
                for r in range(kh):
                    h = second + r * dh
                    for s in range(kw):
                        w = p * sw - left + s * dw
                        if 0 <= d < depth and 0 <= h < height and 0 <= w < width:
                            place = (((n * depth + d) * height + h) * width + w) * step
                            _take(x[place : place + channels], best)


@compiled
def _largest_at(start, stop, x, step, y, index, channels, places):  # type: ignore[no-untyped-def]
    depth, height, width, deep, down, across, kd, kh, kw, sd, sh, sw, front, top, left, dd, dh, dw = places
    for o in range(start, stop):
        n, first, second = o // (deep * down), o // down % deep * sd - front, o % down * sh - top
        for p in range(across):
            best = y[(o * across + p) * channels : (o * across + p + 1) * channels]
            at = index[(o * across + p) * channels : (o * across + p + 1) * channels]
            best[:] = as_in(best, LOWEST)
            at[:] = 0
            for q in range(kd):
                d = first + q * dd
                for r in range(kh):
                    h = second + r * dh
                    for s in range(kw):
                        w = p * sw - left + s * dw
                        if 0 <= d < depth and 0 <= h < height and 0 <= w < width:
                            place = (((n * depth + d) * height + h) * width + w) * step
                            _take_at(x[place : place + channels], best, at, np.uint8((q * kh + r) * kw + s))


@compiled
def _largest_gradient(  # type: ignore[no-untyped-def]
    start, stop, index, index_step, g, g_step, dx, channels, places, line
):
    depth, height, width, deep, down, across, kd, kh, kw, sd, sh, sw, front, top, left, dd, dh, dw = places
    for i in range(start, stop):
        n, d, h = i // (depth * height), i // height % depth, i % height
        row = dx[i * width * channels : (i + 1) * width * channels]
        made = room(row, line)
        made[:] = 0
        for q in range(kd):
            first = (d + front - q * dd) // sd
            if first < 0 or first >= deep or first * sd != d + front - q * dd:
                continue
            for r in range(kh):
                second = (h + top - r * dh) // sh
                if second < 0 or second >= down or second * sh != h + top - r * dh:
                    continue
                for s in range(kw):
                    tap = np.uint8((q * kh + r) * kw + s)
                    for p in range(across):
                        w = p * sw - left + s * dw
                        if 0 <= w < width:
                            o = ((n * deep + first) * down + second) * across + p
                            at = index[o * index_step : o * index_step + channels]
                            grad = g[o * g_step : o * g_step + channels]
                            _add_where(at, tap, grad, made[w * channels : (w + 1) * channels])
        settled(row, made)


@compiled
def _mean(start, stop, x, step, y, shares, channels, places, line):  # type: ignore[no-untyped-def]
    depth, height, width, deep, down, across, kd, kh, kw, sd, sh, sw, front, top, left, dd, dh, dw = places
    for o in range(start, stop):
        n, first, second = o // (deep * down), o // down % deep * sd - front, o % down * sh - top
        for p in range(across):
            row = y[(o * across + p) * channels : (o * across + p + 1) * channels]
            total = room(row, line)
            total[:] = 0
            for q in range(kd):
                d = first + q * dd
                for r in range(kh):
                    h = second + r * dh
                    for s in range(kw):
                        w = p * sw - left + s * dw
                        if 0 <= d < depth and 0 <= h < height and 0 <= w < width:
                            place = (((n * depth + d) * height + h) * width + w) * step
                            _add(x[place : place + channels], total)
            share = shares[o % (deep * down), p]
            for c in range(channels):
                total[c] *= share
            settled(row, total)


@compiled
def _mean_gradient(start, stop, g, step, dx, shares, channels, places, line):  # type: ignore[no-untyped-def]
    depth, height, width, deep, down, across, kd, kh, kw, sd, sh, sw, front, top, left, dd, dh, dw = places
    for i in range(start, stop):
        n, d, h = i // (depth * height), i // height % depth, i % height
        row = dx[i * width * channels : (i + 1) * width * channels]
        made = room(row, line)
        made[:] = 0
        for q in range(kd):
            first = (d + front - q * dd) // sd
            if first < 0 or first >= deep or first * sd != d + front - q * dd:
                continue
            for r in range(kh):
                second = (h + top - r * dh) // sh
                if second < 0 or second >= down or second * sh != h + top - r * dh:
                    continue
                for s in range(kw):
                    for p in range(across):
                        w = p * sw - left + s * dw
                        if 0 <= w < width:
                            place = (((n * deep + first) * down + second) * across + p) * step
                            grad, share = g[place : place + channels], shares[first * down + second, p]
                            _add_share(grad, share, made[w * channels : (w + 1) * channels])
        settled(row, made)


def _image(window: Window) -> Rows:
    if not 3 <= window.type.rank <= 2 + AXES or window.shape[1] == 1:
        raise Refused(f"{window.type} is no image of channels side by side")
    return image_rows(window)


def _rows(shape: Shape) -> int:
    """Rows of images."""
    return shape[0] * math.prod(shape[2:-1])


def _lines(y: Window) -> tuple[Piece]:
    """A row of an image a thread, of halves."""
    return (lines(y, y.shape[1] * y.shape[-1], current_threads()),)


def largest(op: Op, inputs: Windows, outputs: Windows) -> LoopKernel:
    """The kernel of `MaxPool`, with the index of one byte or without: by ranges of rows of windows."""
    assert isinstance(op, MaxPool)
    if op.index_dtype.itemsize != 1:
        raise Refused("an index of more than a byte")
    x, shape = _image(inputs[0]), outputs[0].shape
    places = _places(op, inputs[0].shape, shape)

    def loops(inputs: Arrays, outputs: Arrays, scratch: Arrays) -> Run:
        function = _largest if len(outputs) == 1 else _largest_at
        given = (flat_input(inputs[0]), x.step, *map(flat, outputs), x.width, places.numbers)
        return ranged(function, _rows(shape), _grain(places, x.width), current_threads(), *given)

    return LoopKernel(loops)


def largest_gradient(op: Op, inputs: Windows, outputs: Windows) -> LoopKernel:
    """The kernel of `MaxPoolGrad`: by ranges of rows of the images."""
    assert isinstance(op, MaxPoolGrad)
    at, g, shape = channel_rows(inputs[0]), _image(inputs[1]), outputs[0].shape
    if at is None or inputs[0].type.dtype.name != "uint8":
        raise Refused(f"an index that is {inputs[0].type}")
    index, places = at, _places(op, shape, inputs[1].shape)

    def loops(inputs: Arrays, outputs: Arrays, scratch: Arrays) -> Run:
        indices, grads = map(flat_input, inputs)
        given = (indices, index.step, grads, g.step, flat(outputs[0]), g.width, places.numbers)
        grain = _grain(places, g.width)
        return ranged(_largest_gradient, _rows(shape), grain, current_threads(), *given, own=scratch[0])

    return LoopKernel(loops, _lines(outputs[0]))


def mean(op: Op, inputs: Windows, outputs: Windows) -> LoopKernel:
    """The kernel of `AvgPool` and `AvgPoolGrad`: by ranges of rows of the output."""
    assert isinstance(op, AvgPool | AvgPoolGrad)
    if planes.is_plane(inputs[0].type):
        return planes.mean(op, inputs, outputs)
    image, pooled = inputs[0].shape, outputs[0].shape
    if isinstance(op, AvgPoolGrad):
        image, pooled = pooled, image
    places, rows, given = _places(op, image, pooled), _rows(outputs[0].shape), _image(inputs[0])

    def loops(inputs: Arrays, outputs: Arrays, scratch: Arrays) -> Run:
        shares = np.ones(places.pooled)
        op.divide(shares, op.windows(places.image), (0,) * shares.ndim, places.pooled)
        by_row = shares.astype(np.float32).reshape(-1, shares.shape[-1])
        arrays = (flat_input(inputs[0]), given.step, flat(outputs[0]), by_row)
        function = _mean if isinstance(op, AvgPool) else _mean_gradient
        numbers, grain = (given.width, places.numbers), _grain(places, given.width)
        return ranged(function, rows, grain, current_threads(), *arrays, *numbers, own=scratch[0])

    return LoopKernel(loops, _lines(outputs[0]))

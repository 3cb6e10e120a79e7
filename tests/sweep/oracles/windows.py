"""Convolution, pooling and resizing by their definitions, in float64: padded copies, all windows, plain sums."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Array = np.ndarray
Arrays = list[Array]


def _padded(x: Array, pads: Any, value: float) -> Array:
    """x with margins of a value; negative ones crop."""
    for axis, (low, high) in enumerate(pads, 2):
        here = [(0, 0)] * x.ndim
        here[axis] = (max(0, low), max(0, high))
        x = np.pad(x, here, constant_values=value)
        stop = x.shape[axis] - max(0, -high)
        x = x[(slice(None),) * axis + (slice(max(0, -low), stop),)]
    return x


def _taken(x: Array, op: Any, kernel: Any, value: float) -> Array:
    """[N, C, *positions, *taps]: what every tap of every window reads."""
    x = _padded(x, op.pads, value)
    axes = tuple(range(2, x.ndim))
    reach = [gap * (taps - 1) + 1 for taps, gap in zip(kernel, op.dilations)]
    every = np.lib.stride_tricks.sliding_window_view(x, reach, axes)
    some = (slice(None), slice(None), *(slice(None, None, s) for s in op.strides))
    return every[(*some, *(slice(None, None, gap) for gap in op.dilations))]


def _grouped(x: Array, groups: int, axis: int) -> Array:
    return x.reshape(*x.shape[:axis], groups, x.shape[axis] // groups, *x.shape[axis + 1 :])


def _letters(op: Any) -> tuple[str, str]:
    count = len(op.strides)
    return "opq"[:count], "rst"[:count]


def conv(op: Any, x: Array, w: Array, *added: Array) -> Arrays:
    o, r = _letters(op)
    seen = _grouped(_taken(x, op, w.shape[2:], 0.0), op.groups, 1)
    y = np.einsum(f"ngc{o}{r},gkc{r}->ngk{o}", seen, _grouped(w, op.groups, 0), optimize=True)
    y = y.reshape(len(x), len(w), *y.shape[3:])
    for each in added:
        y = y + (each if each.ndim == y.ndim else each.reshape(-1, *(1 for _ in op.strides)))
    return [y]


def conv_data_grad(op: Any, g: Array, w: Array, *added: Array) -> Arrays:
    """Each product to its place in the padded image, of which the middle is taken."""
    groups, kernel = op.groups, w.shape[2:]
    lows = [max(0, low) for low, _ in op.pads]
    reach = [low + n + max(0, high) for low, n, (_, high) in zip(lows, op.spatial, op.pads)]
    whole = np.zeros((len(g), w.shape[1] * groups, *reach))
    weights, grads = _grouped(w, groups, 0), _grouped(g, groups, 1)
    for tap in np.ndindex(*kernel):
        part = np.einsum("gkc,ngk...->ngc...", weights[(..., *tap)], grads, optimize=True)
        part = part.reshape(len(g), w.shape[1] * groups, *g.shape[2:])
        at = []
        for t, gap, step, (low, _), count in zip(tap, op.dilations, op.strides, op.pads, g.shape[2:]):
            first = t * gap - min(0, low)
            at.append(slice(first, first + (count - 1) * step + 1, step))
        whole[(slice(None), slice(None), *at)] += part
    middle = tuple(slice(low, low + n) for low, n in zip(lows, op.spatial))
    dx = whole[(slice(None), slice(None), *middle)]
    return [dx + added[0] if added else dx]


def conv_weight_grad(op: Any, x: Array, g: Array, *added: Array) -> Arrays:
    o, r = _letters(op)
    seen = _grouped(_taken(x, op, op.kernel, 0.0), op.groups, 1)
    dw = np.einsum(f"ngc{o}{r},ngk{o}->gkc{r}", seen, _grouped(g, op.groups, 1), optimize=True)
    dw = dw.reshape(g.shape[1], x.shape[1] // op.groups, *op.kernel)
    return [dw + added[0] if added else dw]


def max_pool(op: Any, x: Array) -> Arrays:
    """NaN wins, and the first of several; what lies outside never does."""
    outside = _taken(np.ones(x.shape, bool), op, op.kernel, False)
    lowest = -np.inf if x.dtype.kind == "f" else np.iinfo(x.dtype).min
    seen = np.where(outside, _taken(x, op, op.kernel, 0), np.asarray(lowest, x.dtype))
    flat = seen.reshape(*seen.shape[: x.ndim], math.prod(op.kernel))
    there = outside.reshape(flat.shape)
    y = flat.max(-1)
    if not op.save_index:
        return [y]
    # A window's first tap that is no padding, unless one beats everything before it.
    wins = np.isnan(flat) if x.dtype.kind == "f" else np.zeros(flat.shape, bool)
    first = np.where(wins.any(-1), wins.argmax(-1), (there & (flat == y[..., None])).argmax(-1))
    return [y, np.where(there.any(-1) & (wins.any(-1) | (y != lowest)), first, 0)]


def max_pool_grad(op: Any, index: Array, g: Array) -> Arrays:
    places = np.arange(int(np.prod(op.shape[2:]))).reshape(op.shape[2:])
    inside = _taken(np.ones((1, 1, *op.shape[2:]), bool), op, op.kernel, False)[0, 0]
    where = _taken(places[None, None], op, op.kernel, 0)[0, 0].reshape(*g.shape[2:], -1)
    inside = inside.reshape(where.shape)
    dx = np.zeros((*op.shape[:2], places.size))
    for at in np.ndindex(*g.shape):
        tap = int(index[at])
        if tap < where.shape[-1] and inside[(*at[2:], tap)]:
            dx[at[0], at[1], where[(*at[2:], tap)]] += g[at]
    return [dx.reshape(op.shape)]


def _counts(op: Any, extent: tuple[int, ...]) -> Array:
    """How many taps of each window count."""
    high = [h - b for (_, h), b in zip(op.pads, op.beyond or (0,) * len(op.pads))]
    ones = np.ones((1, 1, *extent))
    if op.count_include_pad:
        for axis, ((low, _), more) in enumerate(zip(op.pads, high), 2):
            at = [slice(None)] * ones.ndim
            margins = [(0, 0)] * ones.ndim
            margins[axis] = (max(0, low), max(0, more))
            ones = np.pad(ones, margins, constant_values=1)
            at[axis] = slice(max(0, -low), ones.shape[axis] - max(0, -more))
            ones = ones[tuple(at)]
        missing = [(0, 0), (0, 0), *((0, max(0, h) - max(0, m)) for (_, h), m in zip(op.pads, high))]
        ones = np.pad(ones, missing)
        axes = tuple(range(2, ones.ndim))
        reach = [gap * (taps - 1) + 1 for taps, gap in zip(op.kernel, op.dilations)]
        every = np.lib.stride_tricks.sliding_window_view(ones, reach, axes)
        some = (slice(None), slice(None), *(slice(None, None, s) for s in op.strides))
        seen = every[(*some, *(slice(None, None, gap) for gap in op.dilations))]
    else:
        seen = _taken(ones, op, op.kernel, 0.0)
    return np.maximum(seen.reshape(*seen.shape[: ones.ndim], math.prod(op.kernel)).sum(-1), 1)


def avg_pool(op: Any, x: Array) -> Arrays:
    seen = _taken(x, op, op.kernel, 0.0)
    return [seen.reshape(*seen.shape[: x.ndim], math.prod(op.kernel)).sum(-1) / _counts(op, x.shape[2:])]


def avg_pool_grad(op: Any, g: Array) -> Arrays:
    """Row by row of the matrix that pools one plane."""
    extent = op.shape[2:]
    size = int(np.prod(extent))
    basis = np.eye(size).reshape(1, size, *extent)
    matrix = avg_pool(op, basis)[0].reshape(size, -1)
    with np.errstate(all="ignore"):
        dx = np.zeros((*op.shape[:2], size))
        flat = g.reshape(*g.shape[:2], -1)
        for i, o in zip(*np.nonzero(matrix)):
            dx[..., i] += matrix[i, o] * flat[..., o]
    return [dx.reshape(op.shape)]


def _coordinate(op: Any, o: int, before: int, after: int, scale: float) -> float:
    """Where an output element lies among the inputs, as ONNX's Resize says."""
    exact = scale * before
    if op.coordinate == "align_corners":
        return 0.0 if exact == 1 else o * (before - 1) / (exact - 1)
    if op.coordinate == "asymmetric":
        return o / scale
    if op.coordinate == "pytorch_half_pixel" and after == 1:
        return 0.0
    shift = before / 2 * (1 - after / exact) if op.coordinate == "half_pixel_symmetric" else 0.0
    return (o + 0.5) / scale - 0.5 + shift


def _nearest(x: float, rounding: str) -> int:
    low = math.floor(x)
    up = {"floor": 0, "ceil": x > low, "round_prefer_floor": x - low > 0.5, "round_prefer_ceil": x - low >= 0.5}[
        rounding
    ]
    return low + int(up)


def _weight(op: Any, distance: float) -> float:
    d, a = abs(distance), op.cubic_a
    if op.mode == "linear":
        return max(0.0, 1.0 - d)
    if d <= 1:
        return (a + 2) * d**3 - (a + 3) * d**2 + 1
    return a * d**3 - 5 * a * d**2 + 8 * a * d - 4 * a if d < 2 else 0.0


def _axis_matrix(op: Any, before: int, after: int, scale: float) -> Array:
    """[after, before] weights of one axis: the kernel at all integers, what lies outside at the edge or left out."""
    matrix = np.zeros((after, before))
    squeeze = min(scale, 1.0) if op.antialias else 1.0
    for o in range(after):
        x = _coordinate(op, o, before, after, scale)
        if op.mode == "nearest":
            matrix[o, min(max(_nearest(x, op.rounding), 0), before - 1)] = 1
            continue
        reach = math.ceil(2 / squeeze) + 1
        for i in range(math.floor(x) - reach, math.floor(x) + reach + 1):
            if not (op.exclude_outside and not 0 <= i < before):
                matrix[o, min(max(i, 0), before - 1)] += _weight(op, (i - x) * squeeze)
        if op.exclude_outside or op.antialias:
            matrix[o] /= matrix[o].sum()
    return matrix


def _matrices(op: Any, extents: tuple[int, ...]) -> list[Array]:
    scales = op.scales or [after / before for before, after in zip(extents, op.shape)]
    return [
        np.eye(before) if before == after and scale == 1 else _axis_matrix(op, before, after, scale)
        for before, after, scale in zip(extents, op.shape, scales)
    ]


def resize(op: Any, x: Array) -> Arrays:
    y = x if x.dtype.kind == "f" else x.astype(object)
    for axis, matrix in enumerate(_matrices(op, x.shape)):
        if op.mode == "nearest":
            y = np.take(y, matrix.argmax(1), axis)
        else:
            y = np.moveaxis(np.tensordot(matrix, y, (1, axis)), 0, axis)
    return [y if x.dtype.kind == "f" else y.astype(x.dtype)]


def resize_grad(op: Any, g: Array) -> Arrays:
    for axis, matrix in enumerate(_matrices(op, op.extents)):
        g = np.moveaxis(np.tensordot(matrix.T, g, (1, axis)), 0, axis)
    return [g]

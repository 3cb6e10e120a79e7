"""Images that are read between their elements: point by point, in float64."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

Array = np.ndarray
Arrays = list[np.ndarray]


def _mirror(at: float, low: float, high: float) -> float:
    """Back and forth between two borders."""
    if high == low:
        return low
    while at < low or at > high:
        at = 2 * low - at if at < low else 2 * high - at
    return at


def _keys(d: float) -> float:
    """Keys's cubic kernel with a = -3/4."""
    d, a = abs(d), -0.75
    if d <= 1:
        return (a + 2) * d**3 - (a + 3) * d**2 + 1
    return a * d**3 - 5 * a * d**2 + 8 * a * d - 4 * a if d < 2 else 0.0


def _axis(op: Any, at: float, n: int) -> list[tuple[int, float]]:
    """(element, weight) along an axis; what is outside and zero is left out."""
    low, high = (0.0, n - 1.0) if op.align_corners else (-0.5, n - 0.5)
    at = (at + 1) / 2 * (high - low) + low
    if op.mode == "nearest":
        at = float(np.rint(at))
    if op.padding == "border" and op.mode != "cubic":
        at = min(max(at, 0.0), n - 1.0)
    elif op.padding == "reflection":
        at = _mirror(at, low, high)
    base = math.floor(at)
    taps = {
        "nearest": [(round(at), 1.0)],
        "linear": [(base, base + 1 - at), (base + 1, at - base)],
        "cubic": [(base + i, _keys(at - base - i)) for i in (-1, 0, 1, 2)],
    }[op.mode]
    if op.padding == "zeros":
        return [(i, w) for i, w in taps if 0 <= i < n]
    if op.padding == "reflection":
        taps = [(round(_mirror(i, low, high)), w) for i, w in taps]
    return [(min(max(i, 0), n - 1), w) for i, w in taps]


def grid_sample(op: Any, x: Array, grid: Array) -> Arrays:
    y = np.zeros((*x.shape[:2], *grid.shape[1:-1]))
    for n, *o in np.ndindex(grid.shape[:-1]):
        axes = [_axis(op, float(at), extent) for at, extent in zip(grid[(n, *o)][::-1], x.shape[2:])]
        for corner in itertools.product(*axes):
            weight = math.prod(w for _, w in corner)
            y[(n, slice(None), *o)] += weight * x[(n, slice(None), *(i for i, _ in corner))]
    return [y]


def _corners(x: Array, point: tuple[float, ...]) -> list[Array]:
    """The elements around a point of [C, *S], each times its weight; zeros outside."""
    found = []
    for corner in itertools.product(*([math.floor(at), math.floor(at) + 1] for at in point)):
        weight = math.prod(1 - abs(at - i) for at, i in zip(point, corner))
        inside = all(0 <= i < n for i, n in zip(corner, x.shape[1:]))
        found.append(weight * x[(slice(None), *corner)] if inside else np.zeros(x.shape[0]))
    return found


def roi_align(op: Any, x: Array, regions: Array, images: Array) -> Arrays:
    y = np.zeros((len(images), x.shape[1], *op.shape))
    for r, image in enumerate(images.tolist()):
        low, high = (regions[r][i : i + 2][::-1] * op.scale - 0.5 * op.half_pixel for i in (0, 2))
        extent = high - low if op.half_pixel else np.maximum(high - low, 1.0)
        for i, j in np.ndindex(*op.shape):
            read = []
            for p, q in np.ndindex(op.points, op.points):
                share = (np.array([i, j]) + (np.array([p, q]) + 0.5) / op.points) / op.shape
                point = low + share * extent
                if any(at < -1 or at > n for at, n in zip(point, x.shape[2:])):
                    read.append([np.zeros(x.shape[1])] * 4)
                else:
                    inside = tuple(min(max(at, 0.0), n - 1.0) for at, n in zip(point, x.shape[2:]))
                    read.append(_corners(x[image], inside))
            y[r, :, i, j] = np.mean([sum(four) for four in read], 0) if op.how == "mean" else np.max(read, (0, 1))
    return [y]


def deform_conv(op: Any, x: Array, w: Array, offset: Array, *mask: Array) -> Arrays:
    n, axes, kernel, positions = len(x), x.ndim - 2, w.shape[2:], offset.shape[2:]
    split, taps = x.shape[1] // op.offset_groups, math.prod(kernel)
    moved = offset.reshape(n, op.offset_groups, taps, axes, *positions)
    masks = mask[0].reshape(n, op.offset_groups, taps, *positions) if mask else None
    y = np.zeros((n, w.shape[0], *positions))
    per_group = w.shape[0] // op.groups
    for i, g, (k, tap) in itertools.product(range(n), range(op.offset_groups), enumerate(np.ndindex(*kernel))):
        for o in np.ndindex(*positions):
            point = tuple(
                float(o[a] * op.strides[a] - op.pads[a][0] + tap[a] * op.dilations[a] + moved[(i, g, k, a, *o)])
                for a in range(axes)
            )
            read = np.sum(_corners(x[i, g * split : (g + 1) * split], point), 0)
            if masks is not None:
                read = read * masks[(i, g, k, *o)]
            for c, value in enumerate(read, g * split):
                group, inner = divmod(c, w.shape[1])
                outs = slice(group * per_group, (group + 1) * per_group)
                y[(i, outs, *o)] += w[(outs, inner, *tap)] * value
    return [y]

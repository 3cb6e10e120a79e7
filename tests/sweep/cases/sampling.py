"""Drawn images that are read between their elements. Values are ordinary: what zeros outside are times NaN is open."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random

from foreplan.graph import as_dtype
from foreplan.graph.types import Shape
from foreplan.ops.deform_conv import DeformConv
from foreplan.ops.grid_sample import PADDINGS, TERMS, GridSample
from foreplan.ops.roi_align import RoiAlign
from tests.sweep.case import Case
from tests.sweep.draws import float_type, indices, plain


def _extents(rng: Random, axes: int, most: int) -> Shape:
    return tuple(rng.choice([n for n in (1, 2, 3, 4, 5, 7) if n <= most]) for _ in range(axes))


def grid_sample(rng: Random, small: bool = False) -> Case:
    """One to three axes; grids that reach beyond the borders."""
    axes = rng.choice([1, 2, 2, 2, 3])
    mode = rng.choice([mode for mode in TERMS if mode != "cubic" or axes < 3 - small])
    n, dtype = rng.choice([1, 2]), float_type(rng)
    x = (n, rng.choice([1, 2, 5]), *_extents(rng, axes, 7 if axes < 3 else 3))
    grid = (n, *_extents(rng, axes, 4 if axes < 3 else 2), axes)
    op = GridSample(mode, rng.choice(PADDINGS), rng.random() < 0.5)
    return Case(op, (plain(rng, dtype, x), plain(rng, dtype if mode != "nearest" else as_dtype("float32"), grid)))


def few_taps_grid_sample(rng: Random) -> Case:
    """Of few nodes, to be differentiated."""
    return grid_sample(rng, small=True)


def roi_align(rng: Random, points: Sequence[int] = (1, 2, 3)) -> Case:
    """Regions of ordinary numbers: some outside, some inside out."""
    dtype, count = float_type(rng), rng.choice([1, 2, 4])
    x = (rng.choice([1, 2]), rng.choice([1, 3]), *_extents(rng, 2, 7))
    how = rng.choice(["mean", "mean", "max"])
    op = RoiAlign(_extents(rng, 2, 3), rng.choice(points), how, rng.choice([1.0, 0.5, 2.5]), rng.random() < 0.5)
    regions = plain(rng, as_dtype("float64" if dtype.name == "float64" else "float32"), (count, 4))
    return Case(op, (plain(rng, dtype, x), regions, indices(rng, (count,), 0, x[0])))


def few_points_roi_align(rng: Random) -> Case:
    """Of few nodes, to be differentiated."""
    return roi_align(rng, points=(1,))


def few_taps_deform_conv(rng: Random) -> Case:
    """Of few nodes, to be differentiated."""
    return deform_conv(rng, kernel=rng.choice([(1,), (2,), (1, 1), (2, 1)]))


def deform_conv(rng: Random, kernel: Shape | None = None) -> Case:
    """One or two axes, with and without masks and groups."""
    kernel = kernel or _extents(rng, rng.choice([1, 2, 2]), 3)
    axes, split, groups = len(kernel), rng.choice([1, 1, 2]), rng.choice([1, 1, 2])
    channels = math.lcm(split, groups) * rng.choice([1, 2])
    strides, dilations = _extents(rng, axes, 2), _extents(rng, axes, 2)
    pads = tuple((rng.choice([0, 1]), rng.choice([0, 1, 2])) for _ in kernel)
    least = [gap * (taps - 1) + 1 - sum(pad) for taps, gap, pad in zip(kernel, dilations, pads)]
    extents = tuple(max(1, n) + rng.choice([0, 1, 3]) for n in least)
    masked, dtype, n = rng.random() < 0.5, float_type(rng), rng.choice([1, 2])
    op = DeformConv(strides, pads, dilations, groups, split, masked)
    x, w = (n, channels, *extents), (groups * rng.choice([1, 2]), channels // groups, *kernel)
    positions = tuple(
        (extent + sum(pad) - gap * (taps - 1) - 1) // step + 1
        for extent, pad, gap, taps, step in zip(extents, pads, dilations, kernel, strides)
    )
    taps = split * math.prod(kernel)
    shapes = [x, w, (n, taps * axes, *positions), *[(n, taps, *positions)] * masked]
    return Case(op, tuple(plain(rng, dtype, shape) for shape in shapes))

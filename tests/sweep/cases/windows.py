"""Drawn convolutions, poolings and resizings."""

from __future__ import annotations

import math
from dataclasses import fields
from random import Random

from foreplan.graph import TensorType, as_dtype
from foreplan.graph.types import Shape
from foreplan.ops.conv.mapped import ConvMap
from foreplan.ops.conv.ops import Conv, ConvDataGrad, ConvWeightGrad
from foreplan.ops.interpolation import COORDINATES, MODES, ROUNDINGS
from foreplan.ops.pool import AvgPool, AvgPoolGrad, MaxPool, MaxPoolGrad
from foreplan.ops.resize import Resize, ResizeGrad
from foreplan.ops.window import Pads
from tests.sweep.case import Case
from tests.sweep.draws import any_type, extent, float_type, given, indices, plain

# What images hold beside ordinary numbers. Weights are finite: what padding times an infinite weight is, is open.
IMAGES = ("tiny", "huge", "nonfinite")
FINITE = ("tiny", "huge")


def _windows(rng: Random, axes: int, negative: bool = True) -> tuple[Shape, Shape, Shape, Pads, Shape]:
    """Extent, kernel, strides, pads and dilations of windows that fit."""
    extents, kernel, strides, pads, dilations = [], [], [], [], []
    alike = rng.random() < 0.25  # as most networks have them: 3 x 3 or 1 x 1, the same along all axes
    taps, stride = rng.choice([1, 3]), rng.choice([1, 1, 2])
    for _ in range(axes):
        kernel.append(taps if alike else rng.choice([1, 1, 2, 3, 3, 4, 5]))
        strides.append(stride if alike else rng.choice([1, 1, 2, 2, 3]))
        dilations.append(1 if alike else rng.choice([1, 1, 1, 2, 3]))
        low, high = (rng.choice([0, 0, 1, 1, 2, 3]) for _ in range(2))
        if negative and rng.random() < 0.08:
            low = -rng.randint(1, 2)
        if negative and rng.random() < 0.08:
            high = -rng.randint(1, 2)
        pads.append((low, high))
        needed = dilations[-1] * (kernel[-1] - 1) + 1 - low - high
        extents.append(
            max(1, -low, -high, needed) + rng.choice([0, 0, 1, 2, 3, 5, 8, 11] if axes < 3 else [0, 1, 2, 4])
        )
    return tuple(extents), tuple(kernel), tuple(strides), tuple(pads), tuple(dilations)


def _channels(rng: Random) -> tuple[int, int, int]:
    """Channels in, channels out, groups: none, some, or each channel by itself."""
    way = rng.random()
    if way < 0.6:
        return rng.choice([1, 2, 3, 4, 8, 16, 17, 24, 32]), rng.choice([1, 2, 3, 5, 8, 16, 20, 32]), 1
    if way < 0.8:
        groups = rng.choice([2, 3, 4])
        return groups * rng.choice([1, 2, 3, 8]), groups * rng.choice([1, 2, 4]), groups
    groups = rng.choice([2, 3, 5, 8, 16])
    return groups, groups * rng.choice([1, 1, 2]), groups


def _geometry(rng: Random) -> tuple[TensorType, TensorType, TensorType, Conv]:
    """Types of images, weights and results, and the convolution."""
    extents, kernel, *rest = _windows(rng, rng.choice([1, 2, 2, 2, 2, 3]))
    channels, results, groups = _channels(rng)
    op, dtype = Conv(*rest, groups), float_type(rng)
    x = TensorType(dtype, (rng.choice([1, 1, 2, 3, 5]), channels, *extents))
    w = TensorType(dtype, (results, channels // groups, *kernel))
    return x, w, op.infer([x, w])[0], op


def conv(rng: Random) -> Case:
    """A convolution, alone, with a bias, or added to something."""
    x, w, y, op = _geometry(rng)
    more = rng.choice([[], [w.shape[:1]], [y.shape]])
    wide = len(more) == 1 and len(more[0]) == 1 and rng.random() < 0.3
    added = [plain(rng, y.dtype.wide if wide else y.dtype, each) for each in more]
    return Case(
        op, (given(rng, x.dtype, x.shape, strange=IMAGES), given(rng, w.dtype, w.shape, strange=FINITE), *added)
    )


def conv_data_grad(rng: Random) -> Case:
    """Its data gradient."""
    x, w, y, op = _geometry(rng)
    more = [plain(rng, x.dtype, x.shape)] * (rng.random() < 0.4)
    of = ConvDataGrad(*op.geometry, spatial=x.shape[2:])
    return Case(of, (given(rng, y.dtype, y.shape, strange=FINITE), given(rng, w.dtype, w.shape, strange=FINITE), *more))


def conv_weight_grad(rng: Random) -> Case:
    """Its weight gradient."""
    x, w, y, op = _geometry(rng)
    of = ConvWeightGrad(*op.geometry, kernel=w.shape[2:], wide=rng.random() < 0.5)
    (result,) = of.infer([x, y])
    more = [plain(rng, result.dtype, result.shape)] * (rng.random() < 0.4)
    return Case(of, (given(rng, x.dtype, x.shape, strange=FINITE), given(rng, y.dtype, y.shape, strange=FINITE), *more))


def conv_map(rng: Random) -> Case:
    """A convolution and a chain of steps."""
    x, w, y, op = _geometry(rng)
    expr, further, biased = "a0", [], rng.random() < 0.5
    vectors = [(y.shape[1], *(1 for _ in y.shape[2:])), (1, y.shape[1], *(1 for _ in y.shape[2:]))]
    for i in range(rng.randint(0, 3)):
        operation, whole = rng.choice("+-*"), rng.random() < 0.3
        narrow = whole or rng.random() < 0.6
        further.append(plain(rng, y.dtype if narrow else y.dtype.wide, y.shape if whole else rng.choice(vectors)))
        expr = f"({expr} {operation} a{i + 1})"
    expr = f"relu({expr})" if expr == "a0" or rng.random() < 0.5 else expr
    of = ConvMap(*op.geometry, expr, biased)
    bias = [plain(rng, w.dtype.wide if rng.random() < 0.3 else w.dtype, w.shape[:1])] * biased
    return Case(of, (given(rng, x.dtype, x.shape, strange=()), plain(rng, w.dtype, w.shape), *bias, *further))


def _pooled(rng: Random) -> tuple[Shape, tuple[Shape, Shape, Pads, Shape]]:
    extents, kernel, strides, pads, dilations = _windows(rng, rng.choice([1, 2, 2, 2, 3]))
    return (rng.choice([1, 2, 3]), rng.choice([1, 2, 3, 8, 16, 17]), *extents), (kernel, strides, pads, dilations)


def max_pool(rng: Random) -> Case:
    """The largest of each window, of floats and integers."""
    shape, attributes = _pooled(rng)
    dtype = float_type(rng) if rng.random() < 0.85 else as_dtype(rng.choice(["int8", "uint8", "int32", "int64"]))
    return Case(MaxPool(*attributes, save_index=rng.random() < 0.5), (given(rng, dtype, shape),))


def max_pool_grad(rng: Random) -> Case:
    """Its gradient, from places."""
    shape, attributes = _pooled(rng)
    op = MaxPoolGrad(*attributes, shape)
    y = op.pooled(TensorType(float_type(rng), shape))
    index = MaxPool(*attributes).index_dtype
    places = indices(rng, y.shape, 0, math.prod(op.kernel))
    places = type(places)(TensorType(index, y.shape), places.values, places.seed, places.lies)
    return Case(op, (places, given(rng, y.dtype, y.shape, strange=IMAGES)))


def _mean(rng: Random) -> tuple[Shape, tuple[Shape, Shape, Pads, Shape, bool, Shape]]:
    shape, (kernel, strides, pads, dilations) = _pooled(rng)
    beyond = tuple(rng.randint(0, max(0, high)) for _, high in pads) if rng.random() < 0.3 else ()
    return shape, (kernel, strides, pads, dilations, rng.random() < 0.5, beyond)


def avg_pool(rng: Random) -> Case:
    """The mean of each window."""
    shape, attributes = _mean(rng)
    return Case(AvgPool(*attributes), (given(rng, float_type(rng), shape, strange=IMAGES),))


def avg_pool_grad(rng: Random) -> Case:
    """Its gradient."""
    shape, attributes = _mean(rng)
    op = AvgPoolGrad(*attributes, shape)
    y = op.pooled(TensorType(float_type(rng), shape))
    return Case(op, (given(rng, y.dtype, y.shape, strange=IMAGES),))


def _resized(rng: Random) -> tuple[Shape, Resize]:
    rank = rng.randint(1, 4)
    before = tuple(extent(rng, 8) for _ in range(rank))
    after = tuple(n if rng.random() < 0.4 else rng.choice([1, 2, 3, 5, 7, 8, 11]) for n in before)
    scales = tuple(b / a * rng.choice([1, 1, 0.9, 1.1]) for a, b in zip(before, after)) if rng.random() < 0.3 else ()
    mode = rng.choice(MODES)
    return before, Resize(
        after,
        mode,
        rng.choice(COORDINATES),
        scales,
        rng.choice(ROUNDINGS),
        rng.choice([-0.75, -0.5]),
        not scales and rng.random() < 0.3,  # of a coordinate far outside, nothing would be left
        mode != "nearest" and rng.random() < 0.3,
    )


def resize(rng: Random) -> Case:
    """Interpolation, of integers too where it is nearest."""
    before, op = _resized(rng)
    dtype = any_type(rng) if op.mode == "nearest" else float_type(rng)
    return Case(op, (given(rng, dtype, before, strange=("tiny",)),))


def resize_grad(rng: Random) -> Case:
    """Its gradient."""
    before, op = _resized(rng)
    of = ResizeGrad(*(getattr(op, field.name) for field in fields(op)), extents=before)
    return Case(of, (given(rng, float_type(rng), op.shape, strange=("tiny",)),))

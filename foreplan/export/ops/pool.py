"""Pooling and its gradients."""

from __future__ import annotations

import math

import numpy as np

from foreplan.export.emitter import Emitter
from foreplan.export.table import writes
from foreplan.graph import DType, TensorType
from foreplan.graph.types import INT64, Shape
from foreplan.ops.conv.ops import Conv, ConvDataGrad
from foreplan.ops.pool import AvgPool, AvgPoolGrad, MaxPool, MaxPoolGrad


@writes(MaxPool)
def _max_pool(e: Emitter, op: MaxPool, x: list[str], types: list[TensorType]) -> list[str]:
    (image,), (type,), pads = x, types, op.pads
    beside = _is_beside(op)
    if beside:
        ends = [0, 0, *(low for low, _ in pads), 0, 0, *(high for _, high in pads)]
        image = e.op("Pad", image, e.ints(ends), e.scalar(_lowest(type.dtype), type.dtype), mode="constant")
        grown = tuple(low + extent + high for extent, (low, high) in zip(type.shape[2:], pads))
        type, pads = type.with_shape((*type.shape[:2], *grown)), tuple((0, 0) for _ in pads)
    y, *places = e.node(
        "MaxPool",
        [image],
        2 if op.save_index else 1,
        kernel_shape=list(op.kernel),
        strides=list(op.strides),
        dilations=list(op.dilations),
        pads=[low for low, _ in pads] + [high for _, high in pads],
    )
    if beside and type.dtype.is_float:  # ONNX Runtime's largest of padding alone is finite
        lowest = float(np.finfo(type.dtype.numpy).min)
        y = e.op("Where", e.op("Equal", y, e.scalar(lowest, type.dtype)), e.scalar(-math.inf, type.dtype), y)
    if not places:
        return [y]
    extents = type.shape[2:]
    flat = e.op("Mod", places[0], e.scalar(math.prod(extents), INT64))
    tap = None
    for axis, ((low, _), step, gap) in enumerate(zip(pads, op.strides, op.dilations)):
        at = _digit(e, flat, extents, axis)
        starts = np.arange(op.windows(types[0].shape[2:]).positions[axis]) * step - low
        at = e.op("Sub", at, _along(e, starts, axis, len(extents)))
        at = e.op("Div", at, e.scalar(gap, INT64)) if gap > 1 else at
        at = _times(e, at, math.prod(op.kernel[axis + 1 :]))
        tap = at if tap is None else e.op("Add", tap, at)
    assert tap is not None
    return [y, e.cast(tap, INT64, op.index_dtype)]


def _is_beside(op: MaxPool | AvgPool) -> bool:
    """Whether a window may lie on padding alone, or padding takes elements away: ONNX Runtime takes neither."""
    return any(max(pair) >= taps or min(pair) < 0 for pair, taps in zip(op.pads, op.kernel))


def _lowest(dtype: DType) -> float:
    return -math.inf if dtype.is_float else 0 if dtype.name == "bool" else int(np.iinfo(dtype.numpy).min)


def _digit(e: Emitter, flat: str, extents: Shape, axis: int) -> str:
    """The index along one axis, of an index in C order."""
    inner = math.prod(extents[axis + 1 :])
    flat = e.op("Div", flat, e.scalar(inner, INT64)) if inner > 1 else flat
    return e.op("Mod", flat, e.scalar(extents[axis], INT64)) if axis else flat


def _times(e: Emitter, x: str, number: int) -> str:
    return x if number == 1 else e.op("Mul", x, e.scalar(number, INT64))


def _along(e: Emitter, numbers: np.ndarray, axis: int, axes: int) -> str:
    """A number for each position along one of the spatial axes."""
    return e.constant(numbers.astype(np.int64).reshape(-1, *[1] * (axes - 1 - axis)))


@writes(MaxPoolGrad)
def _max_pool_grad(e: Emitter, op: MaxPoolGrad, x: list[str], types: list[TensorType]) -> list[str]:
    """Each gradient is added at its tap's place; one whose tap lies on padding goes nowhere."""
    extents, positions, g = op.shape[2:], types[1].shape[2:], x[1]
    index, own = e.cast(x[0], types[0].dtype, INT64), types[1].dtype
    flat = inside = None
    for axis, ((low, _), step, gap) in enumerate(zip(op.pads, op.strides, op.dilations)):
        at = _times(e, _digit(e, index, op.kernel, axis), gap)
        at = e.op("Add", at, _along(e, np.arange(positions[axis]) * step - low, axis, len(extents)))
        if any(op.pads[axis]):
            last = e.scalar(extents[axis] - 1, INT64)
            kept = e.op("Max", e.op("Min", at, last), e.scalar(0, INT64))
            right = e.op("Equal", at, kept)
            at, inside = kept, right if inside is None else e.op("And", inside, right)
        at = _times(e, at, math.prod(extents[axis + 1 :]))
        flat = at if flat is None else e.op("Add", flat, at)
    assert flat is not None
    g = g if inside is None else e.op("Where", inside, g, e.scalar(0, own))
    planes, windows, size = op.shape[0] * op.shape[1], math.prod(positions), math.prod(extents)
    zeros = e.zeros(TensorType(own.wide, (planes, size)))
    rows = e.reshape(e.cast(g, own, own.wide), (planes, windows))
    dx = e.op("ScatterElements", zeros, e.reshape(flat, (planes, windows)), rows, axis=1, reduction="add")
    return [e.cast(e.reshape(dx, op.shape), own.wide, own)]


@writes(AvgPool)
def _avg_pool(e: Emitter, op: AvgPool, x: list[str], types: list[TensorType]) -> list[str]:
    own = types[0].dtype
    if not (_is_beside(op) or any(op.beyond) or any(gap > 1 for gap in op.dilations)):
        pads = [low for low, _ in op.pads] + [high for _, high in op.pads]
        counted = int(op.count_include_pad) or None
        taps, steps = list(op.kernel), list(op.strides)
        return [e.op("AveragePool", x[0], kernel_shape=taps, strides=steps, pads=pads, count_include_pad=counted)]
    type = types[0].with_dtype(own.wide)
    planes = type.with_shape((type.shape[0] * type.shape[1], 1, *type.shape[2:]))
    ones, of_ones = _ones(e, op, type)
    conv = Conv(op.strides, op.pads, op.dilations)
    (sums,) = e.apply(conv, [e.reshape(e.cast(x[0], own, own.wide), planes.shape), ones], [planes, of_ones])
    sums = e.reshape(sums, op.infer(types)[0].shape)
    return [e.cast(_divided(e, op, sums, type), own.wide, own)]


@writes(AvgPoolGrad)
def _avg_pool_grad(e: Emitter, op: AvgPoolGrad, x: list[str], types: list[TensorType]) -> list[str]:
    own, (n, c, *spatial) = types[0].dtype, op.shape
    type = types[0].with_dtype(own.wide)
    shares = _divided(e, op, e.cast(x[0], own, own.wide), type.with_shape(op.shape))
    ones, of_ones = _ones(e, op, type)
    planes = type.with_shape((n * c, 1, *type.shape[2:]))
    back = ConvDataGrad(op.strides, op.pads, op.dilations, spatial=tuple(spatial))
    (dx,) = e.apply(back, [e.reshape(shares, planes.shape), ones], [planes, of_ones])
    return [e.cast(e.reshape(dx, op.shape), own.wide, own)]


def _ones(e: Emitter, op: AvgPool | AvgPoolGrad, type: TensorType) -> tuple[str, TensorType]:
    """The kernel that adds up a window of one channel."""
    kernel = type.with_shape((1, 1, *op.kernel))
    return e.constant(np.ones(kernel.shape, type.dtype.numpy)), kernel


def _divided(e: Emitter, op: AvgPool | AvgPoolGrad, sums: str, images: TensorType) -> str:
    """Sums of windows over images of a type, divided by the numbers of taps that count."""
    windows = op.windows(images.shape[2:])
    shares = np.ones(windows.positions)
    op.divide(shares, windows, tuple(0 for _ in windows.positions), windows.positions)
    return e.op("Mul", sums, e.constant(shares.astype(images.dtype.numpy)))

"""Products, convolutions and what is linear like them: interpolation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from foreplan.export.emitter import Emitter, ends_of
from foreplan.export.table import writes
from foreplan.graph import TensorType
from foreplan.graph.types import FLOAT32, DType, Shape
from foreplan.ops.conv.common import ConvOp
from foreplan.ops.conv.mapped import ConvMap
from foreplan.ops.conv.ops import Conv, ConvDataGrad, ConvWeightGrad
from foreplan.ops.interpolation import Table
from foreplan.ops.matmul import MatMul
from foreplan.ops.matmul_map import MatMulMap
from foreplan.ops.resize import Resize, ResizeGrad
from foreplan.ops.window import Pads


@writes(MatMul)
def _matmul(e: Emitter, op: MatMul, x: list[str], types: list[TensorType]) -> list[str]:
    own, result = types[0].dtype, op.infer(types)[0].dtype
    a, b = (e.cast(each, own, result) for each in x[:2])
    turns = op.transpose_a or op.transpose_b
    if types[0].rank == types[1].rank == 2 and own.is_float and (turns or len(x) > 2):
        flags = {"transA": int(op.transpose_a) or None, "transB": int(op.transpose_b) or None}
        return [e.op("Gemm", a, b, *x[2:], **flags)]
    a = _turned(e, a, types[0].rank) if op.transpose_a else a
    b = _turned(e, b, types[1].rank) if op.transpose_b else b
    y = e.op("MatMul", a, b)
    return [e.op("Add", y, x[2]) if len(x) > 2 else y]


def _turned(e: Emitter, x: str, rank: int) -> str:
    return e.transpose(x, [*range(rank - 2), rank - 1, rank - 2])


@writes(MatMulMap)
def _matmul_map(e: Emitter, op: MatMulMap, x: list[str], types: list[TensorType]) -> list[str]:
    product = e.apply(op.matmul, x[:2], types[:2])
    return e.apply(op.map, [*product, *x[2:]], [*op.matmul.infer(types[:2]), *types[2:]])


@writes(Conv)
def _conv(e: Emitter, op: Conv, x: list[str], types: list[TensorType]) -> list[str]:
    image, pads = _cropped(e, op, x[0], types[0])
    rank, own = types[0].rank, types[0].dtype
    bias = [e.cast(x[2], types[2].dtype, own)] if len(x) > 2 and types[2].rank == 1 else []
    y = e.op("Conv", image, x[1], *bias, pads=ends_of(pads), **_geometry(op))
    return [e.op("Add", y, x[2]) if len(x) > 2 and types[2].rank == rank else y]


@writes(ConvMap)
def _conv_map(e: Emitter, op: ConvMap, x: list[str], types: list[TensorType]) -> list[str]:
    product = e.apply(op.conv, x[: op.own], types[: op.own])
    return e.apply(op.map, [*product, *x[op.own :]], [*op.conv.infer(types[: op.own]), *types[op.own :]])


def _geometry(op: ConvOp) -> dict[str, object]:
    return {"strides": list(op.strides), "dilations": list(op.dilations), "group": op.groups}


def _cropped(e: Emitter, op: ConvOp, x: str, type: TensorType) -> tuple[str, Pads]:
    """The images without what negative padding takes away, and the padding that is left."""
    if all(low >= 0 and high >= 0 for low, high in op.pads):
        return x, op.pads
    taken = [(min(0, low), min(0, high)) for low, high in op.pads]
    return _padded(e, x, type.dtype, taken), tuple((max(0, low), max(0, high)) for low, high in op.pads)


def _padded(e: Emitter, x: str, dtype: DType, pads: Sequence[tuple[int, int]]) -> str:
    """Images with zeros around them, or with less."""
    if not any(low or high for low, high in pads):
        return x
    ends = [0, 0, *(low for low, _ in pads), 0, 0, *(high for _, high in pads)]
    return e.op("Pad", x, e.ints(ends), e.scalar(0, dtype), mode="constant")


@writes(ConvDataGrad)
def _conv_data_grad(e: Emitter, op: ConvDataGrad, x: list[str], types: list[TensorType]) -> list[str]:
    g, kernel = types[0], types[1].shape[2:]
    whole = tuple(
        step * (count - 1) + gap * (taps - 1) + 1
        for step, count, gap, taps in zip(op.strides, g.shape[2:], op.dilations, kernel)
    )
    more = [n + low + high - full for n, (low, high), full in zip(op.spatial, op.pads, whole)]
    plain = all(low >= 0 and high >= 0 for low, high in op.pads)
    if plain and all(0 <= extra < step for extra, step in zip(more, op.strides)):
        pads, extra = ends_of(op.pads), more if any(more) else None
        dx = e.op("ConvTranspose", x[0], x[1], pads=pads, output_padding=extra, **_geometry(op))
    else:
        dx = e.op("ConvTranspose", x[0], x[1], **_geometry(op))
        dx = _padded(e, dx, g.dtype, [(-low, extra - high) for (low, high), extra in zip(op.pads, more)])
    return [e.op("Add", dx, x[2]) if len(x) > 2 else dx]


@writes(ConvWeightGrad)
def _conv_weight_grad(e: Emitter, op: ConvWeightGrad, x: list[str], types: list[TensorType]) -> list[str]:
    """A convolution of the images with the gradients: items are its channels, strides its dilations. Sums are wide."""
    own, wide, result = types[0].dtype, types[0].dtype.wide, op.infer(types)[0].dtype
    image, pads = _cropped(e, op, e.cast(x[0], own, wide), types[0].with_dtype(wide))
    (n, c, *extents), (_, k, *positions), groups = types[0].shape, types[1].shape, op.groups
    for axis, (low, high) in enumerate(op.pads):
        extents[axis] += min(0, low) + min(0, high)
    image = _items_last(e, image, (n, groups, c // groups, *extents), (2, 1, 0), (c // groups, groups * n, *extents))
    g = _items_last(e, e.cast(x[1], own, wide), (n, groups, k // groups, *positions), (1, 2, 0), (k, n, *positions))
    dw = e.op(
        "Conv",
        image,
        g,
        pads=ends_of(pads),
        strides=list(op.dilations),
        dilations=list(op.strides),
        group=groups,
    )
    axes = range(2, types[0].rank)
    dw = e.op("Slice", dw, e.ints([0 for _ in axes]), e.ints(op.kernel), e.ints(axes))
    dw = e.cast(e.transpose(dw, [1, 0, *axes]), wide, result)
    return [e.op("Add", dw, x[2]) if len(x) > 2 else dw]


def _items_last(e: Emitter, x: str, split: Shape, perm: tuple[int, ...], shape: Shape) -> str:
    """[N, groups · channels, *S] with the axis of items behind that of channels, groups where `perm` puts them."""
    x = e.reshape(x, split)
    return e.reshape(e.transpose(x, [*perm, *range(3, len(split))]), shape)


@writes(Resize)
def _resize(e: Emitter, op: Resize, x: list[str], types: list[TensorType]) -> list[str]:
    return [_interpolated(e, x[0], types[0], op.tables(types[0].shape))]


@writes(ResizeGrad)
def _resize_grad(e: Emitter, op: ResizeGrad, x: list[str], types: list[TensorType]) -> list[str]:
    tables = {axis: table.transposed for axis, table in op.tables(op.extents).items()}
    return [_interpolated(e, x[0], types[0], tables)]


def _interpolated(e: Emitter, x: str, type: TensorType, tables: dict[int, Table]) -> str:
    """Axis by axis: a product with the matrix of weights, or elements picked where all weights are 1."""
    own, rank = type.dtype, type.rank
    wide = own.wide if own.is_float else FLOAT32
    for axis, table in tables.items():
        if table.weights is None:
            x = e.op("Gather", x, e.constant(table.indices[0]), axis=axis)
            continue
        matrix = np.zeros((table.inputs, table.indices.shape[1]))
        np.add.at(matrix, (table.indices, np.arange(table.indices.shape[1])[None]), table.weights)
        perm = [*range(axis), *range(axis + 1, rank), axis]
        rows = e.transpose(e.cast(x, own, wide), perm)
        rows = e.op("MatMul", rows, e.constant(matrix.astype(wide.numpy)))
        x = e.cast(e.transpose(rows, [perm.index(i) for i in range(rank)]), wide, own)
    return x

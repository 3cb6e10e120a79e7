"""The NumPy kernels of convolution on elements narrower than float32: columns, products and sums are float32, and each
element of a result is rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from foreplan.graph import TensorType
from foreplan.graph.types import types_of
from foreplan.ops.blocks import Piece, carve
from foreplan.ops.conv.kernels import (
    Blocking,
    add_product,
    blocking,
    columns_of,
    gathered,
    grouped,
    grouped_weights,
    product_bytes,
)
from foreplan.ops.window import Windows, spatial_size

IMAGE_BYTES = 4 << 20  # some channels of an image, in float32, that gradients are added to

WIDE = np.dtype(np.float32)
Types = tuple[TensorType, TensorType, TensorType]
Part = tuple[slice, slice, slice]  # groups, channels within each, and all of these channels among the image's


def _blocking(x: TensorType, w: TensorType, y: TensorType) -> Blocking:
    return blocking(*(type.with_dtype(type.dtype.wide) for type in (x, w, y)))


def _types(x: np.ndarray, w: np.ndarray, y: np.ndarray) -> Types:
    first, second, third = types_of(x, w, y)
    return first, second, third


def _elements(nbytes: int) -> int:
    return nbytes // WIDE.itemsize


def conv_pieces(x: TensorType, w: TensorType, y: TensorType) -> list[Piece]:
    """Scratch of `narrow_conv`: the weights, columns of a block and their product."""
    plan = _blocking(x, w, y)
    return [((w.size,), WIDE), ((_elements(plan.column_bytes),), WIDE), ((_elements(plan.row_bytes),), WIDE)]


def narrow_conv(
    windows: Windows, groups: int, x: np.ndarray, w: np.ndarray, y: np.ndarray, workspace: np.ndarray
) -> Iterator[tuple[np.ndarray, slice, slice]]:
    """Products of weights and columns, block by block: (product [items, K, positions], items, positions).

    The caller finishes each product in place; then it is rounded and written.
    """
    types = _types(x, w, y)
    plan = _blocking(*types)
    weights, memory, aside = carve(workspace, *conv_pieces(*types))
    matrix = weights.reshape(grouped_weights(w, groups).shape)
    np.copyto(matrix, grouped_weights(w, groups))
    outputs = grouped(y, 1)[:, 0]
    for items, box in plan.walk(windows, len(x)):
        columns = gathered(windows, groups, x[items], box, memory)
        rows = aside[: w.shape[0] * columns.shape[2]].reshape(groups, -1, columns.shape[2])
        np.matmul(matrix, columns, out=rows)
        positions = slice(box.start, box.stop)
        product = rows.reshape(w.shape[0], items.stop - items.start, -1).swapaxes(0, 1)
        yield product, items, positions
        outputs[items, :, positions] = product


def data_grad_pieces(dx: TensorType, w: TensorType, g: TensorType, groups: int) -> list[Piece]:
    """Scratch of `narrow_data_grad`: the weights, columns of a block, its gradients, and channels of some images."""
    plan = _blocking(dx, w, g)
    _, _, channels = next(_parts(dx, plan, groups))
    image = (channels.stop * plan.images * spatial_size(dx.shape),)
    return [*conv_pieces(dx, w, g), (image, WIDE)]


def _parts(dx: TensorType, plan: Blocking, groups: int) -> Iterator[Part]:
    """Ranges of channels, the first one the largest: whole groups, or a range within one."""
    each = dx.shape[1] // groups
    most = max(1, IMAGE_BYTES // max(1, plan.images * spatial_size(dx.shape) * WIDE.itemsize))
    together, channels = max(1, min(groups, most // each)), min(each, most)
    for group in range(0, groups, together):
        last = min(groups, group + together)
        for c in range(0, each, channels):
            end = min(each, c + channels)
            yield slice(group, last), slice(c, end), slice(group * each + c, (last - 1) * each + end)


def narrow_data_grad(
    windows: Windows,
    groups: int,
    dx: np.ndarray,
    w: np.ndarray,
    g: np.ndarray,
    base: np.ndarray | None,
    workspace: np.ndarray,
) -> None:
    """dx = weightsᵀ · gradients, added tap by tap into some channels of an image (+ base).

    Args:
        base: the tensor that dx is added to; may be dx itself.
    """
    types = _types(dx, w, g)
    plan, taps, inner = _blocking(*types), math.prod(w.shape[2:]), w.shape[0] // groups
    weights, memory, aside, images = carve(workspace, *data_grad_pieces(*types, groups))
    matrix = weights.reshape(groups, -1, inner)  # transposed: [groups, C/groups · taps, K/groups]
    np.copyto(matrix, grouped_weights(w, groups).swapaxes(1, 2))
    grads = grouped(g, groups)
    for n in range(0, len(g), plan.images):
        items = slice(n, min(n + plan.images, len(g)))
        count = items.stop - n
        for chosen, within, channels in _parts(types[0], plan, groups):
            shape = (channels.stop - channels.start, count, *dx.shape[2:])
            image = images[: math.prod(shape)].reshape(shape)
            image.fill(0)
            part = matrix[chosen, within.start * taps : within.stop * taps]
            for box in windows.boxes(plan.positions):
                source = grads[items, chosen, :, box.start : box.stop].transpose(1, 2, 0, 3)
                columns = columns_of(windows, shape[0], count, box, memory)
                np.matmul(part, _rows(source, aside), out=columns.reshape(*part.shape[:2], -1))
                for i, inside, there in windows.reached(box):
                    image[(..., *there)] += columns[(slice(None), i, Ellipsis, *inside)]
            if base is not None:
                image += base[items, channels].swapaxes(0, 1)
            dx[items, channels] = image.swapaxes(0, 1)


def _rows(source: np.ndarray, memory: np.ndarray) -> np.ndarray:
    """Gradients [groups, K/groups, items, positions] widened, the last two axes joined."""
    rows = memory[: source.size].reshape(source.shape)
    np.copyto(rows, source)
    return rows.reshape(*source.shape[:2], -1)


def weight_grad_pieces(x: TensorType, dw: TensorType, g: TensorType, groups: int) -> list[Piece]:
    """Scratch of `narrow_weight_grad`: columns of a block, its gradients, its product, and the sum if dw is narrow."""
    plan, wide = _blocking(x, dw, g), dw.with_dtype(dw.dtype.wide)
    total = 0 if wide == dw else dw.size
    nbytes = (plan.column_bytes, plan.row_bytes, product_bytes(wide, groups))
    return [*(((_elements(each),), WIDE) for each in nbytes), ((total,), WIDE)]


def narrow_weight_grad(
    windows: Windows,
    groups: int,
    x: np.ndarray,
    dw: np.ndarray,
    g: np.ndarray,
    base: np.ndarray | None,
    workspace: np.ndarray,
) -> None:
    """dw = Σ gradients · columnsᵀ over blocks (+ base).

    Args:
        base: the tensor that dw is added to; may be dw itself.
    """
    types = _types(x, dw, g)
    memory, aside, product, total = carve(workspace, *weight_grad_pieces(*types, groups))
    sums = total.reshape(dw.shape) if total.size else dw
    if base is not None:
        np.copyto(sums, base)
    grads = grouped(g, groups)
    for items, box in _blocking(*types).walk(windows, len(x)):
        columns = gathered(windows, groups, x[items], box, memory)
        source = grads[items, :, :, box.start : box.stop].transpose(1, 2, 0, 3)
        first = base is None and items.start == 0 and box.start == 0
        add_product(_rows(source, aside), columns, grouped_weights(sums, groups), product.view(np.uint8), first)
    if total.size:
        np.copyto(dw, sums, casting="unsafe")

"""The NumPy kernels of convolution: windows gathered into blocks of columns, products by BLAS.

A block takes a few thousand window positions at a time, so that scratch memory does not grow with the image (columns
after Chellapilla, Puri and Simard 2006).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from foreplan.base.units import align_up
from foreplan.graph import TensorType, as_dtype
from foreplan.graph.types import Shape
from foreplan.ops.window import (
    Box,
    Windows,
    count_boxes,
    is_empty,
    spatial_size,
    zero_borders,
)

COLUMN_BYTES = 3 << 20  # a block of columns; more gains BLAS nothing
PRODUCT_BYTES = 1 << 20  # a partial weight gradient before it is added
FEW_POSITIONS = 1024  # images with fewer are joined into one product


@dataclass(frozen=True)
class Blocking:
    """How many window positions of how many images a block of columns takes.

    Attributes:
        images: items of the batch in one block; several only with all their positions.
        positions: limit of each image's.
        column_bytes: C·taps columns of a block.
        row_bytes: K rows of a block.
    """

    images: int
    positions: int
    column_bytes: int
    row_bytes: int

    @property
    def joined_bytes(self) -> int:
        """K rows of a block of several images, or 0 where a block is of one image."""
        return self.row_bytes if self.images > 1 else 0

    def blocks(self, shape: Shape) -> int:
        """Blocks in all, over outputs [N, K, *O]."""
        return -(-shape[0] // self.images) * count_boxes(shape[2:], self.positions)

    def walk(self, windows: Windows, batch: int) -> Iterator[tuple[slice, Box]]:
        """Items of the batch and box of positions of each block."""
        for n in range(0, batch, self.images):
            for box in windows.boxes(self.positions):
                yield slice(n, min(n + self.images, batch)), box


@lru_cache(maxsize=4096)
def blocking(x: TensorType, w: TensorType, y: TensorType) -> Blocking:
    """From the types of images [N, C, *S], weights [K, C/groups, *R] and outputs [N, K, *O]."""
    item = x.dtype.itemsize
    column, row = x.shape[1] * math.prod(w.shape[2:]) * item, w.shape[0] * item
    positions = spatial_size(y.shape)
    images = 1
    if positions < FEW_POSITIONS:
        images = max(1, min(y.shape[0], COLUMN_BYTES // ((column + row) * positions), -(-FEW_POSITIONS // positions)))
    limit = max(1, min(positions, COLUMN_BYTES // column))
    columns = align_up(column * images * limit, 64)
    return Blocking(images, limit, columns, align_up(row * images * limit, 64))


def grouped(images: np.ndarray, groups: int) -> np.ndarray:
    """[N, C, *S] as [N, groups, C/groups, positions], the same bytes."""
    return images.reshape(len(images), groups, images.shape[1] // groups, spatial_size(images.shape))


def grouped_weights(w: np.ndarray, groups: int) -> np.ndarray:
    """[K, C/groups, *R] as [groups, K/groups, C/groups·taps], the same bytes."""
    return w.reshape(groups, w.shape[0] // groups, math.prod(w.shape[1:]))


def columns_of(windows: Windows, channels: int, items: int, box: Box, memory: np.ndarray) -> np.ndarray:
    """The block of columns as [C, taps, items, *box], at the start of `memory`."""
    shape = (channels, len(windows.taps), items, *box.shape)
    return memory[: math.prod(shape)].reshape(shape)


def _gather(windows: Windows, images: np.ndarray, box: Box, columns: np.ndarray) -> None:
    """Copy what each tap reads, zeros where it falls into the padding; images are [items, C, *S]."""
    source = images.swapaxes(0, 1)
    for i, tap in enumerate(windows.taps):
        inside, there = windows.reach(tap, box)
        target = columns[:, i]
        if is_empty(inside):
            target[...] = 0
            continue
        target[(..., *inside)] = source[(..., *there)]
        zero_borders(target, inside)


def _parts(workspace: np.ndarray, plan: Blocking, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Columns, joined rows and the rest of a workspace."""
    middle = plan.column_bytes + plan.joined_bytes
    return (
        workspace[: plan.column_bytes].view(dtype),
        workspace[plan.column_bytes : middle].view(dtype),
        workspace[middle:],
    )


def _plan(x: np.ndarray, w: np.ndarray, y: np.ndarray) -> Blocking:
    dtype = as_dtype(x.dtype)
    return blocking(TensorType(dtype, x.shape), TensorType(dtype, w.shape), TensorType(dtype, y.shape))


def gathered(windows: Windows, groups: int, images: np.ndarray, box: Box, memory: np.ndarray) -> np.ndarray:
    """The block of columns of images [items, C, *S], filled, as [groups, C/groups·taps, positions]."""
    columns = columns_of(windows, images.shape[1], len(images), box, memory)
    _gather(windows, images, box, columns)
    return columns.reshape(groups, images.shape[1] // groups * len(windows.taps), -1)


def column_conv(
    windows: Windows, groups: int, x: np.ndarray, w: np.ndarray, y: np.ndarray, workspace: np.ndarray, clear: bool
) -> None:
    """y = weights · columns, written where it belongs or, for several small images at once, copied there; or added to
    what is there unless `clear`."""
    plan = _plan(x, w, y)
    memory = workspace[: plan.column_bytes].view(x.dtype)
    aside = workspace[plan.column_bytes : plan.column_bytes + plan.row_bytes].view(x.dtype)
    weights, outputs = grouped_weights(w, groups), grouped(y, groups)
    for items, box in plan.walk(windows, len(x)):
        matrix = gathered(windows, groups, x[items], box, memory)
        if plan.images == 1 and clear:
            np.matmul(weights, matrix, out=outputs[items.start, :, :, box.start : box.stop])
            continue
        rows = aside[: w.shape[0] * matrix.shape[2]].reshape(groups, weights.shape[1], -1)
        np.matmul(weights, matrix, out=rows)
        product = rows.reshape(*rows.shape[:2], items.stop - items.start, -1).transpose(2, 0, 1, 3)
        if clear:
            outputs[items] = product
        else:
            outputs[items, :, :, box.start : box.stop] += product


def column_data_grad(
    windows: Windows, groups: int, g: np.ndarray, w: np.ndarray, dx: np.ndarray, workspace: np.ndarray, clear: bool
) -> None:
    """Columns = weightsᵀ · gradients, added tap by tap into the image, cleared first or as it is."""
    plan = _plan(dx, w, g)
    memory, joined, _ = _parts(workspace, plan, g.dtype)
    weights, grads = grouped_weights(w, groups).swapaxes(-1, -2), grouped(g, groups)
    for items, box in plan.walk(windows, len(g)):
        target = dx[items].swapaxes(0, 1)
        if clear and box.start == 0:
            target[...] = 0
        columns = columns_of(windows, dx.shape[1], target.shape[1], box, memory)
        rows = _joined_rows(plan, grads, items, box, joined)
        np.matmul(weights, rows, out=columns.reshape(groups, weights.shape[1], -1))
        for i, inside, there in windows.reached(box):
            target[(..., *there)] += columns[(slice(None), i, Ellipsis, *inside)]


def _joined_rows(plan: Blocking, grads: np.ndarray, items: slice, box: Box, joined: np.ndarray) -> np.ndarray:
    """[groups, K/groups, positions of the block]: a window onto one image's gradients, or several copied together."""
    if plan.images == 1:
        return grads[items.start, :, :, box.start : box.stop]
    part = grads[items]
    rows = joined[: part.size].reshape(*part.shape[1:3], part.shape[0], part.shape[3])
    rows[...] = part.transpose(1, 2, 0, 3)
    return rows.reshape(*part.shape[1:3], -1)


def column_weight_grad(
    windows: Windows, groups: int, x: np.ndarray, g: np.ndarray, dw: np.ndarray, workspace: np.ndarray, clear: bool
) -> None:
    """dw = Σ gradients · columnsᵀ over blocks, added to what is there unless `clear`."""
    plan = _plan(x, dw, g)
    memory, joined, rest = _parts(workspace, plan, x.dtype)
    weights, grads = grouped_weights(dw, groups), grouped(g, groups)
    for items, box in plan.walk(windows, len(x)):
        matrix = gathered(windows, groups, x[items], box, memory)
        rows = _joined_rows(plan, grads, items, box, joined)
        add_product(rows, matrix, weights, rest, first=clear and items.start == 0 and box.start == 0)


def _product_rows(groups: int, outputs: int, columns: int, item: int) -> int:
    """Rows (output channels a group) of a partial weight gradient that is kept aside."""
    return max(1, min(outputs, PRODUCT_BYTES // (groups * columns * item)))


def product_bytes(dw: TensorType, groups: int) -> int:
    """Workspace of `add_product` into a weight gradient."""
    columns = math.prod(dw.shape[1:])
    return (
        groups * columns * dw.dtype.itemsize * _product_rows(groups, dw.shape[0] // groups, columns, dw.dtype.itemsize)
    )


def add_product(rows: np.ndarray, columns: np.ndarray, total: np.ndarray, workspace: np.ndarray, first: bool) -> None:
    """total (+)= rows · columnsᵀ for each group, by way of the workspace, a range of rows at a time."""
    columns = columns.swapaxes(-1, -2)
    if first:
        np.matmul(rows, columns, out=total)
        return
    groups, outputs, width = total.shape
    count = _product_rows(groups, outputs, width, total.itemsize)
    memory = workspace.view(total.dtype)
    for k in range(0, outputs, count):
        part = total[:, k : k + count]
        product = memory[: part.size].reshape(part.shape)
        np.matmul(rows[:, k : k + count], columns, out=product)
        part += product


def _added_channels(channels: int, width: int) -> int:
    """Channels (of each group) of an image that are kept aside before they are added."""
    return max(1, min(channels, PRODUCT_BYTES // max(1, width)))


def added_bytes(dx: TensorType, groups: int) -> int:
    """Workspace of `add_images` into images [N, C, *S]."""
    width = groups * spatial_size(dx.shape) * dx.dtype.itemsize
    return width * _added_channels(dx.shape[1] // groups, width)


def add_images(weights: np.ndarray, grads: np.ndarray, images: np.ndarray, workspace: np.ndarray) -> None:
    """images [N, groups, C, positions] += weights [groups, C, K] · grads, by way of the workspace."""
    _, groups, channels, positions = images.shape
    count = _added_channels(channels, groups * positions * images.itemsize)
    memory = workspace.view(images.dtype)
    for image, grad in zip(images, grads):
        for c in range(0, channels, count):
            part = image[:, c : c + count]
            product = memory[: part.size].reshape(part.shape)
            np.matmul(weights[:, c : c + count], grad, out=product)
            part += product

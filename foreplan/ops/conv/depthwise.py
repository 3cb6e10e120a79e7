"""The NumPy kernels of depth-wise convolution: multiply-adds of shifted planes, a cache's worth at a time.

With stride 1 over two axes, planes are first laid out with their padding. Then a tap is one shift of the whole flat
block, and every call runs over long rows. The few positions that wrap into the next row are computed and dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from foreplan.base.units import align_up
from foreplan.graph import TensorType
from foreplan.graph.types import Shape
from foreplan.ops.window import Index, Windows, block_size, plane_blocks

FLAT_BLOCK = 1 << 15  # elements of a padded block


def is_depthwise(channels: int, weights: Shape, groups: int) -> bool:
    """Whether every channel has one output of its own (more outputs a channel go by columns)."""
    return groups == channels == weights[0] and groups > 1


def conv_bytes(windows: Windows, y: TensorType) -> int:
    """Workspace of `depthwise_conv` with output y."""
    item = y.dtype.itemsize
    if _is_flat(windows):
        block = _flat(windows, y.shape[1])
        return align_up(block.padded_size * item, 64) + 2 * align_up(block.size * item, 64)
    return align_up(block_size(y.shape) * item, 64)


def data_grad_bytes(windows: Windows, g: TensorType) -> int:
    """Workspace of `depthwise_data_grad` from g."""
    mirrored = _mirrored(windows)
    return conv_bytes(mirrored, g) if _is_flat(mirrored) else align_up(block_size(g.shape) * g.dtype.itemsize, 64)


def weight_grad_bytes(windows: Windows, g: TensorType) -> int:
    """Workspace of `depthwise_weight_grad` from g."""
    item = g.dtype.itemsize
    sums = align_up(g.shape[1] * item, 64)
    if _is_flat(windows):
        block = _flat(windows, g.shape[1])
        return sums + align_up(block.padded_size * item, 64) + align_up(block.size * item, 64)
    return sums + align_up(block_size(g.shape) * item, 64)


def depthwise_conv(windows: Windows, x: np.ndarray, w: np.ndarray, y: np.ndarray, workspace: np.ndarray) -> None:
    """y = Σ over taps of shifted planes times the channel's weight."""
    (_flat_conv if _is_flat(windows) else _tap_conv)(windows, x, w, y, workspace)


def depthwise_data_grad(windows: Windows, g: np.ndarray, w: np.ndarray, dx: np.ndarray, workspace: np.ndarray) -> None:
    """dx = Σ over taps of gradients times the channel's weight: with stride 1 a convolution with mirrored weights."""
    mirrored = _mirrored(windows)
    if _is_flat(mirrored):
        _flat_conv(mirrored, g, w[:, :, ::-1, ::-1], dx, workspace)
    else:
        _tap_data_grad(windows, g, w, dx, workspace)


def depthwise_weight_grad(
    windows: Windows, x: np.ndarray, g: np.ndarray, dw: np.ndarray, workspace: np.ndarray
) -> None:
    """dw = sums of gradients times shifted planes; the workspace begins with a sum a channel."""
    (_flat_weight_grad if _is_flat(windows) else _tap_weight_grad)(windows, x, g, dw, workspace)


def _is_flat(windows: Windows) -> bool:
    return windows.strides == (1, 1) and min(pad for pair in windows.pads for pad in pair) >= 0


def _mirrored(windows: Windows) -> Windows:
    """Windows over the gradient whose taps, in reverse, are the ones that read each input element."""
    reach = [(taps - 1) * gap for taps, gap in zip(windows.kernel, windows.dilations)]
    pads = tuple((r - low, r - high) for r, (low, high) in zip(reach, windows.pads))
    return replace(windows, extent=windows.positions, positions=windows.extent, pads=pads)


@dataclass(frozen=True)
class _Flat:
    """A block of output rows of some channels, and the padded input rows that they read.

    Attributes:
        channels: most channels of a block.
        rows: most output rows of a block.
        halo: input rows more than output rows.
        width: of a padded row.
    """

    channels: int
    rows: int
    halo: int
    width: int

    @property
    def size(self) -> int:
        """Elements of the outputs, rows as wide as the padded ones."""
        return self.channels * self.rows * self.width

    @property
    def padded_size(self) -> int:
        """Elements of the inputs."""
        return self.channels * (self.rows + self.halo) * self.width


def _flat(windows: Windows, channels: int) -> _Flat:
    halo = (windows.kernel[0] - 1) * windows.dilations[0]
    width = windows.extent[1] + sum(windows.pads[1])
    rows = max(1, min(windows.positions[0], FLAT_BLOCK // width - halo))
    return _Flat(max(1, min(channels, FLAT_BLOCK // ((rows + halo) * width))), rows, halo, width)


def _flat_blocks(windows: Windows, shape: Shape) -> Iterator[tuple[int, slice, slice]]:
    """Item, channels and output rows of each block of outputs [N, C, O, P]."""
    block = _flat(windows, shape[1])
    for n in range(shape[0]):
        for c in range(0, shape[1], block.channels):
            for row in range(0, shape[2], block.rows):
                yield n, slice(c, min(c + block.channels, shape[1])), slice(row, min(row + block.rows, shape[2]))


def _lay_out(windows: Windows, planes: np.ndarray, rows: slice, memory: np.ndarray) -> np.ndarray:
    """The padded input rows [C, rows · width] that output rows of the planes [C, S, T] read."""
    block = _flat(windows, len(planes))
    (top, _), (left, _) = windows.pads
    height, width = windows.extent
    count = rows.stop - rows.start + block.halo
    padded = memory[: len(planes) * count * block.width].reshape(len(planes), count, block.width)
    first = min(max(rows.start - top, 0), height)
    last = max(first, min(rows.start - top + count, height))
    above = first - (rows.start - top)
    below = above + last - first
    padded[:, :above] = 0
    padded[:, below:] = 0
    padded[:, above:below, :left] = 0
    padded[:, above:below, left + width :] = 0
    padded[:, above:below, left : left + width] = planes[:, first:last]
    return padded.reshape(len(planes), -1)


def _shift(windows: Windows, tap: Shape, width: int) -> int:
    """Elements from an output's place to what the tap reads, in the flat block."""
    return tap[0] * windows.dilations[0] * width + tap[1] * windows.dilations[1]


def _flat_conv(windows: Windows, x: np.ndarray, w: np.ndarray, y: np.ndarray, workspace: np.ndarray) -> None:
    block = _flat(windows, y.shape[1])
    padded_bytes = align_up(block.padded_size * x.itemsize, 64)
    sum_bytes = align_up(block.size * x.itemsize, 64)
    memory, sums, terms = (
        part.view(x.dtype)
        for part in (
            workspace[:padded_bytes],
            workspace[padded_bytes : padded_bytes + sum_bytes],
            workspace[padded_bytes + sum_bytes :],
        )
    )
    for n, channels, rows in _flat_blocks(windows, y.shape):
        planes = x[n, channels]
        source = _lay_out(windows, planes, rows, memory)
        count, height = len(planes), rows.stop - rows.start
        length = (height - 1) * block.width + y.shape[3]
        total = sums[: count * height * block.width].reshape(count, -1)
        term = terms[: count * length].reshape(count, length)
        for i, tap in enumerate(windows.taps):
            start = _shift(windows, tap, block.width)
            target = term if i else total[:, :length]
            np.multiply(source[:, start : start + length], _tap_weights(w, channels, tap)[..., 0], out=target)
            if i:
                total[:, :length] += term
        y[n, channels, rows] = total.reshape(count, height, block.width)[:, :, : y.shape[3]]


def _flat_weight_grad(windows: Windows, x: np.ndarray, g: np.ndarray, dw: np.ndarray, workspace: np.ndarray) -> None:
    block = _flat(windows, g.shape[1])
    sums_bytes = align_up(g.shape[1] * x.itemsize, 64)
    padded_end = sums_bytes + align_up(block.padded_size * x.itemsize, 64)
    sums, memory, grads = (
        part.view(x.dtype)
        for part in (workspace[:sums_bytes], workspace[sums_bytes:padded_end], workspace[padded_end:])
    )
    dw[...] = 0
    for n, channels, rows in _flat_blocks(windows, g.shape):
        planes = x[n, channels]
        source = _lay_out(windows, planes, rows, memory)
        count, height = len(planes), rows.stop - rows.start
        wide = grads[: count * height * block.width].reshape(count, height, block.width)
        wide[:, :, : g.shape[3]] = g[n, channels, rows]
        wide[:, :, g.shape[3] :] = 0
        length = (height - 1) * block.width + g.shape[3]
        flat = wide.reshape(count, -1)[:, :length]
        for tap in windows.taps:
            start = _shift(windows, tap, block.width)
            place: Index = (channels, 0, *tap)
            dw[place] += np.vecdot(flat, source[:, start : start + length], out=sums[:count])


def _tap_weights(w: np.ndarray, channels: slice, tap: Shape) -> np.ndarray:
    """One weight a channel, to multiply [items, channels, *positions] with."""
    place: Index = (channels, 0, *tap)
    return w[place].reshape(-1, *(1 for _ in tap))


def _add_product(total: np.ndarray, x: np.ndarray, w: np.ndarray, memory: np.ndarray) -> None:
    """total += x · w, element by element."""
    product = memory[: x.size].reshape(x.shape)
    np.multiply(x, w, out=product)
    total += product


def _tap_conv(windows: Windows, x: np.ndarray, w: np.ndarray, y: np.ndarray, workspace: np.ndarray) -> None:
    memory = workspace.view(x.dtype)
    for items, channels, box in plane_blocks(windows, y.shape):
        block = y[(items, channels, *box.slices)]
        block[...] = 0
        for i, inside, there in windows.reached(box):
            target, source = block[(..., *inside)], x[(items, channels, *there)]
            _add_product(target, source, _tap_weights(w, channels, windows.taps[i]), memory)


def _tap_data_grad(windows: Windows, g: np.ndarray, w: np.ndarray, dx: np.ndarray, workspace: np.ndarray) -> None:
    memory = workspace.view(g.dtype)
    dx[...] = 0
    for items, channels, box in plane_blocks(windows, g.shape):
        block = g[(items, channels, *box.slices)]
        for i, inside, there in windows.reached(box):
            target, source = dx[(items, channels, *there)], block[(..., *inside)]
            _add_product(target, source, _tap_weights(w, channels, windows.taps[i]), memory)


def _tap_weight_grad(windows: Windows, x: np.ndarray, g: np.ndarray, dw: np.ndarray, workspace: np.ndarray) -> None:
    sums_bytes = align_up(dw.shape[0] * dw.itemsize, 64)
    sums, memory = workspace[:sums_bytes].view(x.dtype), workspace[sums_bytes:].view(x.dtype)
    axes = (0, *range(2, x.ndim))
    dw[...] = 0
    for items, channels, box in plane_blocks(windows, g.shape):
        block = g[(items, channels, *box.slices)]
        for i, inside, there in windows.reached(box):
            source = block[(..., *inside)]
            product = memory[: source.size].reshape(source.shape)
            np.multiply(source, x[(items, channels, *there)], out=product)
            partial = np.add.reduce(product, axis=axes, out=sums[: source.shape[1]])
            place: Index = (channels, 0, *windows.taps[i])
            dw[place] += partial

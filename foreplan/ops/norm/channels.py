"""What batch normalisation's ops share: their types, and images that are gone over a few channels at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from foreplan.base.errors import ShapeError
from foreplan.graph import Builder, Op, TensorType, Value, as_dtype
from foreplan.graph.axes import Axes, Factors, named
from foreplan.graph.op import Cotangents, Types, Values
from foreplan.graph.types import Shape
from foreplan.ops.pullback import by_parts
from foreplan.ops.window import spatial_is_dense, spatial_size

CHANNEL_BLOCK = 1 << 18  # elements of the channels that are worked on together
BLOCK = 1 << 16  # elements of a block within them


class Channels(Op):
    """What goes over everything but the channels of [N, C, *S]."""

    def accepts_strides(self, index: int, input: TensorType, strides: tuple[int, ...]) -> bool:
        """Images whose channels are dense: a range of channels or of items."""
        return input.rank >= 2 and spatial_is_dense(input.shape, strides, input.dtype.itemsize)

    def indexing(self, inputs: Types, outputs: Types) -> Axes | None:
        """Images and vectors of channels: all of each channel."""
        return self.by_channels(inputs, outputs, is_whole=True)

    def by_channels(self, inputs: Types, outputs: Types, is_whole: bool) -> Axes:
        """The axes of images and of vectors of channels, where some need all of each channel, or not."""
        f, rank = Factors(), max(x.rank for x in inputs)
        x = f.row("a", next(x.shape for x in inputs if x.rank == rank))
        given, made = ([x if t.rank == rank else x[1:2] for t in types] for types in (inputs, outputs))
        return f.axes(given, made, whole=named((x[0], *x[2:])) if is_whole else ())

    def check(self, x: TensorType, *vectors: TensorType) -> TensorType:
        """The type of statistics, a wide number a channel (see `DType.wide`); `vectors` may also be as narrow as x."""
        if x.rank < 2 or not x.dtype.is_float or not x.size:
            raise ShapeError(f"needs a floating-point [N, C, …] with at least one element, and got {x}")
        vector = x.with_shape(x.shape[1:2])
        wide = vector.with_dtype(x.dtype.wide)
        if wrong := [type for type in vectors if type not in (wide, vector)]:
            raise ShapeError(f"the parameters for {x} must be {wide}, and one is {wrong[0]}")
        return wide


class ChannelTotals(Channels):
    """Two totals of each channel, of differences from a mean among them."""

    def vjp(self, b: Builder, inputs: Values, outputs: Values, cotangents: Cotangents) -> Cotangents:
        """Of the parts."""
        return by_parts(self, b, inputs, cotangents)

    def flops(self, inputs: Types, outputs: Types) -> int:
        """One total 1, centring 1, the other 2 an element."""
        return 4 * inputs[0].size

    def workspace(self, inputs: Types, outputs: Types) -> int:
        """A block of differences from the mean, and a partial sum an item and channel of it."""
        return block_bytes(inputs[0])


@dataclass(frozen=True)
class ChannelNorm(Channels):
    """Attributes of normalisation a channel.

    Attributes:
        epsilon: added to the variance.
    """

    epsilon: float


def share_of(x: Value) -> float:
    """The weight of one element in the mean of its channel."""
    return x.shape[1] / max(1, x.type.size)


def vector_shape(x: Value) -> Shape:
    """The shape of a vector of channels that broadcasts to x."""
    return (-1, *(1 for _ in x.shape[2:]))


def other_axes(x: Value) -> Shape:
    """All but the channels."""
    return (0, *range(2, len(x.shape)))


def rows_of(images: np.ndarray) -> np.ndarray:
    """[N, C, *S] as [N, C, positions], the same bytes."""
    return images.reshape(*images.shape[:2], spatial_size(images.shape))


def channel_groups(shape: Shape) -> Iterator[slice]:
    """Ranges of channels of [N, C, positions] that are worked on together."""
    count = max(1, CHANNEL_BLOCK // (shape[0] * shape[2]))
    for start in range(0, shape[1], count):
        yield slice(start, min(start + count, shape[1]))


def blocks_of(shape: Shape) -> Iterator[tuple[slice, slice]]:
    """Ranges of items and positions of [N, C, positions] that make at most BLOCK elements (or one a channel)."""
    items, channels, positions = shape
    width = max(1, min(positions, BLOCK // channels))
    height = max(1, BLOCK // (channels * width)) if width == positions else 1
    for n in range(0, items, height):
        for start in range(0, positions, width):
            yield slice(n, min(n + height, items)), slice(start, min(start + width, positions))


def all_blocks(shape: Shape) -> Iterator[tuple[slice, slice, slice]]:
    """Ranges of items, channels and positions of [N, C, positions]: the blocks of all groups of channels."""
    for channels in channel_groups(shape):
        for items, positions in blocks_of((shape[0], channels.stop - channels.start, shape[2])):
            yield items, channels, positions


def block_bytes(x: TensorType) -> int:
    """Bytes for the largest block of `scratch_of`: its elements, and one sum an item and channel."""
    positions = spatial_size(x.shape)
    most = 0
    # The first group of channels and the last one differ; within a group no block is larger than the first.
    for channels in {group.stop - group.start for group in channel_groups((*x.shape[:2], positions))}:
        items, range_ = next(blocks_of((x.shape[0], channels, positions)))
        most = max(most, (items.stop - items.start) * channels * (range_.stop - range_.start + 1))
    return most * x.dtype.wide.itemsize


def scratch_of(workspace: np.ndarray, block: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Memory for a dense copy of the block, and for a sum a row of it, wide."""
    memory = workspace.view(as_dtype(block.dtype).wide.numpy)
    rows = block.shape[0] * block.shape[1]
    return (
        memory[: block.size].reshape(block.shape),
        memory[block.size : block.size + rows].reshape(block.shape[:2]),
    )

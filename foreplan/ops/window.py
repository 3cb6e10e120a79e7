"""Sliding windows over spatial axes, for convolution, pooling and their gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from typing import Any, TypedDict

import numpy as np

from foreplan.base.errors import ShapeError
from foreplan.base.units import align_up
from foreplan.graph.axes import Dim, Dims, Factors, Part
from foreplan.graph.types import Shape, TensorType, types_of

Pads = tuple[tuple[int, int], ...]
Index = tuple[Any, ...]  # an index of a NumPy array

PLANE_BLOCK = 1 << 16  # elements of a block that is walked tap by tap: it stays in a core's cache
IMAGE_BLOCK = 1 << 20  # elements of narrow images that are widened together, before additions
MOST_TAPS = 1 << 22  # of a window
WIDE = np.dtype(np.float32)  # in which sums of narrow elements are taken


@dataclass(frozen=True)
class Box:
    """A block of window positions that lie side by side in memory.

    Attributes:
        lower: first position along each spatial axis.
        upper: behind the last one.
        start: the first position's place in C order.
        stop: behind the last one's.
    """

    lower: Shape
    upper: Shape
    start: int
    stop: int

    @cached_property
    def shape(self) -> Shape:
        """Positions along each axis."""
        return tuple(upper - lower for lower, upper in zip(self.lower, self.upper))

    @cached_property
    def slices(self) -> Index:
        """Slices of the spatial axes that select the box."""
        return tuple(slice(lower, upper) for lower, upper in zip(self.lower, self.upper))


@dataclass(frozen=True)
class Windows:
    """Windows of `kernel` taps, `strides` apart, over a padded spatial extent.

    Tap r of position o reads element o·stride − low + r·dilation; taps that fall outside the extent read padding.

    Attributes:
        extent: spatial shape that the windows slide over, without padding.
        kernel: taps along each axis.
        strides: elements from one window to the next.
        pads: (low, high) elements of padding; negative ones crop.
        dilations: elements from one tap to the next.
        positions: windows along each axis.
    """

    extent: Shape
    kernel: Shape
    strides: Shape
    pads: Pads
    dilations: Shape
    positions: Shape

    @cached_property
    def taps(self) -> tuple[Shape, ...]:
        """Every tap, in C order."""
        return tuple(product(*map(range, self.kernel)))

    def reach(self, tap: Shape, box: Box) -> tuple[Index, Index]:
        """Where a tap falls inside the extent: slices of the box's positions, and of the extent that they read.

        Both select nothing where the tap falls outside for every position of the box.
        """
        inside, source = [], []
        for axis, r in enumerate(tap):
            first, count, element = _overlap(
                box.lower[axis],
                box.upper[axis],
                self.pads[axis][0] - r * self.dilations[axis],
                self.strides[axis],
                self.extent[axis],
            )
            inside.append(slice(first, first + count))
            source.append(slice(element, element + count * self.strides[axis], self.strides[axis]))
        return tuple(inside), tuple(source)

    def reached(self, box: Box) -> Iterator[tuple[int, Index, Index]]:
        """(number of the tap, result of `reach`) for each tap that falls inside at some position of the box."""
        for tap in product(*(self._near(axis, box) for axis in range(len(self.kernel)))):
            inside, source = self.reach(tap, box)
            if not is_empty(inside):
                number = 0
                for r, taps in zip(tap, self.kernel):
                    number = number * taps + r
                yield number, inside, source

    def _near(self, axis: int, box: Box) -> range:
        """Taps of an axis that the extent holds, between those of the box's last position and of its first."""
        low, stride, step = self.pads[axis][0], self.strides[axis], self.dilations[axis]
        first = -(((box.upper[axis] - 1) * stride - low) // step)
        last = (self.extent[axis] - 1 + low - box.lower[axis] * stride) // step
        return range(max(0, first), min(self.kernel[axis], last + 1))

    def boxes(self, limit: int) -> Iterator[Box]:
        """All positions in C order, in boxes of at most `limit` (at least one) positions."""
        yield from _boxes(self.positions, limit)


@lru_cache(maxsize=1 << 16)
def _overlap(lower: int, upper: int, low: int, stride: int, extent: int) -> tuple[int, int, int]:
    """(first position relative to `lower`, count, first element) with 0 ≤ o·stride − low < extent."""
    first = max(lower, -(-low // stride))
    last = min(upper, (extent - 1 + low) // stride + 1)
    count = max(0, last - first)
    return (first - lower, count, first * stride - low) if count else (0, 0, 0)


@lru_cache(maxsize=256)
def _boxes(positions: Shape, limit: int) -> tuple[Box, ...]:
    # The innermost axes that fit together stay whole; one axis before them is cut, the rest are walked.
    cut, inner = len(positions) - 1, 1
    while cut > 0 and inner * positions[cut] <= limit:
        inner *= positions[cut]
        cut -= 1
    rows = max(1, limit // inner)
    found, start = [], 0
    for index in np.ndindex(positions[:cut]):
        for low in range(0, positions[cut], rows):
            high = min(low + rows, positions[cut])
            stop = start + (high - low) * inner
            lower = (*index, low, *(0 for _ in positions[cut + 1 :]))
            upper = (*(i + 1 for i in index), high, *positions[cut + 1 :])
            found.append(Box(lower, upper, start, stop))
            start = stop
    return tuple(found)


def count_boxes(positions: Shape, limit: int) -> int:
    """How many boxes `Windows.boxes` gives."""
    return len(_boxes(positions, limit))


def plane_blocks(windows: Windows, shape: Shape) -> Iterator[tuple[slice, slice, Box]]:
    """Items, channels and positions of outputs [N, C, *O], in blocks of at most `block_size` elements."""
    plane = spatial_size(shape)
    channels = max(1, min(shape[1], PLANE_BLOCK // plane))
    items = max(1, min(shape[0], PLANE_BLOCK // (plane * channels))) if channels == shape[1] else 1
    for n in range(0, shape[0], items):
        for c in range(0, shape[1], channels):
            for box in windows.boxes(min(plane, PLANE_BLOCK)):
                yield slice(n, n + items), slice(c, c + channels), box


def image_bytes(images: TensorType) -> int:
    """Workspace of `images_of`: channels of some images, at least one, if they are narrow."""
    if not images.dtype.is_narrow:
        return 0
    return align_up(math.prod(_together(images.shape)) * spatial_size(images.shape) * WIDE.itemsize, 64)


def _together(shape: Shape) -> tuple[int, int]:
    """How many images and channels are widened together."""
    plane = max(1, spatial_size(shape))
    channels = max(1, min(shape[1], IMAGE_BLOCK // plane))
    return max(1, min(shape[0], IMAGE_BLOCK // (plane * channels))) if channels == shape[1] else 1, channels


def images_of(images: np.ndarray, workspace: np.ndarray) -> Iterator[tuple[slice, slice, np.ndarray, np.ndarray]]:
    """Images of zeros, for additions: (items, channels, these images, the rest of the workspace).

    All of them as they lie; or, if they are narrow, some channels at a time in float32, which are rounded afterwards.
    """
    (type,) = types_of(images)
    if not type.dtype.is_narrow:
        images[...] = 0
        yield slice(None), slice(None), images, workspace
        return
    (count, width), start = _together(images.shape), image_bytes(type)
    for n in range(0, images.shape[0], count):
        for c in range(0, images.shape[1], width):
            target = images[n : n + count, c : c + width]
            image = workspace[: target.size * WIDE.itemsize].view(WIDE).reshape(target.shape)
            image[...] = 0
            yield slice(n, n + count), slice(c, c + width), image, workspace[start:]
            np.copyto(target, image, casting="unsafe")


def block_size(shape: Shape) -> int:
    """Elements of the largest of `plane_blocks`."""
    return min(PLANE_BLOCK, math.prod(shape))


def count_positions(extent: Shape, kernel: Shape, strides: Shape, pads: Pads, dilations: Shape) -> Shape:
    """Windows along each axis: floor((extent + low + high − dilation·(kernel − 1) − 1) / stride) + 1.

    Raises:
        ShapeError: an attribute lacks an entry for each axis, negative pads take away more than an axis has, no window
            fits, or a window has too many taps.
    """
    if not len(extent) == len(kernel) == len(strides) == len(pads) == len(dilations) >= 1:
        raise ShapeError(
            f"kernel {kernel}, strides {strides}, pads {pads} and dilations {dilations} need one entry for each of the "
            f"{len(extent)} spatial axes, and at least one"
        )
    if min(*kernel, *strides, *dilations) < 1:
        raise ShapeError(f"kernel {kernel}, strides {strides} and dilations {dilations} must be at least 1")
    if math.prod(kernel) > MOST_TAPS:
        raise ShapeError(f"a window of {list(kernel)} has {math.prod(kernel)} taps; foreplan takes {MOST_TAPS} at most")
    if any(size + min(0, low) + min(0, high) < 0 for size, (low, high) in zip(extent, pads)):
        raise ShapeError(f"negative pads {pads} take away more than the extents {list(extent)} have")
    counts = tuple(
        (size + low + high - step * (taps - 1) - 1) // stride + 1
        for size, taps, stride, (low, high), step in zip(extent, kernel, strides, pads, dilations)
    )
    if min(counts) < 1:
        raise ShapeError(
            f"a window of {list(kernel)} with dilations {dilations} does not fit {list(extent)} padded by {pads}; use "
            "a smaller kernel or more padding"
        )
    return counts


def window_dims(f: Factors, windows: Windows) -> tuple[Dims, Dims]:
    """The spatial axes of images, and of positions, of windows: factors o of positions and r of taps."""
    images, places = list[Dim](), list[Dim]()
    each = zip(windows.positions, windows.kernel, windows.strides, windows.pads, windows.dilations)
    for i, (count, taps, stride, pads, gap) in enumerate(each):
        if taps == stride == 1 and not any(pads):
            dim = f.dim((f"o{i}", count))
            images.append(dim)
            places.append(dim)
        else:
            images.append(f.window(-pads[0], (f"o{i}", count, stride), (f"r{i}", taps, gap)))
            places.append(Dim(((f"o{i}", 1),)))
    return tuple(images), tuple(places)


def pads_left(pads: Pads, part: Part) -> Pads:
    """The padding of a part of input 0, an image."""
    return tuple(part.windows[0, i][1:] if (0, i) in part.windows else pair for i, pair in enumerate(pads, 2))


def same_padding(extent: int, taps: int, stride: int, gap: int) -> int:
    """The zeros, both sides together, with which ⌈extent / stride⌉ windows of `taps` taps at a distance `gap` fit."""
    return max((-(-extent // stride) - 1) * stride + (taps - 1) * gap + 1 - extent, 0)


def zero_borders(block: np.ndarray, inside: Sequence[slice]) -> None:
    """Write zeros outside the box `inside` of the last axes of `block`."""
    lead = block.ndim - len(inside)
    for axis, part in enumerate(inside):
        here = (slice(None),) * (lead + axis)
        if part.start > 0:
            block[(*here, slice(0, part.start))] = 0
        if part.stop < block.shape[lead + axis]:
            block[(*here, slice(part.stop, None))] = 0


def is_empty(inside: Sequence[slice]) -> bool:
    """Whether slices from `Windows.reach` select nothing."""
    return any(part.stop <= part.start for part in inside)


PerAxis = Sequence[int] | int | None
Padding = Sequence[int] | Sequence[tuple[int, int]] | int | None


class Geometry(TypedDict, total=False):
    """How windows lie over images, as `per_axis` and `symmetric` take it.

    Attributes:
        strides: from one window to the next.
        pads: of both ends of an axis.
        dilations: from one tap to the next.
    """

    strides: PerAxis
    pads: Padding
    dilations: PerAxis


def symmetric(pads: Padding, axes: int) -> Pads:
    """(low, high) an axis from one number for all, one number an axis, pairs, or None for no padding."""
    if pads is None:
        return ((0, 0),) * axes
    if isinstance(pads, int):
        return ((pads, pads),) * axes
    return tuple((pad, pad) if isinstance(pad, int) else (int(pad[0]), int(pad[1])) for pad in pads)


def per_axis(value: PerAxis, axes: int) -> Shape:
    """One number an axis from one for all, one an axis, or None for 1."""
    if value is None:
        return (1,) * axes
    return (value,) * axes if isinstance(value, int) else tuple(value)


def spatial_size(shape: Shape) -> int:
    """Elements of one channel of a [N, C, …] shape."""
    return math.prod(shape[2:])


def spatial_is_dense(shape: Shape, strides: Shape, itemsize: int) -> bool:
    """Whether each channel of a [N, C, …] array lies dense in memory and channels do not overlap."""
    step = itemsize
    for extent, stride in zip(reversed(shape[2:]), reversed(strides[2:])):
        if extent != 1 and stride != step:
            return False
        step *= extent
    return strides[1] >= step and strides[0] >= 0

"""Products of tensors in any layout: the launch for matrix products and convolutions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from foreplan.base.units import ceil_div
from foreplan.graph import DType
from foreplan.graph.types import Shape
from foreplan.runtime.cuda.device import Device
from foreplan.runtime.cuda.kernels.map import index_type
from foreplan.runtime.cuda.kernels.reduce import Axis, Terms, reduction
from foreplan.runtime.cuda.launch import Address, Launch, LaunchKernel, Word, launch, output_at, workspace_at

DEPTH = 16  # terms that a block takes at a time
LEAST_TERMS = 16 * DEPTH  # of a part
MOST_PARTS = 128


class Operand(Protocol):
    """What is read at pairs of places."""

    @property
    def dtype(self) -> DType:
        """Of its elements."""

    @property
    def type(self) -> str:
        """Its type in cuda/operand.cuh."""

    @property
    def words(self) -> Sequence[Word]:
        """Its members."""

    @property
    def inner_side_by_side(self) -> bool:
        """Whether neighbours along the sum lie closer than neighbours along the result."""


@dataclass(frozen=True)
class Plain:
    """A tensor with independent places: axes along the result, and axes along the sum."""

    start: Address
    dtype: DType
    outer: tuple[Axis, ...]
    inner: tuple[Axis, ...]

    @property
    def type(self) -> str:
        """See `Operand`."""
        return f"Plain<{len(self.outer)}, {len(self.inner)}>"

    @property
    def words(self) -> Sequence[Word]:
        """See `Operand`."""
        words: list[Word] = [self.start]
        for axes in (self.outer, self.inner):
            words += [axis.extent for axis in axes] + [axis.stride for axis in axes]
        return words

    @property
    def inner_side_by_side(self) -> bool:
        """See `Operand`."""
        return abs(self.inner[-1].stride) <= abs(self.outer[-1].stride)


@dataclass(frozen=True)
class Images:
    """Images [N, C, *S] that windows slide over: see cuda/operand.cuh.

    Attributes:
        dtype: of their elements.
        along: `Windows`: positions are along the result and taps summed over; `Taps`: the other way round.
        strides: bytes along each axis of the images.
        extents: of the images' spatial axes; then entries a spatial axis: what a position and a tap add, what is added
            to their sum, and what it is divided by.
        positions, taps: how many of each an axis has.
        channels: of a group.
    """

    along: str
    start: Address
    dtype: DType
    strides: tuple[int, ...]
    extents: Shape
    position_steps: Shape
    tap_steps: Shape
    shifts: Shape
    divisors: Shape
    positions: Shape
    taps: Shape
    channels: int

    @property
    def type(self) -> str:
        """See `Operand`."""
        divided = any(divisor != 1 for divisor in self.divisors)
        return f"{self.along}<{len(self.extents)}, {'true' if divided else 'false'}>"

    @property
    def words(self) -> Sequence[Word]:
        """See `Operand`."""
        numbers = (self.extents, self.divisors, self.shifts, self.positions, self.position_steps, self.taps)
        flat = [number for each in (*numbers, self.tap_steps) for number in each]
        return [self.start, *self.strides, *flat, self.channels]

    @property
    def inner_side_by_side(self) -> bool:
        """See `Operand`."""
        channels_together = self.strides[1] <= self.strides[-1] or self.channels == 1
        return channels_together == (self.along == "Windows")


@dataclass(frozen=True)
class Batch:
    """An axis of independent products: extent, and bytes from one to the next of each operand."""

    extent: int
    a: int = 0
    b: int = 0
    results: int = 0
    added: int = 0


def tile_of(rows: int, columns: int) -> int:
    """Rows and columns of results that a block makes."""
    return 64 if min(rows, columns) > 32 else 32


@dataclass(frozen=True)
class Product:
    """y[m, n] = Σ_k a[m, k] · b[n, k] (+ added[m, n]), for each place of some batch axes.

    Attributes:
        rows, columns, terms: m, n, k.
        a, b: what is multiplied.
        results: the output: its axes along m, and along n; it lies without gaps.
        added: likewise, what is added.
        batch: the batch axes.
        nbytes: of the whole output.
    """

    rows: int
    columns: int
    terms: int
    a: Operand
    b: Operand
    results: Plain
    added: Plain | None
    batch: tuple[Batch, ...]
    nbytes: int

    @property
    def batches(self) -> int:
        """Places of the batch axes."""
        return math.prod(axis.extent for axis in self.batch)

    @property
    def tile(self) -> int:
        """Rows and columns that a block makes."""
        return tile_of(self.rows, self.columns)

    def blocks(self) -> tuple[int, int]:
        """Tiles down and across."""
        return ceil_div(self.rows, self.tile), ceil_div(self.columns, self.tile)


def product_kernel(
    product: Product, device: Device, overwrites: tuple[tuple[int, int], ...], parts_allowed: bool
) -> LaunchKernel:
    """One launch; if few blocks have long sums, one for parts of the sums, and one that adds the parts up."""
    if not product.nbytes:
        return LaunchKernel(())
    parts = _parts(product, device) if parts_allowed else 1
    if parts == 1:
        return LaunchKernel((product_launch(product),), overwrites=overwrites)
    wide, item = product.a.dtype.wide, product.results.dtype.itemsize
    scale = wide.itemsize // item
    elements = product.nbytes // item

    def scaled(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
        return tuple(Axis(axis.extent, axis.stride * scale) for axis in axes)

    first = Product(
        product.rows,
        product.columns,
        product.terms,
        product.a,
        product.b,
        Plain(workspace_at(), wide, scaled(product.results.outer), scaled(product.results.inner)),
        product.added,
        tuple(Batch(x.extent, x.a, x.b, x.results * scale, x.added) for x in product.batch),
        elements * wide.itemsize,
    )
    stretch = Axis(elements, wide.itemsize)
    terms = Terms(workspace_at(), wide, (stretch,), (Axis(parts, elements * wide.itemsize),))
    second = reduction("sum", terms, output_at(0), product.results.dtype, 1, None)
    return LaunchKernel((product_launch(first, parts), second), parts * first.nbytes, overwrites)


def product_launch(product: Product, parts: int = 1) -> Launch:
    """The launch of a product with its terms in `parts` parts; each part has results of its own."""
    added = product.added or Plain(product.results.start, product.results.dtype, (Axis(1, 0),), (Axis(1, 0),))
    batch = product.batch or (Batch(1),)
    down, across = product.blocks()
    largest = max(product.rows, product.columns, product.terms)
    defines = (
        ("A_ELEMENT", product.a.dtype),
        ("B_ELEMENT", product.b.dtype),
        ("RESULT", product.results.dtype),
        ("ADDED_ELEMENT", added.dtype),
        ("HAS_ADDED", int(product.added is not None)),
        ("A", product.a.type),
        ("B", product.b.type),
        ("RESULTS", product.results.type),
        ("ADDED", added.type),
        ("A_INNER", int(product.a.inner_side_by_side)),
        ("B_INNER", int(product.b.inner_side_by_side)),
        ("BATCH", len(batch)),
        ("TILE", product.tile),
        ("INDEX", index_type(largest)),
    )
    words: list[Word] = [product.rows, product.columns, product.terms, ceil_div(product.terms, parts)]
    words += [down, across, product.nbytes]
    words += [axis.extent for axis in batch]
    words += [axis.a for axis in batch] + [axis.b for axis in batch]
    words += [axis.results for axis in batch] + [axis.added for axis in batch]
    for operand in (product.a, product.b, product.results, added):
        words += operand.words
    grid = (down * across * product.batches, parts, 1)
    return launch("product.cu", "product", grid, words, defines, threads=(product.tile // 4) ** 2)


def parts_of(terms: int, blocks: int, device: Device) -> int:
    """The number of parts of the sums that keep the multiprocessors busy, none of them short.

    Args:
        blocks: for whole sums.
    """
    return max(1, min(2 * device.multiprocessors // blocks, terms // LEAST_TERMS, MOST_PARTS))


def _parts(product: Product, device: Device) -> int:
    down, across = product.blocks()
    return parts_of(product.terms, down * across * product.batches, device)

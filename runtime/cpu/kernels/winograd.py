"""Convolutions of 3 × 3 taps by Winograd's algorithm: a quarter of the multiplications, as products of matrices.

A tile of 4 × 4 outputs comes of 6 × 6 inputs: y = Aᵀ[(G·w·Gᵀ) ⊙ (B·x·Bᵀ)]A (Winograd 1980; Lavin and Gray, "Fast
algorithms for convolutional neural networks", 2016). Summed over channels, each of the 36 places of ⊙ is a product of
matrices [tiles, channels] and [channels, channels]. The data's gradient is such a convolution, its taps turned around;
the weights', by transposition, is Gᵀ[Σ (A·g·Aᵀ) ⊙ (B·x·Bᵀ)]G, a sum over all tiles. Errors are one to four times those
of a sum of products.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import pairwise

import numpy as np

from foreplan.base.units import align_up
from foreplan.graph import TensorType, Window
from foreplan.graph.op import Arrays
from foreplan.graph.types import FLOAT32
from foreplan.ops.blocks import Piece, carve, carve_bytes
from foreplan.ops.conv.ops import ConvOp
from foreplan.runtime.cpu import prices
from foreplan.runtime.cpu.codegen.native import together
from foreplan.runtime.cpu.gemm.products import Product, product
from foreplan.runtime.cpu.kernels.rows import channel_rows
from foreplan.runtime.cpu.kernels.winograd_loops import (
    IMAGES,
    SLICES,
    Matrix,
    Slices,
    Tiles,
    Transform,
    compiled_transform,
    table,
)
from foreplan.runtime.cpu.kernels.winograd_matrices import winograd_matrices
from foreplan.runtime.cpu.onednn import library as c
from foreplan.runtime.cpu.onednn import primitives
from foreplan.runtime.cpu.onednn.primitives import OLD, Description, Following, base_of
from foreplan.runtime.cpu.threads import current_threads, one_thread, ranged
from foreplan.runtime.kernel import Refused, Run, one_after_another

TILE, TAPS, PATCH = 4, 3, 6
PLACES = PATCH * PATCH
LINE = 64  # bytes
LANES = 16  # channels are multiples of this
# Of such points, these make the smallest errors. All numbers of A and B are exact in float32.
POINTS = (Fraction(0), Fraction(5, 8), Fraction(-5, 8), Fraction(3, 2), Fraction(-3, 2))
B, G, A = (
    tuple(tuple(map(float, row)) for row in matrix) for matrix in winograd_matrices(POINTS, results=TILE, taps=TAPS)
)


def _turned(matrix: Matrix) -> Matrix:
    return tuple(zip(*matrix))


DATA, WEIGHTS = Transform(B, IMAGES, SLICES), Transform(G, SLICES, SLICES)
COTANGENTS, TAPS_AGAIN = Transform(A, IMAGES, SLICES), Transform(_turned(G), SLICES, SLICES)

# Measured on one core with AVX-512: what those of such matrices reach of the rate of oneDNN's products; bytes a
# nanosecond of transforms, and of weights on their way through memory.
PRODUCTS, TRANSFORMS, MEMORY = 0.78, 40, 16
BLOCK = 3 * 2**19  # bytes of a block of tiles in all places, on both sides of the product
LEAST, MOST = 48, 512  # tiles of a block


@dataclass(frozen=True)
class Images:
    """Images of floats with channels last, their rows and columns at any distance."""

    shape: tuple[int, int, int, int]
    strides: tuple[int, int, int]

    @classmethod
    def of(cls, x: Window) -> Images:
        """A tensor [N, C, H, W]."""
        n, channels, height, width = x.shape
        return cls((n, channels, height, width), (x.strides[0], x.strides[2], x.strides[3]))

    @property
    def channels(self) -> int:
        """How many."""
        return self.shape[1]

    def tiles(self, array: np.ndarray, over: Images, before: tuple[int, int]) -> Tiles:
        """Tiles of this, as many as cover `over`; the first tile begins `before` rows and columns earlier."""
        return Tiles(array.ctypes.data, self.strides, self.shape[2:], over.counts, TILE, before)

    @property
    def counts(self) -> tuple[int, int]:
        """Tiles along rows and columns."""
        return -(-self.shape[2] // TILE), -(-self.shape[3] // TILE)

    @property
    def count(self) -> int:
        """Tiles of all images."""
        return self.shape[0] * math.prod(self.counts)


def check(op: ConvOp, kernel: Sequence[int], x: Window, y: Window) -> None:
    """Raise for anything but a plain convolution of 3 × 3 taps between images of float32 with channels last."""
    plain = set(op.strides) == {1} == set(op.dilations) and op.groups == 1 and tuple(kernel) == (TAPS, TAPS)
    floats = x.type.dtype == FLOAT32 == y.type.dtype
    if not (plain and floats) or x.shape[1] % LANES or y.shape[1] % LANES or not all(map(channel_rows, (x, y))):
        raise Refused("Winograd's algorithm is for 3 x 3 taps, strides of 1 and multiples of 16 channels")


def _nanoseconds(inner: int, outer: int, tiles: int) -> int:
    """The time of `tiles` tiles: products in all places, transforms on both sides, weights through memory and back."""
    products = 2 * PLACES * inner * outer * tiles / (PRODUCTS * prices.rates().product)
    moved = 8 * PLACES * ((inner + outer) * tiles / TRANSFORMS + inner * outer / MEMORY)
    return int(products + moved) // current_threads()


@dataclass(frozen=True)
class _Blocks:
    """Tiles in blocks: all places of a block are computed before its products. Each thread has some blocks, and memory.

    Attributes:
        most: tiles of a block.
        threads: that have blocks.
    """

    count: int
    most: int
    threads: int

    @classmethod
    def of(cls, count: int, channels: int) -> _Blocks:
        """Blocks of as many tiles as a core's cache holds, for `channels` channels on both sides; equal shares for
        threads."""
        most = max(LEAST, min(MOST, BLOCK // (4 * PLACES * channels)))
        threads = max(1, min(current_threads(), count // (most // 2)))
        most = -(-count // align_up(-(-count // most), threads))
        return cls(count, most, min(threads, -(-count // most)))

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return ((first, min(first + self.most, self.count)) for first in range(0, self.count, self.most))

    def shares(self) -> list[list[tuple[int, int]]]:
        """The blocks of each thread."""
        blocks = list(self)
        ends = [len(blocks) * i // self.threads for i in range(self.threads + 1)]
        return [blocks[low:high] for low, high in pairwise(ends)]


def _stride(rows: int, channels: int) -> int:
    """Bytes from a slice to the next: an odd number of lines, so that slices do not share sets of a cache."""
    lines = -(-rows * channels * 4 // LINE)
    return (lines | 1) * LINE


def _piece(rows: int, channels: int) -> Piece:
    return (PLACES * _stride(rows, channels),), np.dtype(np.uint8)


def _bytes(count: int) -> Piece:
    return (count,), np.dtype(np.uint8)


def _matrices(rows: int, columns: int, most: int, turned: bool = False) -> Window:
    """The slices as matrices, or these transposed: room for `most` rows, `rows` of them valid."""
    strides = (_stride(most, columns), 4 * columns, 4)
    if turned:
        return Window(TensorType(FLOAT32, (PLACES, columns, rows)), (strides[0], strides[2], strides[1]))
    return Window(TensorType(FLOAT32, (PLACES, rows, columns)), strides)


def _slices(piece: np.ndarray, rows: int, channels: int) -> Slices:
    return Slices(piece.ctypes.data, _stride(rows, channels), 4 * channels, rows)


def _rows(transform: Transform, count: int, packed: bytes) -> Run:
    """A call of a transform for `count` rows of slices."""
    return ranged(compiled_transform(transform), count, LANES, current_threads(), packed)


class Convolution:
    """y = x * w with its epilogue; or the gradient of its data, with reversed taps.

    Attributes:
        after: functions, each with the index of the input that it takes beside the result.
    """

    def __init__(
        self, x: Window, w: Window, y: Window, before: tuple[int, int], *, turned: bool, after: Following = ()
    ) -> None:
        self.x, self.y, self.before, self.turned, self.after = Images.of(x), Images.of(y), before, turned, after
        self.base = base_of(after)
        self.nanoseconds = _nanoseconds(self.x.channels, self.y.channels, self.y.count)
        self.results = Transform(_turned(A), SLICES, IMAGES, tuple(function for function, _ in after))
        inner, outer = self.x.channels, self.y.channels
        self.blocks = _Blocks.of(self.y.count, inner + outer)
        # Taps [3, 3, inner, outer] of weights that are [outer, inner, 3, 3], or [inner, outer, 3, 3] turned around.
        steps = (4, 4 * outer) if not turned else (4 * outer, 4)
        taps = Window(w.type, (*steps, TAPS * inner * outer * 4, inner * outer * 4))
        self.reorder = primitives.reorder(Description.of(w), Description.of(taps))
        most, weights = self.blocks.most, _matrices(inner, outer, inner)
        with one_thread():
            self.products = {
                count: product(_matrices(count, inner, most), weights, _matrices(count, outer, most), alone=True)
                for count in {high - low for low, high in self.blocks}
            }

    @property
    def overwrites(self) -> tuple[tuple[int, int], ...]:
        """The input that is added to may be changed in place."""
        return ((0, self.base),) if self.base >= 0 else ()

    @property
    def workspace(self) -> int:
        """Taps, and the places of weights and of a block of tiles a thread."""
        return carve_bytes(*self._pieces())

    def _pieces(self) -> list[Piece]:
        inner, outer, most = self.x.channels, self.y.channels, self.blocks.most
        products = max(product.scratchpad for product in self.products.values())
        each = [_piece(most, inner), _piece(most, outer), _bytes(products)]
        own = [_bytes(TAPS * TAPS * inner * outer * 4), _piece(inner, outer), _bytes(self.reorder.scratchpad)]
        return [*own, *each * self.blocks.threads]

    def bind(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray) -> Run:
        """Weights first; then block after block."""
        inner, outer, most = self.x.channels, self.y.channels, self.blocks.most
        taps, weights, scratch, *own = carve(workspace, *self._pieces())
        each = inner * outer * 4
        source = Slices(taps.ctypes.data, each, 4 * outer, inner)
        if self.turned:
            source = Slices(taps.ctypes.data + (TAPS * TAPS - 1) * each, -each, 4 * outer, inner)
        runs = [
            _bound(self.reorder, scratch, {c.SRC: inputs[1], c.DST: taps}),
            _rows(WEIGHTS, inner, table(outer, source, _slices(weights, inner, outer))),
        ]
        if self.base >= 0 and inputs[self.base].ctypes.data != outputs[0].ctypes.data:
            runs.append(partial(np.copyto, outputs[0], inputs[self.base]))
        tiles = self.x.tiles(inputs[0], self.y, self.before), self.y.tiles(outputs[0], self.y, (0, 0))
        vectors = [inputs[index].ctypes.data for function, index in self.after if function not in (OLD, "relu")]
        shares: list[Run] = []
        for i, blocks in enumerate(self.blocks.shares()):
            data, results, scratch = own[3 * i : 3 * i + 3]
            taken = table(inner, tiles[0], _slices(data, most, inner))
            given = table(outer, _slices(results, most, outer), tiles[1], vectors)
            places = {c.SRC: data, c.WEIGHTS: weights, c.DST: results}
            calls: list[Run] = []
            for low, high in blocks:
                calls.append(partial(compiled_transform(DATA), low, high, taken))
                calls.append(_bound(self.products[high - low], scratch, places))
                calls.append(partial(compiled_transform(self.results), low, high, given))
            shares.append(one_after_another(*calls))
        return one_after_another(*runs, together(shares))


class WeightGradient:
    """The gradient of a convolution's weights, perhaps added to what there is."""

    def __init__(self, x: Window, g: Window, dw: Window, before: tuple[int, int], *, add: bool) -> None:
        self.x, self.g, self.before = Images.of(x), Images.of(g), before
        self.overwrites = ((0, 2),) if add else ()
        inner, outer = self.x.channels, self.g.channels
        self.nanoseconds = _nanoseconds(inner, outer, self.g.count)
        self.blocks = _Blocks.of(self.g.count, inner + outer)
        most, weights = self.blocks.most, _matrices(outer, inner, outer)
        with one_thread():
            self.products = {
                (count, adds): product(
                    _matrices(count, outer, most, turned=True), _matrices(count, inner, most), weights, adds, alone=True
                )
                for count in {high - low for low, high in self.blocks}
                for adds in (False, True)
            }
        taps = Window(dw.type, (4 * inner, 4, TAPS * inner * outer * 4, inner * outer * 4))
        self.reorders = [
            primitives.reorder(Description.of(taps), Description.of(dw), add=add or i > 0)
            for i in range(self.blocks.threads)
        ]

    @property
    def workspace(self) -> int:
        """For each thread the taps, the places of their gradient, and those of a block of tiles."""
        return carve_bytes(*self._pieces())

    def _pieces(self) -> list[Piece]:
        inner, outer, most = self.x.channels, self.g.channels, self.blocks.most
        scratch = max(primitive.scratchpad for primitive in (*self.reorders, *self.products.values()))
        taps, weights = _bytes(TAPS * TAPS * inner * outer * 4), _piece(outer, inner)
        return [taps, weights, _piece(most, inner), _piece(most, outer), _bytes(scratch)] * self.blocks.threads

    def bind(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray) -> Run:
        """Each thread: block after block, then from places to taps. At last the sum over threads."""
        inner, outer, most = self.x.channels, self.g.channels, self.blocks.most
        pieces = carve(workspace, *self._pieces())
        tiles = self.x.tiles(inputs[0], self.g, self.before), self.g.tiles(inputs[1], self.g, (0, 0))
        shares: list[Run] = []
        sums: list[Run] = []
        if self.overwrites and inputs[2].ctypes.data != outputs[0].ctypes.data:
            sums.append(partial(np.copyto, outputs[0], inputs[2]))
        for i, blocks in enumerate(self.blocks.shares()):
            taps, weights, data, cotangents, scratch = pieces[5 * i : 5 * i + 5]
            taken = table(inner, tiles[0], _slices(data, most, inner))
            given = table(outer, tiles[1], _slices(cotangents, most, outer))
            places = {c.SRC: cotangents, c.WEIGHTS: data, c.DST: weights}
            calls: list[Run] = []
            for number, (low, high) in enumerate(blocks):
                calls.append(partial(compiled_transform(DATA), low, high, taken))
                calls.append(partial(compiled_transform(COTANGENTS), low, high, given))
                calls.append(_bound(self.products[high - low, number > 0], scratch, places))
            found = Slices(taps.ctypes.data, inner * outer * 4, 4 * inner, outer)
            packed = table(inner, _slices(weights, outer, inner), found)
            calls.append(partial(compiled_transform(TAPS_AGAIN), 0, outer, packed))
            shares.append(one_after_another(*calls))
            sums.append(_bound(self.reorders[i], scratch, {c.SRC: taps, c.DST: outputs[0]}))
        return one_after_another(together(shares), *sums)


def _bound(primitive: Product, scratch: np.ndarray, places: Mapping[int, np.ndarray]) -> Run:
    if primitive.scratchpad:
        places = {**places, c.SCRATCHPAD: scratch}
    return primitive.bind({argument: array.ctypes.data for argument, array in places.items()})

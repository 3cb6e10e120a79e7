"""Winograd's transforms as compiled loops: tiles of images, sixteen channels at a time, between two small matrices.

A transform takes n × n vectors of channels X to A·X·Aᵀ, m × m of them, for a matrix A of m rows. Either side is
a tile of images with their channels last, or a row of some *slices*: a matrix [rows, channels] for each place of the
tile. Places of a tile outside of the image read as zero, and are not written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import llvmlite.ir as ir
import numpy as np

from foreplan.jit.builder import FLOAT, I64
from foreplan.runtime.cpu.codegen.lanes import Lanes
from foreplan.runtime.cpu.codegen.llvm import compiled_as
from foreplan.runtime.cpu.codegen.loops import WIDTH, Writer

BYTES = 4 * WIDTH  # of a vector
IMAGES, SLICES = "images", "slices"
Matrix = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Transform:
    """What a loop is made for.

    Attributes:
        matrix: A, m rows of n numbers.
        source, target: `IMAGES` or `SLICES`.
        after: operations before results are written: add, sub or mul, with a number a channel; "old" adds the old
            content; relu.
    """

    matrix: Matrix
    source: str
    target: str
    after: tuple[str, ...] = ()


@dataclass(frozen=True)
class Slices:
    """Memory of one side.

    Attributes:
        address: of the first row of the first slice.
        slice, row: bytes from one to the next.
        rows: of a slice; row number i of the loop is i modulo them.
    """

    address: int
    slice: int
    row: int
    rows: int

    def table(self) -> list[int]:
        """As a loop takes it."""
        return [self.address, self.slice, self.row, self.rows, *[0] * (SIDE - 4)]


@dataclass(frozen=True)
class Tiles:
    """Tiles of images, row by row and image by image.

    Attributes:
        address: of the first image.
        strides: bytes from one image, row and column to the next.
        extents: rows and columns of an image.
        counts: tiles along each.
        step: rows, and columns, from one tile to the next.
        before: rows and columns of the first tile before the image's first.
    """

    address: int
    strides: tuple[int, int, int]
    extents: tuple[int, int]
    counts: tuple[int, int]
    step: int
    before: tuple[int, int]

    def table(self) -> list[int]:
        """As a loop takes it."""
        return [self.address, *self.strides, *self.extents, *self.counts, self.step, *self.before]


SIDE = 11  # numbers that describe a side


def table(channels: int, source: Slices | Tiles, target: Slices | Tiles, vectors: Sequence[int] = ()) -> bytes:
    """A loop's table: the number of channels, a multiple of 16; both sides; addresses of operands in `after`."""
    return np.array([channels, *source.table(), *target.table(), *vectors], np.int64).tobytes()


@cache
def compiled_transform(transform: Transform) -> Callable[[int, int, bytes], None]:
    """A call of (start, stop, table) for tiles, or rows of slices, [start, stop)."""
    return compiled_as(transform, lambda: _Transform(transform).written())


class _Transform(Writer):
    """Writes such a loop."""

    def __init__(self, transform: Transform) -> None:
        super().__init__()
        self.transform, self.e = transform, Lanes(self.b, WIDTH)
        self.vector = self.e.type(FLOAT)

    def write(self) -> None:
        """All of it."""
        b, t = self.b, self.transform
        m, n = len(t.matrix), len(t.matrix[0])
        nowhere, zeros = (b.local(self.vector) for _ in range(2))
        b.store(ir.Constant(self.vector, None), zeros)
        found = [b.local(ir.ArrayType(I64, 2 * places)) for places in (n * n, m * m)]
        vectors = [
            b.pointer(self.entry(1 + 2 * SIDE + i))
            for i in range(sum(function in ("add", "sub", "mul") for function in t.after))
        ]
        with b.counted(self.start, self.stop) as row:
            self.find(t.source, 1, row, n, found[0], zeros)
            self.find(t.target, 1 + SIDE, row, m, found[1], nowhere)
            with b.counted(0, self.entry(0), WIDTH) as channel:
                at = b.udiv(channel, WIDTH)
                places = [[self.place_of(found[0], i * n + j, at) for j in range(n)] for i in range(n)]
                columns = [[self.load(places[i][j]) for i in range(n)] for j in range(n)]
                half = [self.product(column) for column in columns]  # half[j][i] = (A·X)[i, j]
                offset = b.mul(channel, 4)
                others = [self.load(b.behind(vector, offset)) for vector in vectors]
                for i in range(m):
                    for j, x in enumerate(self.product([half[k][i] for k in range(n)])):
                        place = self.place_of(found[1], i * m + j, at)
                        b.store(self.followed(x, place, iter(others)), place, align=4)
        b.ret_void()

    def find(self, kind: str, side: int, row: ir.Value, width: int, found: ir.Value, outside: ir.Value) -> None:
        """The address of each place of a tile, and the distance from one vector of channels to the next."""
        b = self.b
        if kind == SLICES:
            base, slice, step, rows = (self.entry(side + i) for i in range(4))
            base = b.add(base, b.mul(b.urem(row, rows), step))
            for i in range(width * width):
                self.keep(found, i, b.add(base, b.mul(slice, i)), b.index(BYTES))
            return
        base, image, down, right, height, wide, tall, broad, step, above, left = (
            self.entry(side + i) for i in range(SIDE)
        )
        number, y, x = self.unravelled(row, [tall, tall, broad])
        base = b.add(base, b.mul(number, image))
        firsts = [b.sub(b.mul(at, step), before) for at, before in ((y, above), (x, left))]
        lines, columns = ([b.add(first, i) for i in range(width)] for first in firsts)
        # As unsigned numbers, negative ones are too large as well.
        inside = [
            [b.icmp_unsigned("<", at, extent) for at in each] for each, extent in ((lines, height), (columns, wide))
        ]
        outside = b.ptrtoint(outside, I64)
        for i in range(width):
            line = b.add(base, b.mul(lines[i], down))
            for j in range(width):
                there = b.and_(inside[0][i], inside[1][j])
                address = b.select(there, b.add(line, b.mul(columns[j], right)), outside)
                self.keep(found, i * width + j, address, b.select(there, b.index(BYTES), 0))

    def keep(self, found: ir.Value, index: int, address: ir.Value, step: ir.Value) -> None:
        for i, number in enumerate((address, step)):
            self.b.store(number, self.b.gep(found, [2 * index + i], source_etype=I64))

    def place_of(self, found: ir.Value, index: int, at: ir.Value) -> ir.Value:
        """Where vector number `at` of a place lies."""
        b = self.b
        address, step = (b.word(found, 2 * index + i) for i in range(2))
        return b.pointer(b.add(address, b.mul(at, step)))

    def load(self, place: ir.Value) -> ir.Value:
        return self.b.load(place, align=4, typ=self.vector)

    def followed(self, x: ir.Value, place: ir.Value, others: Iterator[ir.Value]) -> ir.Value:
        """A vector after the operations in `after`."""
        b = self.b
        for function in self.transform.after:
            if function == "old":
                x = b.fadd(x, self.load(place))
            elif function == "relu":
                zero = ir.Constant(self.vector, None)
                x = b.select(b.fcmp_ordered("<", x, zero), zero, x)  # NaN stays
            else:
                x = {"add": b.fadd, "sub": b.fsub, "mul": b.fmul}[function](x, next(others))
        return x

    def product(self, column: Sequence[ir.Value]) -> list[ir.Value]:
        """A times a column of vectors."""
        return [self.combined(row, column) for row in self.transform.matrix]

    def combined(self, row: Sequence[float], column: Sequence[ir.Value]) -> ir.Value:
        """The sum of some vectors, each times a number."""
        total: ir.Value | float = 0.0
        for factor, x in sorted(zip(row, column), key=lambda pair: pair[0] != 1):
            if factor == 1 and total == 0.0:
                total = x
            elif factor:
                total = self.e.fma(x, factor, total)
        return total

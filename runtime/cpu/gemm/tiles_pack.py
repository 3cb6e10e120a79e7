"""Float32 matrices as parts of bfloat16 in the layout of tile registers, as machine code.

A float32 number is the sum of three of bfloat16: its rounding, the rounding of the remainder, and the rest (Henry, Tang
and Heinecke, "Leveraging the bfloat16 Artificial Intelligence Datatype For Higher-Precision Computations", 2019).
"""

from __future__ import annotations

from collections.abc import Sequence

import llvmlite.ir as ir

from foreplan.jit.builder import FLOAT, I32, I64, POINTER, Builder
from foreplan.runtime.cpu.codegen.lanes import Lanes, shuffled
from foreplan.runtime.cpu.codegen.loops import WIDTH, Memory

DEPTH = 32  # steps that a tile holds along the sum
TILE = 1024  # bytes
PARTS = 3
LINE = 4 * WIDTH  # bytes of a row of a tile
_BLOCK = 4  # rows of a piece; rows and columns of what is turned at once: as many numbers as a quarter of a register
UNIT = WIDTH // _BLOCK  # pieces of a unit
_TOP, _HALF, _HUGE = 0xFFFF0000, 0x8000, 0xFEFF0000  # the bits of bfloat16; half of its last; twice what rounds to inf


class Pack:
    """Writes a function of (source, stride, following, target, rows or columns left, steps left, piece) that packs a
    piece of a unit: some rows of the tiles. A unit that is not whole is packed with its first piece.

    Elements lie side by side along the sum or across it, and the others `stride` bytes apart. Missing elements are
    zero. Another unit, `following` bytes further, is fetched into the cache. A row of a tile of a is a row's elements 0
    and 16, 1 and 17, …; one of b is that of all columns. Tiles of parts are two apart.

    Attributes:
        function: within a module.
    """

    def __init__(self, module: ir.Module, name: str, along: bool, turned: bool) -> None:
        type = ir.FunctionType(ir.VoidType(), [POINTER, I64, I64, POINTER, I64, I64, I64])
        self.function = ir.Function(module, type, name)
        self.function.linkage = "internal"
        for attribute in ("nounwind", "noinline"):
            self.function.attributes.add(attribute)
        self.along, self.turned = along, turned
        self.b = Builder(self.function.append_basic_block())
        self.e = Lanes(self.b, WIDTH)
        self.write()

    def write(self) -> None:
        """The whole piece, or a copy of it that is filled up with zeros."""
        b = self.b
        source, stride, following, target, across, steps, piece = self.function.args
        width = DEPTH if self.along else WIDTH
        copy = b.pointer(b.ptrtoint(b.alloca(ir.ArrayType(FLOAT, WIDTH * DEPTH)), I64))
        fits = [b.icmp_signed(">=", x, most) for x, most in ((across, WIDTH), (steps, DEPTH))]
        with b.if_else(b.and_(*fits)) as (whole, partial):
            with whole:
                self.packed(source, stride, following, target, piece)
            with partial, b.if_then(b.icmp_signed("==", piece, 0)):
                lines, lanes = (across, steps) if self.along else (steps, across)
                self.copied(source, stride, copy, lines, lanes, width)
                for each in range(UNIT):
                    step, number = (ir.Constant(I64, x) for x in (4 * width, each))
                    self.packed(copy, step, following, target, number)
        b.ret_void()

    def copied(
        self, source: ir.Value, stride: ir.Value, copy: ir.Value, lines: ir.Value, lanes: ir.Value, width: int
    ) -> None:
        """The lines that exist, with the elements that exist."""
        b, e, zero = self.b, self.e, ir.Constant(self.e.type(I32), None)
        for line in range(WIDTH * DEPTH // width):
            there = b.icmp_signed(">", lines, line)
            for first in range(0, width, WIDTH):
                left = b.select(there, b.sub(lanes, first), 0)
                some = Memory(e, ir.Constant(I64, first), left)
                place = b.behind(source, b.add(b.mul(stride, line), 4 * first))
                x = b.select(some.mask, some.load(e, place, I32, some.mask), zero)
                b.store(x, b.behind(copy, 4 * (line * width + first)), align=4)

    def packed(
        self, source: ir.Value, stride: ir.Value, following: ir.Value, target: ir.Value, piece: ir.Value
    ) -> None:
        """A piece of a whole unit. Each row is written before the next is read, so that the registers suffice."""
        b = self.b
        first = b.mul(piece, _BLOCK)
        target = b.behind(target, b.mul(first, LINE))
        begin = b.behind(source, b.mul(first, stride))

        def place(start: ir.Value, row: int, column: int) -> ir.Value:
            return b.behind(start, b.add(b.mul(stride, row), 4 * column))

        def halves(start: ir.Value, row: int) -> tuple[ir.Value, ir.Value]:
            """Where the first 16 steps of a row or column are, and the others."""
            return place(start, row, 0), place(start, row, WIDTH) if self.along else place(start, row + WIDTH, 0)

        for row in range(_BLOCK):
            for start in halves(begin, row):
                b.prefetch(b.behind(start, following))
        if self.turned:
            across = b.behind(source, b.mul(first, 4))
            found = [halves(across, row) for row in range(WIDTH)]
            for row, pair in enumerate(zip(*(self.turn(half) for half in zip(*found)))):
                self.put(target, row, pair)
            return
        for row in range(_BLOCK):
            self.put(target, row, [b.load(x, align=4, typ=self.e.type(FLOAT)) for x in halves(begin, row)])

    def put(self, target: ir.Value, row: int, pair: Sequence[ir.Value]) -> None:
        """A row of the tiles of all parts."""
        b = self.b
        for part, (low, high) in enumerate(zip(*map(self.parts, pair))):
            word = b.or_(b.lshr(low, 16), b.and_(high, _TOP))
            b.store(word, b.behind(target, 2 * TILE * part + LINE * row), align=4)

    def parts(self, x: ir.Value) -> list[ir.Value]:
        """Three numbers, in the upper halves of their bits, that add up to each. Infinities and NaN become the last
        part, which is multiplied only by the first part; so do numbers that would round to infinity.
        """
        b, e, found = self.b, self.e, []
        zero, bits = ir.Constant(e.type(I32), None), e.bits(x)
        finite = b.icmp_unsigned("<", b.add(bits, bits), _HUGE)
        for _ in range(PARTS - 1):
            near = b.and_(b.add(e.bits(x), _HALF), _TOP)
            near = b.select(finite, near, zero)
            found.append(near)
            x = b.fsub(x, e.floats(near))
        return [*found, e.bits(x)]

    def turn(self, rows: Sequence[ir.Value]) -> list[ir.Value]:
        """Four columns of the 16 rows that begin at these places. Quarters of a register are joined as they are read;
        then their blocks of 4 x 4 are transposed.
        """
        b = self.b
        quarter = ir.VectorType(FLOAT, _BLOCK)
        several = [
            self.joined([b.load(rows[_BLOCK * lane + i], align=4, typ=quarter) for lane in range(WIDTH // _BLOCK)])
            for i in range(_BLOCK)
        ]
        low, high = range(0, WIDTH, _BLOCK), range(WIDTH, 2 * WIDTH, _BLOCK)
        mixed, turned = [], []
        for i in (0, 2):
            for at in (0, 2):  # 0 of both, 1 of both; then 2 of both, 3 of both
                order = [start + at + k for both in zip(low, high) for k in (0, 1) for start in both]
                mixed.append(shuffled(b, several[i : i + 2], order))
        for i in (0, 1):
            for at in (0, 2):
                order = [start + at + k for both in zip(low, high) for start in both for k in (0, 1)]
                turned.append(shuffled(b, (mixed[i], mixed[i + 2]), order))
        return turned

    def joined(self, quarters: list[ir.Value]) -> ir.Value:
        """One register of four quarters."""
        b = self.b
        halves = [shuffled(b, quarters[i : i + 2], range(2 * _BLOCK)) for i in (0, 2)]
        return shuffled(b, halves, range(4 * _BLOCK))

"""Small products of float32 matrices by vector instructions, without packing, as machine code.

Where rows of b lie side by side across the sum, the sums of a block of results are kept in registers, and each step
adds the product of a column of a and a row of b. Where rows of a and columns of b lie along the sum, each of sixteen
results has a register of its own for sixteen steps at a time, whose lanes are added up at the end. They are 4 x 4
results; or, if a has fewer rows, 2 x 8 or 1 x 16: then no row is computed twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import llvmlite.ir as ir

from foreplan.jit.builder import FLOAT
from foreplan.runtime.cpu.codegen.lanes import exchanged, shuffled
from foreplan.runtime.cpu.codegen.loops import WIDTH, Memory
from foreplan.runtime.cpu.gemm.nest import ITEM, Form, Nest
from foreplan.runtime.cpu.gemm.registers import Block

RESULTS, SIDE = 16, 4  # of a block along the sum, and its rows at most


@dataclass(frozen=True)
class Product(Form):
    """The form of a product that a loop is made for; with an epilogue, and added to nothing.

    Attributes:
        along: if rows of a and columns of b lie along the sum, the rows of a block of results, 1, 2 or 4; 0 if rows of
            b lie across it.
        block: results that are computed together, across the sum.
    """

    along: int
    block: Block

    @property
    def keeps_a(self) -> bool:
        """See `Form`."""
        return self.along > 0

    @property
    def nest(self) -> type[Nest]:
        """See `Form`."""
        return _Along if self.along else _Across


class _Product(Nest):
    """The common part of both loops."""

    form: Product

    def make(self, row: ir.Value, column: ir.Value, results: Sequence[tuple[ir.Value, Memory]]) -> None:
        """The epilogue of some results of a row, if the row exists."""
        assert self.making is not None
        with self.b.if_then(self.b.icmp_signed("<", row, self.t["rows"])):
            places = self.making.at(row, column)
            for x, some in results:
                self.making.make(x, places, some)

    def vector(self, some: Memory, row: ir.Value) -> ir.Value:
        """Elements of a row, as numbers."""
        return self.e.floats(self.read(some, row))

    def added(self, ones: Sequence[ir.Value], others: Sequence[ir.Value], sums: Sequence[ir.Value]) -> list[ir.Value]:
        """Sums, and the product of each of some values with each of others."""
        pairs = [(x, y) for x in ones for y in others]
        return [self.b.intrinsic("fmuladd", *pair, onto) for pair, onto in zip(pairs, sums)]


class _Across(_Product):
    """Writes the loop for rows of b that lie across the sum."""

    def kept(self, a: ir.Value, other: ir.Value, y: ir.Value, at: ir.Value, extent: ir.Value) -> None:
        """All rows of a, with a block of columns."""
        b, t, block, column = self.b, self.t, self.form.block, at
        here = b.pointer(b.add(other, b.mul(column, ITEM)))
        some = [self.some(extent, WIDTH * i) for i in range(block.vectors)]
        with b.counted(0, b.blocks(t["rows"], block.rows)) as number:
            row = b.mul(number, block.rows)
            rows = self.lines(a, t["a_row"], row, t["rows"], block.rows)

            def add(step: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
                line, offset = b.behind(here, b.mul(step, t["b_step"])), b.mul(step, t["a_step"])
                numbers = [self.e.splat(b.load(b.behind(start, offset), align=ITEM, typ=FLOAT)) for start in rows]
                return self.added(numbers, [self.vector(each, line) for each in some], sums)

            sums = self.summed(self.depth, block.rows * block.vectors, add)
            for i in range(block.rows):
                results = sums[block.vectors * i : block.vectors * (i + 1)]
                self.make(b.add(row, i), column, list(zip(results, some)))


class _Along(_Product):
    """Writes the loop for rows of a and columns of b that lie along the sum."""

    def kept(self, a: ir.Value, other: ir.Value, y: ir.Value, at: ir.Value, extent: ir.Value) -> None:
        """Some rows of a, with all columns of b."""
        b, t, high, wide, row = self.b, self.t, self.form.along, RESULTS // self.form.along, at
        rows = self.lines(a, t["a_row"], row, t["rows"], high)
        with b.counted(0, b.blocks(t["columns"], wide)) as number:
            column = b.mul(number, wide)
            columns = self.lines(other, t["b_column"], column, t["columns"], wide)

            def add(step: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
                some = self.some(self.depth, step)
                ones, others = ([self.vector(some, start) for start in found] for found in (rows, columns))
                return self.added(ones, others, sums)

            total = self.total(self.summed(self.depth, RESULTS, add, WIDTH))
            there = self.some(b.least(b.sub(t["columns"], column), wide))
            for i in range(high):
                x = shuffled(b, (total, total), [(wide * i + lane) % WIDTH for lane in range(WIDTH)])
                self.make(b.add(row, i), column, [(x, there)])

    def total(self, sums: Sequence[ir.Value]) -> ir.Value:
        """The sums of the lanes of each of sixteen values, one in a lane."""
        for apart in (1, 2, 4, 8):
            pairs, orders = zip(sums[::2], sums[1::2]), exchanged(WIDTH, apart)
            sums = [self.b.fadd(*(shuffled(self.b, pair, order) for order in orders)) for pair in pairs]
        return sums[0]

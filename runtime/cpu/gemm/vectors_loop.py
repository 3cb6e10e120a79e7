"""Small products of float32 matrices by vector instructions, without packing, as machine code.

Where rows of b lie side by side across the sum, the sums of a block of results are kept in registers, and each step
adds the product of a column of a and a row of b. Where rows of a and columns of b lie along the sum, each of sixteen
results has a register of its own for sixteen steps at a time, whose lanes are added up at the end. They are 4 x 4
results; or, if a has fewer rows, 2 x 8 or 1 x 16: then no row is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import llvmlite.ir as ir

from foreplan.runtime.cpu.codegen.epilogue import Making, Then
from foreplan.runtime.cpu.codegen.lanes import FLOAT, INT32, INT64, Lanes, exchanged, shuffled
from foreplan.runtime.cpu.codegen.llvm import POINTER, compiled_as
from foreplan.runtime.cpu.codegen.loops import WIDTH, Memory, Writer
from foreplan.runtime.cpu.gemm.registers import Block

RESULTS, SIDE = 16, 4  # of a block along the sum, and its rows at most
# Numbers of the table, in order; `b_other` is the way from a step of b to the next across the sum, and from a column to
# the next along it. Operands of what is made follow.
ENTRIES = ("a", "a_row", "a_step", "b", "b_other", "rows", "columns", "depth")


@dataclass(frozen=True)
class Product:
    """The form of a product that a loop is made for.

    Attributes:
        along: if rows of a and columns of b lie along the sum, the rows of a block of results, 1, 2 or 4; 0 if rows of
            b lie across it.
        block: results that are computed together, across the sum.
        then: the epilogue of each result.
    """

    along: int
    block: Block
    then: Then


@cache
def compiled_product(product: Product) -> Callable[[int, int, bytes], None]:
    """A call of (start, stop, table) for blocks [start, stop) of results: columns across the sum, or rows along it."""
    return compiled_as(product, lambda: (_Along if product.along else _Across)(product).written())


class _Product(Writer):
    """The common part of both loops."""

    def __init__(self, product: Product) -> None:
        super().__init__()
        self.block = product.block
        self.e, self.making = Lanes(self.b, WIDTH), Making(self, product.then, len(ENTRIES))
        self.table_of = {name: self.entry(i) for i, name in enumerate(ENTRIES)}

    def summed(
        self, steps: ir.Value, each: int, count: int, add: Callable[[ir.Value, list[ir.Value]], list[ir.Value]]
    ) -> list[ir.Value]:
        """A number of sums, which begin with 0 and grow at steps 0, each, … below `steps`."""
        b, zero = self.b, ir.Constant(self.e.type(FLOAT), None)
        before = b.block
        check, body, after = (b.function.append_basic_block() for _ in range(3))
        b.branch(check)
        b.position_at_end(check)
        index, sums = b.phi(INT64), [b.phi(self.e.type(FLOAT)) for _ in range(count)]
        b.cbranch(b.icmp_signed("<", index, steps), body, after)
        b.position_at_end(body)
        new = [b.add(index, self.number(each)), *add(index, sums)]
        for phi, first, following in zip((index, *sums), (self.number(0), *[zero] * count), new):
            phi.add_incoming(first, before)
            phi.add_incoming(following, b.block)
        b.branch(check)
        b.position_at_end(after)
        return sums

    def rows_from(self, name: str, step: str, first: ir.Value, extent: str, count: int) -> list[ir.Value]:
        """The beginnings of some rows of a, or columns of b; beyond the end, the last one again."""
        b, t = self.b, self.table_of
        base, last = b.inttoptr(t[name], POINTER), b.sub(t[extent], self.number(1))
        found = []
        for i in range(count):
            row = b.add(first, self.number(i))
            row = b.select(b.icmp_signed("<", row, last), row, last)
            found.append(self.e.behind(base, b.mul(row, t[step])))
        return found

    def some(self, left: ir.Value, first: int = 0) -> Memory:
        """Sixteen elements from one on, or those that are left."""
        return Memory(self.e, self.number(first), self.b.sub(left, self.number(first)))

    def make(self, row: ir.Value, column: ir.Value, results: Sequence[tuple[ir.Value, Memory]]) -> None:
        """The epilogue of some results of a row, if the row exists."""
        with self.b.if_then(self.b.icmp_signed("<", row, self.table_of["rows"])):
            places = self.making.at(row, column)
            for x, some in results:
                self.making.make(x, places, some)

    def read(self, some: Memory, address: ir.Value) -> ir.Value:
        """The valid elements; the others are zero."""
        return self.e.floats(some.load(self.e, address, INT32, some.mask))

    def multiplied(self, a: ir.Value, b: ir.Value, onto: ir.Value) -> ir.Value:
        """A product, added."""
        return self.e.intrinsic("fmuladd", a, b, onto)


class _Across(_Product):
    """Writes the loop for rows of b that lie across the sum."""

    def write(self) -> None:
        b, t, columns, vectors = self.b, self.table_of, self.block.columns, self.block.vectors
        base = b.inttoptr(t["b"], POINTER)
        with self.counted(self.start, self.stop, 1) as block:
            column = b.mul(block, self.number(columns))
            some = [self.some(b.sub(t["columns"], column), WIDTH * i) for i in range(vectors)]
            here = self.e.behind(base, b.mul(column, self.number(4)))
            blocks = b.sdiv(b.add(t["rows"], self.number(self.block.rows - 1)), self.number(self.block.rows))
            with self.counted(self.number(0), blocks, 1) as number:
                row = b.mul(number, self.number(self.block.rows))
                a = self.rows_from("a", "a_row", row, "rows", self.block.rows)

                def add(step: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
                    line = self.e.behind(here, b.mul(step, t["b_other"]))
                    line_of = [
                        self.read(x, self.e.behind(line, self.number(4 * WIDTH * i))) for i, x in enumerate(some)
                    ]
                    offset = b.mul(step, t["a_step"])
                    numbers = [self.e.splat(b.load(self.e.behind(start, offset), align=4, typ=FLOAT)) for start in a]
                    pairs = [(x, y) for x in numbers for y in line_of]
                    return [self.multiplied(*pair, onto) for pair, onto in zip(pairs, sums)]

                sums = self.summed(t["depth"], 1, self.block.rows * vectors, add)
                for i in range(self.block.rows):
                    results = list(zip(sums[vectors * i : vectors * (i + 1)], some))
                    self.make(b.add(row, self.number(i)), column, results)
        b.ret_void()


class _Along(_Product):
    """Writes the loop for rows of a and columns of b that lie along the sum."""

    def __init__(self, product: Product) -> None:
        super().__init__(product)
        self.high, self.wide = product.along, RESULTS // product.along

    def write(self) -> None:
        b, t, wide = self.b, self.table_of, self.number(self.wide)
        with self.counted(self.start, self.stop, 1) as block:
            row = b.mul(block, self.number(self.high))
            a = self.rows_from("a", "a_row", row, "rows", self.high)
            blocks = b.sdiv(b.add(t["columns"], self.number(self.wide - 1)), wide)
            with self.counted(self.number(0), blocks, 1) as number:
                column = b.mul(number, wide)
                columns = self.rows_from("b", "b_other", column, "columns", self.wide)

                def add(step: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
                    some, offset = self.some(b.sub(t["depth"], step)), b.mul(step, self.number(4))
                    lines = [
                        [self.read(some, self.e.behind(start, offset)) for start in found] for found in (a, columns)
                    ]
                    pairs = [(x, y) for x in lines[0] for y in lines[1]]
                    return [self.multiplied(*pair, onto) for pair, onto in zip(pairs, sums)]

                total = self.totals(self.summed(t["depth"], WIDTH, RESULTS, add))
                left = b.sub(t["columns"], column)
                there = self.some(b.select(b.icmp_signed("<", left, wide), left, wide))
                for i in range(self.high):
                    x = shuffled(b, (total, total), [(self.wide * i + lane) % WIDTH for lane in range(WIDTH)])
                    self.make(b.add(row, self.number(i)), column, [(x, there)])
        b.ret_void()

    def totals(self, sums: Sequence[ir.Value]) -> ir.Value:
        """The sums of the lanes of each of sixteen values, one in a lane."""
        for apart in (1, 2, 4, 8):
            pairs, orders = zip(sums[::2], sums[1::2]), exchanged(WIDTH, apart)
            sums = [self.b.fadd(*(shuffled(self.b, pair, order) for order in orders)) for pair in pairs]
        return sums[0]

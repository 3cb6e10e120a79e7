"""Products of float32 matrices by vector instructions, as machine code.

The registers hold a block of results: some rows, and some vectors of columns. Each step along the sum multiplies an
element of each row of a by the vectors of a row of b. So rows of b are packed into *panels*, as wide as a block: all
steps of a panel follow one another. Some panels stay in a core's cache while the rows of a pass by. Rows of a are
packed only if steps lie far from one another. So are panels, unless all blocks are whole. At the edges blocks have
fewer rows, or fewer vectors. An epilogue works on results before they are written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import llvmlite.ir as ir

from foreplan.jit.builder import BIT, FLOAT, I32
from foreplan.runtime.cpu.codegen.lanes import Lanes
from foreplan.runtime.cpu.codegen.loops import WIDTH, Memory
from foreplan.runtime.cpu.codegen.transpose import transposed
from foreplan.runtime.cpu.gemm.nest import ITEM, Form, Nest
from foreplan.runtime.cpu.gemm.registers import Block

SIMPLE = 12  # parts of an epilogue whose instructions are repeated for each register
AHEAD = 4  # blocks of sixteen steps by which columns of b are fetched ahead while they are packed
STEPS_AHEAD = 16  # by which rows of a are


@dataclass(frozen=True)
class Product(Form):
    """The form of a product that a loop is made for.

    Attributes:
        packs_a: whether rows of a are packed, whose elements lie side by side across the sum.
        packs_b: whether panels of b are packed; else all columns make whole blocks, and are read where they lie.
        given: whether b lies in panels already.
        b_along: whether elements of b lie side by side along the sum, else across.
        block: results that are computed together.
        edge: the rows of the last ones, and the vectors of the last columns; 0 where they are as all others.
    """

    packs_a: bool
    packs_b: bool
    given: bool
    b_along: bool
    block: Block
    edge: Block

    passes = "none"
    further = ("most_rows",)  # of a that are packed at once

    @property
    def nest(self) -> type[Nest]:
        """See `Form`."""
        return _Product


@dataclass(frozen=True)
class _Results:
    """A block of results.

    Attributes:
        place: its address.
        origin: its row and column.
        left: rows and columns from there on.
    """

    place: ir.Value
    origin: tuple[ir.Value, ir.Value]
    left: tuple[ir.Value, ir.Value]


class _Product(Nest):
    """Writes such a loop."""

    form: Product

    def __init__(self, form: Product) -> None:
        super().__init__(form)
        b, t, self.block = self.b, self.t, form.block
        self.results, self.done = b.local(ir.ArrayType(FLOAT, self.block.rows * self.block.columns)), b.local(BIT)
        self.panel = b.mul(t["most_steps"], self.block.columns * ITEM)  # bytes
        count = b.blocks(t["most_kept"], self.block.columns) if form.packs_b else 0
        self.panels = b.pointer(t["scratch"])
        self.sliver = b.mul(t["most_steps"], self.block.packed * ITEM)  # bytes
        self.slivers = b.behind(self.panels, b.mul(count, self.panel))

    def kept(self, a: ir.Value, other: ir.Value, y: ir.Value, at: ir.Value, extent: ir.Value) -> None:
        """All rows of a, with the panels that are kept; those that are packed some at a time."""
        b, t, origin = self.b, self.t, at
        columns = b.add(other, b.mul(origin, t["b_column"]))
        panels, panel, line = self.panels, self.panel, b.index(self.block.columns * ITEM)
        if self.form.packs_b:
            (self.pack_along if self.form.b_along else self.pack_across)(columns, extent)
        elif self.form.given:
            panels = b.pointer(columns)
        else:
            panels, panel, line = b.pointer(columns), line, t["b_step"]
        with b.counted(0, b.blocks(t["rows"], t["most_rows"])) as some:
            first = b.mul(some, t["most_rows"])
            count = b.least(b.sub(t["rows"], first), t["most_rows"])
            if self.form.packs_a:
                self.pack_rows(b.pointer(b.add(a, b.mul(first, t["a_row"]))), count)
            with b.counted(0, b.blocks(count, self.block.rows)) as number:
                top = b.add(first, b.mul(number, self.block.rows))
                rows, step = self.rows_of(a, top, number)
                with b.counted(0, b.blocks(extent, self.block.columns)) as at:
                    here = b.mul(at, self.block.columns)
                    column = b.add(origin, here)
                    place = b.pointer(b.add(y, b.add(b.mul(top, t["y_row"]), b.mul(column, ITEM))))
                    block = _Results(place, (top, column), (b.sub(t["rows"], top), b.sub(extent, here)))
                    self.block_of(rows, step, b.behind(panels, b.mul(at, panel)), line, block)

    def block_of(
        self, rows: Sequence[ir.Value], step: ir.Value, panel: ir.Value, line: ir.Value, results: _Results
    ) -> None:
        """A block of results: a whole one, or one of an edge."""
        b, edge, whole = self.b, self.form.edge, self.block

        def compute(height: int, width: int) -> None:
            self.fetch(results.place, height, width)
            sums = self.sums(rows[:height], step, panel, line, width)
            b.store(self.written_at_once(sums, height, width, results), self.done)

        def of_all_rows() -> None:
            few = partial(compute, whole.rows, edge.vectors)
            self.choose(results.left[1], edge.vectors * WIDTH, few, partial(compute, whole.rows, whole.vectors))

        self.choose(results.left[0], edge.rows, partial(compute, edge.rows, whole.vectors), of_all_rows)
        with b.if_then(b.icmp_unsigned("==", b.load(self.done, typ=BIT), 0)):
            starts = self.making.at(*results.origin) if self.making else []
            self.finish(self.results, results.place, starts, results.left, (whole.rows, whole.columns))

    def choose(self, left: ir.Value, most: int, few: Callable[[], None], many: Callable[[], None]) -> None:
        """What is computed where no more than so much is left, if that is anything; else."""
        if not most:
            many()
            return
        with self.b.if_else(self.b.icmp_signed("<=", left, most)) as (yes, no):
            with yes:
                few()
            with no:
                many()

    def rows_of(self, a: ir.Value, top: ir.Value, number: ir.Value) -> tuple[list[ir.Value], ir.Value]:
        """The beginnings of the rows of a block, and the bytes to the next step.

        Args:
            number: of the block among those that are packed together.
        """
        b = self.b
        if not self.form.packs_a:
            return self.lines(a, self.t["a_row"], top, self.t["rows"], self.block.rows), self.t["a_step"]
        sliver = b.behind(self.slivers, b.mul(number, self.sliver))
        return [b.behind(sliver, ITEM * i) for i in range(self.block.rows)], b.index(self.block.packed * ITEM)

    def sums(
        self, rows: Sequence[ir.Value], step: ir.Value, panel: ir.Value, line: ir.Value, vectors: int
    ) -> list[ir.Value]:
        """The sums of a block of results, row by row.

        Args:
            step: bytes to the next step of a; `line`: of the panel.
            vectors: of a row.
        """
        b, type = self.b, self.e.type(FLOAT)

        def add(index: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
            here = b.behind(panel, b.mul(index, line))
            of_b = [b.load(b.behind(here, ITEM * WIDTH * v), align=ITEM, typ=type) for v in range(vectors)]
            offset, new = b.mul(index, step), list[ir.Value]()
            for row in rows:
                x = self.e.splat(b.load(b.behind(row, offset), align=ITEM, typ=FLOAT))
                new += [b.intrinsic("fmuladd", x, y, sums[len(new) + v]) for v, y in enumerate(of_b)]
            return new

        return self.summed(self.depth, len(rows) * vectors, add)

    def fetch(self, place: ir.Value, height: int, vectors: int) -> None:
        """Let the lines of a block of results come to the cache, to be written."""
        for i in range(height):
            row = self.b.behind(place, self.b.mul(self.t["y_row"], i))
            for v in range(vectors):
                self.b.prefetch(self.b.behind(row, ITEM * WIDTH * v), write=True)

    def written_at_once(self, sums: Sequence[ir.Value], height: int, vectors: int, results: _Results) -> ir.Value:
        """Whether a block was written from registers: a whole one, to which nothing is added, and with which little is
        done, if anything. Else it is in memory now.
        """
        b = self.b
        whole = [b.icmp_signed(">=", x, most) for x, most in zip(results.left, (height, vectors * WIDTH))]
        direct = b.and_(b.and_(*whole), b.not_(self.adds))
        simple = self.making is not None and self.making.parts <= SIMPLE and height == self.block.rows
        if self.making and not simple:
            direct = b.and_(direct, b.not_(self.last))
        with b.if_else(direct) as (yes, no):
            with yes:
                if simple:
                    with b.if_else(self.last) as (made, partial):
                        with made:
                            self.make(sums, vectors, results)
                        with partial:
                            self.store(sums, vectors, results.place, self.t["y_row"])
                else:
                    self.store(sums, vectors, results.place, self.t["y_row"])
            with no:
                self.store(sums, vectors, self.results, b.index(self.block.columns * ITEM))
        return direct

    def make(self, sums: Sequence[ir.Value], vectors: int, results: _Results) -> None:
        """Give a block to the epilogue from registers."""
        assert self.making is not None
        starts = self.making.at(*results.origin)
        for i, x in enumerate(sums):
            row, v = divmod(i, vectors)
            self.making.make(x, self.making.below(starts, row), Memory(self.e, WIDTH * v, None))

    def store(self, sums: Sequence[ir.Value], vectors: int, place: ir.Value, stride: ir.Value) -> None:
        """Write a block of results."""
        b = self.b
        for i, x in enumerate(sums):
            row = b.behind(place, b.mul(stride, i // vectors))
            b.store(x, b.behind(row, ITEM * WIDTH * (i % vectors)), align=ITEM)

    def pack_across(self, source: ir.Value, extent: ir.Value) -> None:
        """Panels of b from rows that lie across the sum, row after row."""
        b = self.b
        with b.counted(0, self.depth) as step:
            row = b.pointer(b.add(source, b.mul(step, self.t["b_step"])))
            line = b.behind(self.panels, b.mul(step, self.block.columns * ITEM))
            with b.counted(0, b.blocks(extent, self.block.columns)) as at:
                column = b.mul(at, self.block.columns)
                for v in range(self.block.vectors):
                    x = self.read(self.some(extent, b.add(column, WIDTH * v)), row)
                    b.store(x, b.behind(line, b.add(b.mul(at, self.panel), ITEM * WIDTH * v)), align=64)

    def pack_along(self, source: ir.Value, extent: ir.Value) -> None:
        """Panels of b from columns that lie along the sum: sixteen columns and steps at a time change places."""
        b = self.b
        with b.counted(0, b.blocks(extent, WIDTH)) as strip:
            panel, vector = b.sdiv(strip, self.block.vectors), b.srem(strip, self.block.vectors)
            place = b.add(b.mul(panel, self.panel), b.mul(vector, ITEM * WIDTH))
            columns = self.lines(source, self.t["b_column"], b.mul(strip, WIDTH), extent, WIDTH)
            with b.counted(0, b.blocks(self.depth, WIDTH)) as turn:
                step = b.mul(turn, WIDTH)
                offset = b.mul(step, ITEM)
                for column in columns:
                    b.prefetch(b.behind(column, b.add(offset, AHEAD * WIDTH * ITEM)))
                some = self.some(self.depth, step)
                for i, x in enumerate(transposed(b, [self.read(some, column) for column in columns])):
                    line = b.mul(b.add(step, i), self.block.columns * ITEM)
                    b.store(x, b.behind(self.panels, b.add(place, line)), align=64)

    def pack_rows(self, source: ir.Value, count: ir.Value) -> None:
        """The rows of some blocks from columns of a that lie across the sum, column after column."""
        b, t, each = self.b, self.t, self.block.rows
        e = Lanes(b, self.block.packed)
        with b.counted(0, self.depth) as step:
            column = b.behind(source, b.mul(step, t["a_step"]))
            line = b.behind(self.slivers, b.mul(step, self.block.packed * ITEM))
            with b.counted(0, b.blocks(count, each)) as at:
                row = b.mul(at, each)
                some = Memory(e, row, b.least(b.sub(count, row), each))
                b.prefetch(b.behind(column, b.add(b.mul(t["a_step"], STEPS_AHEAD), b.mul(row, ITEM))))
                x = some.load(e, b.behind(column, b.mul(row, ITEM)), I32, some.mask)
                b.store(x, b.behind(line, b.mul(at, self.sliver)), align=self.block.packed * ITEM)

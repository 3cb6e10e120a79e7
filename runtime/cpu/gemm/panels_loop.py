"""Products of float32 matrices by vector instructions, as machine code.

The registers hold a block of results: some rows, and some vectors of columns. Each step along the sum multiplies an
element of each row of a by the vectors of a row of b. So rows of b are packed into *panels*, as wide as a block: all
steps of a panel follow one another. Some panels stay in a core's cache while the rows of a pass by (Goto and van de
Geijn, "Anatomy of high-performance matrix multiplication", 2008). Rows of a are packed only if steps lie far from one
another. So are panels, unless all blocks are whole. At the edges blocks have fewer rows, or fewer vectors. An epilogue
works on results before they are written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import llvmlite.ir as ir

from foreplan.runtime.cpu.codegen.epilogue import Making, Then
from foreplan.runtime.cpu.codegen.lanes import BIT, FLOAT, INT32, INT64, Lanes
from foreplan.runtime.cpu.codegen.llvm import POINTER, compiled_as
from foreplan.runtime.cpu.codegen.loops import WIDTH, Memory, Writer
from foreplan.runtime.cpu.codegen.transpose import transposed
from foreplan.runtime.cpu.gemm.registers import Block

ITEM = 4  # bytes of an element
SIMPLE = 12  # parts of an epilogue whose instructions are repeated for each register
AHEAD = 4  # blocks of sixteen steps by which columns of b are fetched ahead while they are packed
STEPS_AHEAD = 16  # by which rows of a are
# Numbers of the table, in order: addresses, bytes to the next matrix, to the next row or column, and to the next step;
# scratch memory; extents; columns, rows, and steps along the sum, that are packed at once; whether what is there is
# added to. Further operands of the epilogue follow.
ENTRIES = (
    *("a", "a_matrix", "a_row", "a_step", "b", "b_matrix", "b_column", "b_step", "y", "y_matrix", "y_row"),
    *("scratch", "rows", "columns", "depth", "most_kept", "most_rows", "most_steps", "adds"),
)


@dataclass(frozen=True)
class Product:
    """The form of a product that a loop is made for.

    Attributes:
        packs_a: whether rows of a are packed, whose elements lie side by side across the sum.
        packs_b: whether panels of b are packed; else all columns make whole blocks, and are read where they lie.
        given: whether b lies in panels already.
        b_along: whether elements of b lie side by side along the sum, else across.
        block: results that are computed together.
        edge: the rows of the last ones, and the vectors of the last columns; 0 where they are as all others.
        then: the epilogue of each result; None: results are written.
    """

    packs_a: bool
    packs_b: bool
    given: bool
    b_along: bool
    block: Block
    edge: Block
    then: Then | None = None


@cache
def compiled_product(product: Product) -> Callable[[int, int, bytes], None]:
    """A call of (start, stop, table) for matrices [start, stop): y = a·b, or y += a·b, or an epilogue of a·b while y
    holds sums of some steps.
    """
    return compiled_as(product, lambda: _Product(product).written(), "none")


@dataclass(frozen=True)
class _Results:
    """A block of results.

    Attributes:
        place: its address.
        origin: its row and column.
        left: rows and columns from there on.
        adds: whether what is there is added to.
        last: whether no steps along the sum are left.
    """

    place: ir.Value
    origin: tuple[ir.Value, ir.Value]
    left: tuple[ir.Value, ir.Value]
    adds: ir.Value
    last: ir.Value


class _Product(Writer):
    """Writes such a loop."""

    def __init__(self, product: Product) -> None:
        super().__init__()
        self.product, self.block, self.e = product, product.block, Lanes(self.b, WIDTH)
        self.table_of = {name: self.entry(i) for i, name in enumerate(ENTRIES)}
        self.making = Making(self, product.then, len(ENTRIES)) if product.then else None
        self.results, self.done = self.local(ir.ArrayType(FLOAT, self.block.rows * self.block.columns)), self.local(BIT)
        n = self.number
        self.panel = self.b.mul(self.table_of["most_steps"], n(self.block.columns * ITEM))  # bytes
        count = self.blocks(self.table_of["most_kept"], self.block.columns) if product.packs_b else n(0)
        self.panels = self.pointer(self.table_of["scratch"])
        self.sliver = self.b.mul(self.table_of["most_steps"], n(self.block.packed * ITEM))  # bytes
        self.slivers = self.e.behind(self.panels, self.b.mul(count, self.panel))

    def write(self) -> None:
        """All matrices: of each, some steps along the sum at a time; of these, some columns."""
        b, t, zero = self.b, self.table_of, self.number(0)
        with self.counted(self.start, self.stop, 1) as matrix:
            a0, b0, y0 = (b.add(t[x], b.mul(matrix, t[f"{x}_matrix"])) for x in "aby")
            with self.counted(zero, self.blocks(t["depth"], t["most_steps"]), 1) as segment:
                first = b.mul(segment, t["most_steps"])
                left = b.sub(t["depth"], first)
                depth, last = self.least(left, t["most_steps"]), b.icmp_signed("<=", left, t["most_steps"])
                adds = b.or_(b.icmp_signed("!=", t["adds"], zero), b.icmp_signed(">", first, zero))
                a1, b1 = (b.add(x, b.mul(first, t[f"{name}_step"])) for name, x in zip("ab", (a0, b0)))
                with self.counted(zero, self.blocks(t["columns"], t["most_kept"]), 1) as kept:
                    origin = b.mul(kept, t["most_kept"])
                    extent = self.least(b.sub(t["columns"], origin), t["most_kept"])
                    b2 = self.pointer(b.add(b1, b.mul(origin, t["b_column"])))
                    if self.product.packs_b:
                        (self.pack_along if self.product.b_along else self.pack_across)(b2, extent, depth)
                    self.pass_by(a1, b2, y0, origin, extent, depth, adds, last)
        b.ret_void()

    def pass_by(
        self, a: ir.Value, columns: ir.Value, y: ir.Value, origin: ir.Value, extent: ir.Value, depth: ir.Value,
        adds: ir.Value, last: ir.Value,
    ) -> None:  # fmt: skip
        """All rows of a, with the panels that are kept; those that are packed some at a time."""
        b, t, n, width = self.b, self.table_of, self.number, self.block.columns * ITEM
        panels, panel, line = self.panels, self.panel, n(width)
        if self.product.given:
            panels = columns
        elif not self.product.packs_b:
            panels, panel, line = columns, n(width), t["b_step"]
        with self.counted(n(0), self.blocks(t["rows"], t["most_rows"]), 1) as some:
            first = b.mul(some, t["most_rows"])
            count = self.least(b.sub(t["rows"], first), t["most_rows"])
            if self.product.packs_a:
                self.pack_rows(self.pointer(b.add(a, b.mul(first, t["a_row"]))), count, depth)
            with self.counted(n(0), self.blocks(count, self.block.rows), 1) as number:
                rows, step = self.rows_of(a, first, number)
                top = b.add(first, b.mul(number, n(self.block.rows)))
                with self.counted(n(0), self.blocks(extent, self.block.columns), 1) as at:
                    here = b.mul(at, n(self.block.columns))
                    column = b.add(origin, here)
                    place = self.pointer(b.add(y, b.add(b.mul(top, t["y_row"]), b.mul(column, n(ITEM)))))
                    left = b.sub(t["rows"], top), b.sub(extent, here)
                    block = _Results(place, (top, column), left, adds, last)
                    self.block_of(rows, step, self.e.behind(panels, b.mul(at, panel)), line, depth, block)

    def block_of(
        self, rows: Sequence[ir.Value], step: ir.Value, panel: ir.Value, line: ir.Value, depth: ir.Value,
        results: _Results,
    ) -> None:  # fmt: skip
        """A block of results: a whole one, or one of an edge."""
        b, edge, whole = self.b, self.product.edge, self.block

        def compute(height: int, width: int) -> None:
            self.fetch(results.place, height, width)
            sums = self.summed(rows[:height], step, panel, line, depth, width)
            b.store(self.written_at_once(sums, height, width, results), self.done)

        def of_all_rows() -> None:
            few = partial(compute, whole.rows, edge.vectors)
            self.choose(results.left[1], edge.vectors * WIDTH, few, partial(compute, whole.rows, whole.vectors))

        self.choose(results.left[0], edge.rows, partial(compute, edge.rows, whole.vectors), of_all_rows)
        with b.if_then(b.icmp_unsigned("==", b.load(self.done, typ=BIT), ir.Constant(BIT, 0))):
            self.finish(results)

    def choose(self, left: ir.Value, most: int, few: Callable[[], None], many: Callable[[], None]) -> None:
        """What is computed where no more than so much is left, if that is anything; else."""
        if not most:
            many()
            return
        with self.b.if_else(self.b.icmp_signed("<=", left, self.number(most))) as (yes, no):
            with yes:
                few()
            with no:
                many()

    def rows_of(self, a: ir.Value, first: ir.Value, number: ir.Value) -> tuple[list[ir.Value], ir.Value]:
        """The beginnings of the rows of a block, and the bytes to the next step; beyond the end, the last row again.

        Args:
            first: row of those that are packed together.
            number: of the block among them.
        """
        b, t, n = self.b, self.table_of, self.number
        if self.product.packs_a:
            sliver = self.e.behind(self.slivers, b.mul(number, self.sliver))
            return [self.e.behind(sliver, n(ITEM * i)) for i in range(self.block.rows)], n(self.block.packed * ITEM)
        found, end, top = [], b.sub(t["rows"], n(1)), b.add(first, b.mul(number, n(self.block.rows)))
        for i in range(self.block.rows):
            row = self.least(b.add(top, n(i)), end)
            found.append(self.pointer(b.add(a, b.mul(row, t["a_row"]))))
        return found, t["a_step"]

    def summed(
        self, rows: Sequence[ir.Value], step: ir.Value, panel: ir.Value, line: ir.Value, depth: ir.Value, vectors: int
    ) -> list[ir.Value]:
        """The sums of a block of results, row by row.

        Args:
            step: bytes to the next step of a; `line`: of the panel.
            vectors: of a row.
        """
        b, n = self.b, self.number
        zero = ir.Constant(self.e.type(FLOAT), None)
        before, body, after = b.block, b.function.append_basic_block(), b.function.append_basic_block()
        b.branch(body)
        b.position_at_end(body)
        index = b.phi(INT64)
        sums = [b.phi(self.e.type(FLOAT)) for _ in range(len(rows) * vectors)]
        here, type = self.e.behind(panel, b.mul(index, line)), self.e.type(FLOAT)
        of_b = [b.load(self.e.behind(here, n(ITEM * WIDTH * v)), align=ITEM, typ=type) for v in range(vectors)]
        offset, new = b.mul(index, step), []
        for i, row in enumerate(rows):
            x = self.e.splat(b.load(self.e.behind(row, offset), align=ITEM, typ=FLOAT))
            new += [self.e.intrinsic("fmuladd", x, y, sums[i * vectors + v]) for v, y in enumerate(of_b)]
        following = b.add(index, n(1))
        for phi, start, end in zip((index, *sums), (n(0), *[zero] * len(sums)), (following, *new)):
            phi.add_incoming(start, before)
            phi.add_incoming(end, body)
        b.cbranch(b.icmp_signed("<", following, depth), body, after)
        b.position_at_end(after)
        return new

    def fetch(self, place: ir.Value, height: int, vectors: int) -> None:
        """Let the lines of a block of results come to the cache, to be written."""
        for i in range(height):
            row = self.e.behind(place, self.b.mul(self.table_of["y_row"], self.number(i)))
            for v in range(vectors):
                self.e.prefetch(self.e.behind(row, self.number(ITEM * WIDTH * v)), write=True)

    def written_at_once(self, sums: Sequence[ir.Value], height: int, vectors: int, results: _Results) -> ir.Value:
        """Whether a block was written from registers: a whole one, to which nothing is added, and with which little is
        done, if anything. Else it is in memory now.
        """
        b, n = self.b, self.number
        whole = [b.icmp_signed(">=", x, n(most)) for x, most in zip(results.left, (height, vectors * WIDTH))]
        direct = b.and_(b.and_(*whole), b.not_(results.adds))
        simple = self.making is not None and self.making.parts <= SIMPLE and height == self.block.rows
        if self.making and not simple:
            direct = b.and_(direct, b.not_(results.last))
        with b.if_else(direct) as (yes, no):
            with yes:
                if simple:
                    with b.if_else(results.last) as (made, partial):
                        with made:
                            self.make(sums, vectors, results)
                        with partial:
                            self.store(sums, vectors, results.place, self.table_of["y_row"])
                else:
                    self.store(sums, vectors, results.place, self.table_of["y_row"])
            with no:
                self.store(sums, vectors, self.results, n(self.block.columns * ITEM))
        return direct

    def make(self, sums: Sequence[ir.Value], vectors: int, results: _Results) -> None:
        """Give a block to the epilogue from registers."""
        assert self.making is not None
        starts = self.making.at(*results.origin)
        for i, x in enumerate(sums):
            row, v = divmod(i, vectors)
            here = self.making.below(starts, self.number(row))
            self.making.make(x, here, Memory(self.e, self.number(WIDTH * v), None))

    def finish(self, results: _Results) -> None:
        """Write results from memory, row by row."""
        b, n = self.b, self.number
        starts = self.making.at(*results.origin) if self.making else []
        with self.counted(n(0), self.least(results.left[0], n(self.block.rows)), 1) as row:
            target = self.e.behind(results.place, b.mul(row, self.table_of["y_row"]))
            source = self.e.behind(self.results, b.mul(row, n(self.block.columns * ITEM)))
            here = self.making.below(starts, row) if self.making else []
            extent = self.least(results.left[1], n(self.block.columns))
            with self.counted(n(0), self.blocks(extent, WIDTH), 1) as vector:
                at = b.mul(vector, n(WIDTH))
                some = Memory(self.e, at, b.sub(results.left[1], at))
                self.merge(source, target, here, some, results.adds, results.last)

    def store(self, sums: Sequence[ir.Value], vectors: int, place: ir.Value, stride: ir.Value) -> None:
        """Write a block of results."""
        b, n = self.b, self.number
        for i, x in enumerate(sums):
            row = self.e.behind(place, b.mul(stride, n(i // vectors)))
            b.store(x, self.e.behind(row, n(ITEM * WIDTH * (i % vectors))), align=ITEM)

    def merge(
        self, source: ir.Value, target: ir.Value, here: Sequence[ir.Value], some: Memory, adds: ir.Value, last: ir.Value
    ) -> None:
        """Sixteen results of a row: added to what is there, then written, or given to the epilogue."""
        b, e = self.b, self.e
        offset = b.mul(some.at, self.number(ITEM))
        x, place = b.load(e.behind(source, offset), align=ITEM, typ=e.type(FLOAT)), e.behind(target, offset)
        old = e.floats(some.load(e, place, INT32, b.select(adds, some.mask, e.constant(BIT, 0))))
        x = b.select(adds, b.fadd(x, old), x)
        if self.making is None:
            some.store(e, place, INT32, e.bits(x), some.mask)
            return
        with b.if_else(last) as (made, partial):
            with partial:
                some.store(e, place, INT32, e.bits(x), some.mask)
            with made:
                self.making.make(x, here, some)

    def pack_across(self, source: ir.Value, extent: ir.Value, depth: ir.Value) -> None:
        """Panels of b from rows that lie across the sum, row after row."""
        b, t, n, e = self.b, self.table_of, self.number, self.e
        with self.counted(n(0), depth, 1) as step:
            row = e.behind(source, b.mul(step, t["b_step"]))
            line = e.behind(self.panels, b.mul(step, n(self.block.columns * ITEM)))
            with self.counted(n(0), self.blocks(extent, self.block.columns), 1) as at:
                column = b.mul(at, n(self.block.columns))
                for v in range(self.block.vectors):
                    here = b.add(column, n(WIDTH * v))
                    some = Memory(e, here, b.sub(extent, here))
                    x = some.load(e, e.behind(row, b.mul(here, n(ITEM))), INT32, some.mask)
                    place = e.behind(line, b.add(b.mul(at, self.panel), n(ITEM * WIDTH * v)))
                    b.store(x, place, align=64)

    def pack_along(self, source: ir.Value, extent: ir.Value, depth: ir.Value) -> None:
        """Panels of b from columns that lie along the sum: sixteen columns and steps at a time change places."""
        b, t, n, e = self.b, self.table_of, self.number, self.e
        end = b.sub(extent, n(1))
        with self.counted(n(0), self.blocks(extent, WIDTH), 1) as strip:
            first = b.mul(strip, n(WIDTH))
            panel, vector = b.sdiv(strip, n(self.block.vectors)), b.srem(strip, n(self.block.vectors))
            place = b.add(b.mul(panel, self.panel), b.mul(vector, n(ITEM * WIDTH)))
            columns = [
                e.behind(source, b.mul(self.least(b.add(first, n(i)), end), t["b_column"])) for i in range(WIDTH)
            ]
            with self.counted(n(0), self.blocks(depth, WIDTH), 1) as turn:
                step = b.mul(turn, n(WIDTH))
                some = Memory(e, step, b.sub(depth, step))
                offset = b.mul(step, n(ITEM))
                for column in columns:
                    e.prefetch(e.behind(column, b.add(offset, n(AHEAD * WIDTH * ITEM))))
                rows = [some.load(e, e.behind(column, offset), INT32, some.mask) for column in columns]
                for i, x in enumerate(transposed(b, rows)):
                    line = b.mul(b.add(step, n(i)), n(self.block.columns * ITEM))
                    b.store(x, e.behind(self.panels, b.add(place, line)), align=64)

    def pack_rows(self, source: ir.Value, count: ir.Value, depth: ir.Value) -> None:
        """The rows of some blocks from columns of a that lie across the sum, column after column."""
        b, t, n, each = self.b, self.table_of, self.number, self.block.rows
        e = Lanes(b, self.block.packed)
        with self.counted(n(0), depth, 1) as step:
            column = e.behind(source, b.mul(step, t["a_step"]))
            line = e.behind(self.slivers, b.mul(step, n(self.block.packed * ITEM)))
            with self.counted(n(0), self.blocks(count, each), 1) as at:
                row = b.mul(at, n(each))
                some = Memory(e, row, self.least(b.sub(count, row), n(each)))
                e.prefetch(e.behind(column, b.add(b.mul(t["a_step"], n(STEPS_AHEAD)), b.mul(row, n(ITEM)))))
                x = some.load(e, e.behind(column, b.mul(row, n(ITEM))), INT32, some.mask)
                b.store(x, e.behind(line, b.mul(at, self.sliver)), align=self.block.packed * ITEM)

    def pointer(self, address: ir.Value) -> ir.Value:
        """A number as an address."""
        return self.b.inttoptr(address, POINTER)

    def least(self, x: ir.Value, y: ir.Value) -> ir.Value:
        """The smaller number."""
        return self.b.select(self.b.icmp_signed("<", x, y), x, y)

    def blocks(self, extent: ir.Value, each: ir.Value | int) -> ir.Value:
        """How many blocks there are, the last perhaps smaller."""
        each = self.number(each) if isinstance(each, int) else each
        return self.b.sdiv(self.b.add(extent, self.b.sub(each, self.number(1))), each)

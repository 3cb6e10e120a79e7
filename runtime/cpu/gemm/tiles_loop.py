"""Products of float32 matrices on a processor's tile registers, as machine code.

Tiles multiply bfloat16 and add in float32 (AMX, "Intel Architecture Instruction Set Extensions", TDPBF16PS). A float32
number is the sum of three parts of bfloat16 (see `tiles_pack`), so six products of such parts give a product with an
error below one rounding of float32.

Operands are packed when they are needed. 32 rows or columns make a *panel*. For each 32 steps along the sum, it holds
three pairs of tiles, a pair for each part. A *unit* is half of that: 16 rows or columns and 32 steps. The tile
registers hold 32 x 32 results; while they add up, the vector units pack the next operands. An epilogue works on results
before they are written, in a core's first cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import llvmlite.ir as ir

from foreplan.runtime.cpu.codegen.epilogue import Making, Then
from foreplan.runtime.cpu.codegen.lanes import BIT, FLOAT, INT8, INT32, INT64, Lanes
from foreplan.runtime.cpu.codegen.llvm import POINTER, compiled_as
from foreplan.runtime.cpu.codegen.loops import CONTIGUOUS, WIDTH, Memory, Writer
from foreplan.runtime.cpu.gemm.tiles_pack import DEPTH, LINE, PARTS, TILE, UNIT, Pack

SIDE = 32  # results of a block of registers, along both axes
STEP = 2 * PARTS * TILE  # bytes of a panel for `DEPTH` steps
PIECES, TURNS = 2 * UNIT, 4  # of those bytes, packed one by one; how often some are while a step's tiles are multiplied
# The pairs of parts that are multiplied, in order: each pair shares a part with the one before, and large products come
# last.
_PRODUCTS = ((0, 2), (0, 1), (1, 1), (1, 0), (2, 0), (0, 0))


@dataclass(frozen=True)
class Product:
    """The form of a product that a loop is made for.

    Attributes:
        a_along, b_along: whether elements of an operand lie side by side along the sum, else across.
        keeps_a: whether panels of a stay in a core's cache while those of b pass; else b's stay.
        then: the epilogue of each result; None: results are written.
    """

    a_along: bool
    b_along: bool
    keeps_a: bool
    then: Then | None = None


@dataclass(frozen=True)
class _Factor:
    """The entries of the table for an operand of the product, and its panels."""

    base: ir.Value
    across: ir.Value
    along: ir.Value
    following: ir.Value
    extent: ir.Value
    pack: ir.Function
    is_along: bool


# Numbers of the table, in order: addresses, bytes to the next matrix, to the next element along both axes, and to the
# unit that is fetched ahead; extents; rows or columns, and steps along the sum, that are packed at once; whether what
# is there is added to. Then for each further operand, and each output, its address and bytes to the next row; and the
# configuration of the tiles.
ENTRIES = (
    *("a", "a_matrix", "a_row", "a_step", "a_following"),
    *("b", "b_matrix", "b_column", "b_step", "b_following"),
    *("y", "y_matrix", "y_row"),
    *("scratch", "rows", "columns", "depth", "most_kept", "most_steps", "adds"),
)
CONFIGURATION = bytes([1, *[0] * 15, *[LINE, 0] * 8, *[0] * 16, *[16] * 8, *[0] * 8])  # eight tiles of 16 full rows


@cache
def compiled_product(product: Product) -> Callable[[int, int, bytes], None]:
    """A call of (start, stop, table) for matrices [start, stop): y = a·b, or y += a·b, or an epilogue of a·b while y
    holds sums of some steps.
    """
    return compiled_as(product, lambda: _Product(product).written())


class _Product(Writer):
    """Writes such a loop."""

    def __init__(self, product: Product) -> None:
        super().__init__()
        self.product, self.e = product, Lanes(self.b, WIDTH)
        self.table_of = {name: self.entry(i) for i, name in enumerate(ENTRIES)}
        self.making = Making(self, product.then, len(ENTRIES)) if product.then else None
        a_turned, b_turned = not product.a_along, product.b_along
        self.pack_a = Pack(self.function.module, "pack_a", product.a_along, a_turned).function
        same = a_turned == b_turned and product.a_along == product.b_along
        self.pack_b = self.pack_a if same else Pack(self.function.module, "pack_b", product.b_along, b_turned).function
        self.results = self.local(ir.ArrayType(FLOAT, SIDE * SIDE))  # of an edge, or to be added
        self.packed = self.local(INT64)  # pieces of the next panel

    def write(self) -> None:
        """All matrices: of each, some steps along the sum at a time; of these, some rows or columns."""
        b, t, zero = self.b, self.table_of, self.number(0)
        entries = len(ENTRIES) + (self.making.entries if self.making else 0)
        self.tiles("ldtilecfg", self.e.behind(self.table, self.number(8 * entries)))
        with self.counted(self.start, self.stop, 1) as matrix:
            bases = {x: b.add(t[x], b.mul(matrix, t[f"{x}_matrix"])) for x in ("a", "b", "y")}
            with self.counted(zero, self.blocks(t["depth"], t["most_steps"]), 1) as number:
                first = b.mul(number, t["most_steps"])
                left = b.sub(t["depth"], first)
                depth = self.least(left, t["most_steps"])
                more = b.or_(b.icmp_signed("!=", t["adds"], zero), b.icmp_signed(">", first, zero))
                last = b.icmp_signed("<=", left, t["most_steps"]) if self.making else ir.Constant(BIT, 0)
                kept, passing = self.factors(bases, first)
                with self.counted(zero, self.blocks(kept.extent, t["most_kept"]), 1) as block:
                    at = b.mul(block, t["most_kept"])
                    base = b.add(kept.base, b.mul(at, kept.across))
                    some = replace(kept, base=base, extent=self.least(b.sub(kept.extent, at), t["most_kept"]))
                    origin = (at, zero) if self.product.keeps_a else (zero, at)
                    _Block(self, some, passing, bases["y"], origin, depth, more, last).write()
        self.tiles("tilerelease")
        b.ret_void()

    def factors(self, bases: Mapping[str, ir.Value], first: ir.Value) -> tuple[_Factor, _Factor]:
        """The operand with panels that are kept, and the other one, from a step along the sum on."""
        b, t, product, found = self.b, self.table_of, self.product, []
        packs = (self.pack_a, product.a_along), (self.pack_b, product.b_along)
        for name, across, extent, how in zip("ab", ("a_row", "b_column"), ("rows", "columns"), packs):
            base, along = b.add(bases[name], b.mul(first, t[f"{name}_step"])), t[f"{name}_step"]
            found.append(_Factor(base, t[across], along, t[f"{name}_following"], t[extent], *how))
        return (found[0], found[1]) if product.keeps_a else (found[1], found[0])

    def pointer(self, address: ir.Value) -> ir.Value:
        """A number as an address."""
        return self.b.inttoptr(address, POINTER)

    def least(self, x: ir.Value, y: ir.Value) -> ir.Value:
        """The smaller number."""
        return self.b.select(self.b.icmp_signed("<", x, y), x, y)

    def blocks(self, extent: ir.Value, each: ir.Value) -> ir.Value:
        """How many blocks there are, the last perhaps smaller."""
        return self.b.sdiv(self.b.add(extent, self.b.sub(each, self.number(1))), each)

    def tiles(self, name: str, *values: ir.Value | int) -> None:
        """An instruction on tile registers, which are named by numbers."""
        found = [ir.Constant(INT8, value) if isinstance(value, int) else value for value in values]
        self.e.call(f"llvm.x86.{name}", ir.VoidType(), *found)


class _Block:
    """Writes the work on some rows or columns of one operand, packed once, and on all of the other's, 32 at a time.

    Two panels of the other operand take turns: while products with one are made, the other is packed. During the first,
    the panels of the kept operand are packed as well, each before it is needed.

    Attributes:
        origin: the first row and column.
        adds: whether results are added to what is there.
        last: whether the sums are then complete, and the epilogue follows.
    """

    def __init__(
        self,
        writer: _Product,
        kept: _Factor,
        passing: _Factor,
        y: ir.Value,
        origin: tuple[ir.Value, ir.Value],
        depth: ir.Value,
        adds: ir.Value,
        last: ir.Value,
    ) -> None:
        self.w, self.b, self.y, self.depth = writer, writer.b, y, depth
        self.origin, self.adds, self.last = origin, adds, last
        self.kept, self.passing, n = kept, passing, writer.number
        self.steps = writer.blocks(depth, n(DEPTH))
        self.panel = self.b.mul(self.steps, n(STEP))
        self.panels, self.others = (writer.blocks(x.extent, n(SIDE)) for x in (kept, passing))
        self.second = writer.pointer(writer.table_of["scratch"])  # two panels that pass, then those that are kept
        self.first = writer.e.behind(self.second, self.b.mul(self.panel, n(2)))

    def write(self) -> None:
        """Both first panels; then all products."""
        w, b, zero = self.w, self.b, self.w.number(0)
        with w.counted(zero, b.mul(self.steps, w.number(PIECES)), 1) as piece:
            self.piece(self.kept, self.first, zero, piece)
            self.piece(self.passing, self.second, zero, piece)
        with w.counted(zero, self.others, 1) as other:
            odd = b.and_(other, w.number(1))
            here = w.e.behind(self.second, b.mul(odd, self.panel))
            there = w.e.behind(self.second, b.mul(b.xor(odd, w.number(1)), self.panel))
            following = b.add(other, w.number(1))
            more = b.icmp_signed("<", following, self.others)
            b.store(zero, w.packed)
            with w.counted(zero, self.panels, 1) as own:
                ahead = b.add(own, w.number(1))
                begins = b.and_(b.icmp_signed("==", other, zero), b.icmp_signed("<", ahead, self.panels))

                def meanwhile(step: ir.Value, turn: int) -> None:
                    first = b.add(b.mul(step, w.number(PIECES)), w.number(turn * PIECES // TURNS))
                    with b.if_then(begins):
                        for i in range(PIECES // TURNS):
                            self.piece(self.kept, self.panel_of(ahead), ahead, b.add(first, w.number(i)))
                    with b.if_then(more):
                        done = b.add(b.mul(own, b.mul(self.steps, w.number(PIECES))), first)
                        self.share(there, following, b.add(done, w.number(PIECES // TURNS)))

                self.results(own, other, here, meanwhile)

    def panel_of(self, number: ir.Value) -> ir.Value:
        """Where a panel that is kept lies."""
        return self.w.e.behind(self.first, self.b.mul(number, self.panel))

    def share(self, target: ir.Value, panel: ir.Value, due: ir.Value) -> None:
        """Pack the pieces of the next panel that are due: `due` of them if this panel is multiplied only once."""
        w, b = self.w, self.b
        for _ in range(PIECES // TURNS):
            piece = b.load(w.packed, typ=INT64)
            with b.if_then(b.icmp_signed("<=", b.mul(b.add(piece, w.number(1)), self.panels), due)):
                self.piece(self.passing, target, panel, piece)
                b.store(b.add(piece, w.number(1)), w.packed)

    def piece(self, x: _Factor, target: ir.Value, panel: ir.Value, piece: ir.Value) -> None:
        """Pack some of 16 rows or columns for some steps."""
        w, b = self.w, self.b
        part, unit = b.and_(piece, w.number(PIECES // 2 - 1)), b.lshr(piece, w.number((PIECES // 2).bit_length() - 1))
        half, step = b.and_(unit, w.number(1)), b.lshr(unit, w.number(1))
        across = b.add(b.mul(panel, w.number(SIDE)), b.mul(half, w.number(SIDE // 2)))
        along = b.mul(step, w.number(DEPTH))
        source = b.add(x.base, b.add(b.mul(across, x.across), b.mul(along, x.along)))
        left = b.sub(x.extent, across), b.sub(self.depth, along)
        place = w.e.behind(target, b.add(b.mul(step, w.number(STEP)), b.mul(half, w.number(TILE))))
        stride = x.across if x.is_along else x.along
        b.call(x.pack, [w.pointer(source), stride, x.following, place, *left, part])

    def results(
        self, own: ir.Value, other: ir.Value, here: ir.Value, meanwhile: Callable[[ir.Value, int], None]
    ) -> None:
        """Products of two panels, one kept and one that passes; other work alternates with each 32 steps."""
        w, b, t = self.w, self.b, self.w.table_of
        left = [b.sub(x.extent, b.mul(at, w.number(SIDE))) for x, at in ((self.kept, own), (self.passing, other))]
        both = [self.panel_of(own), here]
        row, column = own, other
        if not w.product.keeps_a:
            row, column, left, both = other, own, left[::-1], both[::-1]
        top, start = (b.add(o, b.mul(x, w.number(SIDE))) for o, x in zip(self.origin, (row, column)))
        place = w.pointer(b.add(self.y, b.add(b.mul(top, t["y_row"]), b.mul(start, w.number(4)))))
        whole = b.and_(b.and_(*(b.icmp_signed(">=", each, w.number(SIDE)) for each in left)), b.not_(self.last))
        direct = b.and_(whole, b.not_(self.adds))
        before, target = (b.select(condition, place, w.results) for condition in (whole, direct))
        stride, step = (b.select(condition, t["y_row"], w.number(4 * SIDE)) for condition in (direct, whole))
        for tile in range(4):  # this read makes the later write faster
            w.tiles("tileloadd64", tile, self.quarter(before, step, tile), step)
        for tile in range(4):
            w.tiles("tilezero", tile)
        rows = w.making.at(top, start) if w.making else []
        with w.counted(w.number(0), self.steps, 1) as step:
            offset = b.mul(step, w.number(STEP))
            self.multiplied([w.e.behind(panel, offset) for panel in both], lambda turn: meanwhile(step, turn))
            self.fetch(rows, step, left[0])
        for tile in range(4):
            w.tiles("tilestored64", tile, self.quarter(target, stride, tile), stride)
        with b.if_then(b.not_(direct)):
            self.merge(place, left, rows)

    def quarter(self, target: ir.Value, stride: ir.Value, tile: int) -> ir.Value:
        """Where a quarter of the results lies."""
        down = self.b.mul(stride, self.w.number(SIDE // 2 * (tile // 2)))
        return self.w.e.behind(target, self.b.add(down, self.w.number(LINE * (tile % 2))))

    def multiplied(self, pairs: Sequence[ir.Value], meanwhile: Callable[[int], None]) -> None:
        """Add the products of the parts of two pairs of tiles; other work in between does not wait for them."""
        w, loaded = self.w, [-1, -1]
        for number, parts in enumerate(_PRODUCTS):
            for operand, address in enumerate(pairs):
                if loaded[operand] != parts[operand]:
                    loaded[operand] = parts[operand]
                    for half in range(2):
                        place = w.e.behind(address, w.number((2 * parts[operand] + half) * TILE))
                        w.tiles("tileloadd64", 4 + 2 * operand + half, place, w.number(LINE))
            for tile in range(4):
                w.tiles("tdpbf16ps", tile, 4 + tile // 2, 6 + tile % 2)
            if number < TURNS:
                meanwhile(number)

    def fetch(self, rows: Sequence[ir.Value], step: ir.Value, left: ir.Value) -> None:
        """Fetch some rows into the cache: of further operands, and of outputs that overwrite none; all of them by the
        last step.
        """
        w, b, making = self.w, self.b, self.w.making
        if making is None:
            return
        count = len(making.then.further)
        whole = [i for i in range(count) if making.operands[i].kind == CONTIGUOUS] or range(count, len(rows))
        each = w.blocks(w.number(SIDE), self.steps)
        first = b.mul(step, each)
        with b.if_then(self.last), w.counted(first, w.least(b.add(first, each), left), 1) as row:
            for i in whole:
                place = w.e.behind(rows[i], b.mul(row, making.rows[i][1]))
                for byte in range(0, SIDE * making.operands[i].dtype.itemsize, LINE):
                    w.e.prefetch(w.e.behind(place, w.number(byte)), write=True)

    def merge(self, place: ir.Value, left: Sequence[ir.Value], rows: Sequence[ir.Value]) -> None:
        """Copy the valid part of 32 x 32 results to its place, or add it there; or apply the epilogue to both."""
        w, b = self.w, self.b
        with w.counted(w.number(0), w.least(left[0], w.number(SIDE)), 1) as row:
            target = w.e.behind(place, b.mul(row, w.table_of["y_row"]))
            steps = [stride for _, stride in w.making.rows] if w.making else []
            here = [w.e.behind(start, b.mul(row, step)) for start, step in zip(rows, steps)]
            for first in range(0, SIDE, WIDTH):
                self.finish(target, row, here, Memory(w.e, w.number(first), b.sub(left[1], w.number(first))))

    def finish(self, target: ir.Value, row: ir.Value, here: Sequence[ir.Value], some: Memory) -> None:
        """Sixteen results of a row."""
        w, b, e = self.w, self.b, self.w.e
        offset = b.mul(some.at, w.number(4))
        source = w.e.behind(w.results, b.add(offset, b.mul(row, w.number(4 * SIDE))))
        x, place = b.load(source, align=4, typ=e.type(FLOAT)), w.e.behind(target, offset)
        mask = b.select(self.adds, some.mask, e.constant(BIT, 0))
        old = e.floats(some.load(e, place, INT32, mask))
        x = b.select(self.adds, b.fadd(x, old), x)
        if w.making is None:
            some.store(e, place, INT32, e.bits(x), some.mask)
            return
        with b.if_else(self.last) as (whole, partial):
            with partial:
                some.store(e, place, INT32, e.bits(x), some.mask)
            with whole:
                w.making.make(x, here, some)

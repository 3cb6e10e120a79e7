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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import llvmlite.ir as ir

from foreplan.jit.builder import FLOAT, I8, I64
from foreplan.runtime.cpu.codegen.loops import CONTIGUOUS
from foreplan.runtime.cpu.gemm.nest import ENTRIES, ITEM, Form, Nest
from foreplan.runtime.cpu.gemm.tiles_pack import DEPTH, LINE, PARTS, TILE, UNIT, Pack

SIDE = 32  # results of a block of registers, along both axes
STEP = 2 * PARTS * TILE  # bytes of a panel for `DEPTH` steps
PIECES, TURNS = 2 * UNIT, 4  # of those bytes, packed one by one; how often some are while a step's tiles are multiplied
# The pairs of parts that are multiplied, in order: each pair shares a part with the one before, and large products come
# last.
_PRODUCTS = ((0, 2), (0, 1), (1, 1), (1, 0), (2, 0), (0, 0))


@dataclass(frozen=True)
class Product(Form):
    """The form of a product that a loop is made for.

    Attributes:
        a_along, b_along: whether elements of an operand lie side by side along the sum, else across.
        keeps: whether panels of a stay in a core's cache while those of b pass; else b's stay.
    """

    a_along: bool
    b_along: bool
    keeps: bool

    further = ("a_following", "b_following")  # bytes to the unit that is fetched ahead
    behind = bytes([1, *[0] * 15, *[LINE, 0] * 8, *[0] * 16, *[16] * 8, *[0] * 8])  # eight tiles of 16 full rows

    @property
    def keeps_a(self) -> bool:
        """See `Form`."""
        return self.keeps

    @property
    def nest(self) -> type[Nest]:
        """See `Form`."""
        return _Product


@dataclass(frozen=True)
class _Factor:
    """An operand of the product from a row or column on, and its panels."""

    base: ir.Value
    across: ir.Value
    along: ir.Value
    following: ir.Value
    extent: ir.Value
    pack: ir.Function
    is_along: bool


class _Product(Nest):
    """Writes such a loop.

    Two panels of the operand that passes take turns: while products with one are made, the other is packed. During the
    first, the panels of the kept operand are packed as well, each before it is needed.
    """

    form: Product
    own: _Factor  # what is kept
    passing: _Factor

    def __init__(self, form: Product) -> None:
        super().__init__(form)
        a_turned, b_turned = not form.a_along, form.b_along
        self.pack_a = Pack(self.function.module, "pack_a", form.a_along, a_turned).function
        same = a_turned == b_turned and form.a_along == form.b_along
        self.pack_b = self.pack_a if same else Pack(self.function.module, "pack_b", form.b_along, b_turned).function
        self.results = self.b.local(ir.ArrayType(FLOAT, SIDE * SIDE))  # of an edge, or to be added
        self.packed = self.b.local(I64)  # pieces of the next panel

    def write(self) -> None:
        """See `Nest`; the configuration of the tiles follows the table."""
        entries = len(ENTRIES) + len(self.form.further) + (self.making.entries if self.making else 0)
        self.tiles("ldtilecfg", self.b.behind(self.table, 8 * entries))
        super().write()

    def ended(self) -> None:
        """See `Nest`."""
        self.tiles("tilerelease")

    def tiles(self, name: str, *values: ir.Value | int) -> None:
        """An instruction on tile registers, which are named by numbers."""
        found = [ir.Constant(I8, value) if isinstance(value, int) else value for value in values]
        self.b.named(f"llvm.x86.{name}", ir.VoidType(), *found)

    def kept(self, a: ir.Value, other: ir.Value, y: ir.Value, at: ir.Value, extent: ir.Value) -> None:
        """Both first panels; then all products."""
        b, t, form = self.b, self.t, self.form
        first, second = (
            _Factor(base, t[across], t[f"{x}_step"], t[f"{x}_following"], t[whole], *how)
            for x, base, across, whole, how in (
                ("a", a, "a_row", "rows", (self.pack_a, form.a_along)),
                ("b", other, "b_column", "columns", (self.pack_b, form.b_along)),
            )
        )
        own, self.passing = (first, second) if form.keeps else (second, first)
        self.own = replace(own, base=b.add(own.base, b.mul(at, own.across)), extent=extent)
        self.y, self.origin = y, (at, b.index(0)) if form.keeps else (b.index(0), at)
        self.steps = b.blocks(self.depth, DEPTH)
        self.panel = b.mul(self.steps, STEP)
        self.panels, self.others = (b.blocks(x.extent, SIDE) for x in (self.own, self.passing))
        self.second = b.pointer(t["scratch"])  # two panels that pass, then those that are kept
        self.first = b.behind(self.second, b.mul(self.panel, 2))
        with b.counted(0, b.mul(self.steps, PIECES)) as piece:
            self.piece(self.own, self.first, 0, piece)
            self.piece(self.passing, self.second, 0, piece)
        with b.counted(0, self.others) as number:
            odd = b.and_(number, 1)
            here = b.behind(self.second, b.mul(odd, self.panel))
            there = b.behind(self.second, b.mul(b.xor(odd, 1), self.panel))
            following = b.add(number, 1)
            more = b.icmp_signed("<", following, self.others)
            b.store(b.index(0), self.packed)
            with b.counted(0, self.panels) as panel:
                ahead = b.add(panel, 1)
                begins = b.and_(b.icmp_signed("==", number, 0), b.icmp_signed("<", ahead, self.panels))

                def meanwhile(step: ir.Value, turn: int) -> None:
                    first = b.add(b.mul(step, PIECES), turn * PIECES // TURNS)
                    with b.if_then(begins):
                        for i in range(PIECES // TURNS):
                            self.piece(self.own, self.panel_of(ahead), ahead, b.add(first, i))
                    with b.if_then(more):
                        done = b.add(b.mul(panel, b.mul(self.steps, PIECES)), first)
                        self.share(there, following, b.add(done, PIECES // TURNS))

                self.block(panel, number, here, meanwhile)

    def panel_of(self, number: ir.Value) -> ir.Value:
        """Where a panel that is kept lies."""
        return self.b.behind(self.first, self.b.mul(number, self.panel))

    def share(self, target: ir.Value, panel: ir.Value, due: ir.Value) -> None:
        """Pack the pieces of the next panel that are due: `due` of them if this panel is multiplied only once."""
        b = self.b
        for _ in range(PIECES // TURNS):
            piece = b.load(self.packed, typ=I64)
            with b.if_then(b.icmp_signed("<=", b.mul(b.add(piece, 1), self.panels), due)):
                self.piece(self.passing, target, panel, piece)
                b.store(b.add(piece, 1), self.packed)

    def piece(self, x: _Factor, target: ir.Value, panel: ir.Value | int, piece: ir.Value) -> None:
        """Pack some of 16 rows or columns for some steps."""
        b = self.b
        part, unit = b.and_(piece, PIECES // 2 - 1), b.lshr(piece, (PIECES // 2).bit_length() - 1)
        half, step = b.and_(unit, 1), b.lshr(unit, 1)
        across = b.add(b.mul(b.index(panel), SIDE), b.mul(half, SIDE // 2))
        along = b.mul(step, DEPTH)
        source = b.add(x.base, b.add(b.mul(across, x.across), b.mul(along, x.along)))
        left = b.sub(x.extent, across), b.sub(self.depth, along)
        place = b.behind(target, b.add(b.mul(step, STEP), b.mul(half, TILE)))
        stride = x.across if x.is_along else x.along
        b.call(x.pack, [b.pointer(source), stride, x.following, place, *left, part])

    def block(
        self, panel: ir.Value, number: ir.Value, here: ir.Value, meanwhile: Callable[[ir.Value, int], None]
    ) -> None:
        """Products of two panels, one kept and one that passes; other work alternates with each 32 steps."""
        b, t = self.b, self.t
        left = [b.sub(x.extent, b.mul(at, SIDE)) for x, at in ((self.own, panel), (self.passing, number))]
        both = [self.panel_of(panel), here]
        row, column = panel, number
        if not self.form.keeps:
            row, column, left, both = number, panel, left[::-1], both[::-1]
        top, start = (b.add(o, b.mul(x, SIDE)) for o, x in zip(self.origin, (row, column)))
        place = b.pointer(b.add(self.y, b.add(b.mul(top, t["y_row"]), b.mul(start, ITEM))))
        whole = b.and_(b.and_(*(b.icmp_signed(">=", each, SIDE) for each in left)), b.not_(self.last))
        direct = b.and_(whole, b.not_(self.adds))
        before, target = (b.select(condition, place, self.results) for condition in (whole, direct))
        stride, step = (b.select(condition, t["y_row"], ITEM * SIDE) for condition in (direct, whole))
        for tile in range(4):  # this read makes the later write faster
            self.tiles("tileloadd64", tile, self.quarter(before, step, tile), step)
        for tile in range(4):
            self.tiles("tilezero", tile)
        starts = self.making.at(top, start) if self.making else []
        with b.counted(0, self.steps) as step:
            offset = b.mul(step, STEP)
            self.multiplied([b.behind(each, offset) for each in both], lambda turn: meanwhile(step, turn))
            self.fetch(starts, step, left[0])
        for tile in range(4):
            self.tiles("tilestored64", tile, self.quarter(target, stride, tile), stride)
        with b.if_then(b.not_(direct)):
            self.finish(self.results, place, starts, left, (SIDE, SIDE), unrolled=True)

    def quarter(self, target: ir.Value, stride: ir.Value, tile: int) -> ir.Value:
        """Where a quarter of the results lies."""
        return self.b.behind(target, self.b.add(self.b.mul(stride, SIDE // 2 * (tile // 2)), LINE * (tile % 2)))

    def multiplied(self, pairs: Sequence[ir.Value], meanwhile: Callable[[int], None]) -> None:
        """Add the products of the parts of two pairs of tiles; other work in between does not wait for them."""
        loaded = [-1, -1]
        for number, parts in enumerate(_PRODUCTS):
            for operand, address in enumerate(pairs):
                if loaded[operand] != parts[operand]:
                    loaded[operand] = parts[operand]
                    for half in range(2):
                        place = self.b.behind(address, (2 * parts[operand] + half) * TILE)
                        self.tiles("tileloadd64", 4 + 2 * operand + half, place, self.b.index(LINE))
            for tile in range(4):
                self.tiles("tdpbf16ps", tile, 4 + tile // 2, 6 + tile % 2)
            if number < TURNS:
                meanwhile(number)

    def fetch(self, starts: Sequence[ir.Value], step: ir.Value, left: ir.Value) -> None:
        """Fetch some rows into the cache: of further operands, and of outputs that overwrite none; all of them by the
        last step.
        """
        b, making = self.b, self.making
        if making is None:
            return
        count = len(making.then.further)
        whole = [i for i in range(count) if making.operands[i].kind == CONTIGUOUS] or range(count, len(starts))
        each = b.blocks(b.index(SIDE), self.steps)
        first = b.mul(step, each)
        with b.if_then(self.last), b.counted(first, b.least(b.add(first, each), left)) as row:
            for i in whole:
                place = b.behind(starts[i], b.mul(row, making.rows[i][1]))
                for byte in range(0, SIDE * making.operands[i].dtype.itemsize, LINE):
                    b.prefetch(b.behind(place, byte), write=True)

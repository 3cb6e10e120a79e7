"""Products of float32 matrices on a processor's tile registers, as machine code.

Tiles multiply bfloat16 and add in float32 (AMX, "Intel Architecture Instruction Set Extensions", TDPBF16PS). A float32
number is the sum of three of bfloat16, its rounding, that of what is left, and the rest (Henry, Tang and Heinecke,
"Leveraging the bfloat16 Artificial Intelligence Datatype For Higher-Precision Computations", 2019), so that six
products of such parts give a product up to less than one rounding of float32.

Operands are packed as they are needed: of 32 rows, or columns, a *panel*, which holds for each 32 steps along the sum
three pairs of tiles, a pair for each part. A *unit* is half of that: 16 rows or columns and 32 steps. The tile
registers hold 32 x 32 results; while they add up, the vector units pack what comes next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import llvmlite.ir as ir

from foreplan.cpu.lanes import FLOAT, INT8, INT32, INT64, Lanes, shuffled
from foreplan.cpu.llvm import POINTER, compiled_as
from foreplan.cpu.loops import WIDTH, Memory, Writer

SIDE, DEPTH = 32, 32  # results of a block of registers, along both axes; steps that a tile holds along the sum
TILE = 1024  # bytes
PARTS = 3
STEP = 2 * PARTS * TILE  # bytes of a panel for `DEPTH` steps
LINE = 4 * WIDTH  # bytes of a row of a tile
# Which parts of both operands are multiplied, one after the other: such that those of one stay each time, and what is
# large comes last.
_PRODUCTS = ((0, 2), (0, 1), (1, 1), (1, 0), (2, 0), (0, 0))
_TOP, _HALF, _HUGE = 0xFFFF0000, 0x8000, 0xFEFF0000  # the bits of bfloat16; half of its last; twice what rounds to inf


@dataclass(frozen=True)
class Product:
    """What a loop is made for.

    Attributes:
        a_along, b_along: whether elements of an operand lie side by side along the sum, else across.
        keeps_a: whether panels of a stay in a core's cache while those of b pass, or the other way about.
    """

    a_along: bool
    b_along: bool
    keeps_a: bool


@dataclass(frozen=True)
class Operand:
    """How the table has an operand, and its panels."""

    base: ir.Value
    across: ir.Value
    along: ir.Value
    following: ir.Value
    extent: ir.Value
    pack: ir.Function
    is_along: bool


# Numbers of the table, in order: addresses, bytes to the next matrix, to the next element along both axes, and to the
# unit that is fetched ahead; extents; rows or columns, and steps along the sum, that are packed at once; whether what
# is there is added to. The configuration of the tiles follows them.
ENTRIES = (
    *("a", "a_matrix", "a_row", "a_step", "a_following"),
    *("b", "b_matrix", "b_column", "b_step", "b_following"),
    *("y", "y_matrix", "y_row"),
    *("scratch", "rows", "columns", "depth", "most_kept", "most_steps", "adds"),
)
CONFIGURATION = bytes([1, *[0] * 15, *[LINE, 0] * 8, *[0] * 16, *[16] * 8, *[0] * 8])  # eight tiles of 16 full rows


@cache
def compiled_product(product: Product) -> Callable[[int, int, bytes], None]:
    """A call of (start, stop, table) for matrices [start, stop): y = a·b, or y += a·b."""
    return compiled_as(product, lambda: _Product(product).written())


class _Product(Writer):
    """Writes such a loop."""

    def __init__(self, product: Product) -> None:
        super().__init__()
        self.product, self.e = product, Lanes(self.b, WIDTH)
        self.table_of = {name: self.entry(i) for i, name in enumerate(ENTRIES)}
        a_turned, b_turned = not product.a_along, product.b_along
        self.pack_a = _Pack(self.function.module, "pack_a", product.a_along, a_turned).function
        same = a_turned == b_turned and product.a_along == product.b_along
        self.pack_b = self.pack_a if same else _Pack(self.function.module, "pack_b", product.b_along, b_turned).function
        self.results = self.local(ir.ArrayType(FLOAT, SIDE * SIDE))  # of an edge, or to be added
        self.packed = self.local(INT64)  # units of the next panel

    def write(self) -> None:
        """All matrices; of each some steps along the sum at a time, and of those some rows or columns."""
        b, t, zero = self.b, self.table_of, self.number(0)
        self.tiles("ldtilecfg", self.at(self.table, self.number(8 * len(ENTRIES))))
        with self.counted(self.start, self.stop, 1) as matrix:
            bases = {x: b.add(t[x], b.mul(matrix, t[f"{x}_matrix"])) for x in ("a", "b", "y")}
            with self.counted(zero, self.blocks(t["depth"], t["most_steps"]), 1) as number:
                first = b.mul(number, t["most_steps"])
                depth = self.least(b.sub(t["depth"], first), t["most_steps"])
                more = b.or_(t["adds"], b.zext(b.icmp_signed(">", first, zero), INT64))
                kept, passing = self.operands(bases, first)
                with self.counted(zero, self.blocks(kept.extent, t["most_kept"]), 1) as block:
                    at = b.mul(block, t["most_kept"])
                    base = b.add(kept.base, b.mul(at, kept.across))
                    some = replace(kept, base=base, extent=self.least(b.sub(kept.extent, at), t["most_kept"]))
                    step = t["y_row"] if self.product.keeps_a else self.number(4)
                    _Block(self, some, passing, b.add(bases["y"], b.mul(at, step)), depth, more).write()
        self.tiles("tilerelease")
        b.ret_void()

    def operands(self, bases: Mapping[str, ir.Value], first: ir.Value) -> tuple[Operand, Operand]:
        """That of which panels are kept and the other, from a step along the sum on."""
        b, t, product, found = self.b, self.table_of, self.product, []
        packs = (self.pack_a, product.a_along), (self.pack_b, product.b_along)
        for name, across, extent, how in zip("ab", ("a_row", "b_column"), ("rows", "columns"), packs):
            base, along = b.add(bases[name], b.mul(first, t[f"{name}_step"])), t[f"{name}_step"]
            found.append(Operand(base, t[across], along, t[f"{name}_following"], t[extent], *how))
        return (found[0], found[1]) if product.keeps_a else (found[1], found[0])

    def at(self, address: ir.Value, offset: ir.Value) -> ir.Value:
        """So many bytes behind an address."""
        return self.b.gep(address, [offset], source_etype=INT8)

    def pointer(self, address: ir.Value) -> ir.Value:
        """An address that came as a number."""
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
    """Writes what is done with some rows or columns of one operand, packed once, and all of the other's, 32 at a time.

    Two panels of the latter take turns: while products with one are made, the other is packed, and with the first of
    them the panels of the former as well, each before it is needed.
    """

    def __init__(
        self, writer: _Product, kept: Operand, passing: Operand, y: ir.Value, depth: ir.Value, adds: ir.Value
    ) -> None:
        self.w, self.b, self.y, self.depth, self.adds = writer, writer.b, y, depth, adds
        self.kept, self.passing, n = kept, passing, writer.number
        self.steps = writer.blocks(depth, n(DEPTH))
        self.panel = self.b.mul(self.steps, n(STEP))
        self.panels, self.others = (writer.blocks(x.extent, n(SIDE)) for x in (kept, passing))
        self.second = writer.pointer(writer.table_of["scratch"])  # two panels that pass, then those that are kept
        self.first = writer.at(self.second, self.b.mul(self.panel, n(2)))

    def write(self) -> None:
        """Both first panels; then all products."""
        w, b, zero = self.w, self.b, self.w.number(0)
        with w.counted(zero, self.steps, 1) as step:
            for half in range(2):
                self.unit(self.kept, self.first, zero, step, w.number(half))
                self.unit(self.passing, self.second, zero, step, w.number(half))
        with w.counted(zero, self.others, 1) as other:
            odd = b.and_(other, w.number(1))
            here = w.at(self.second, b.mul(odd, self.panel))
            there = w.at(self.second, b.mul(b.xor(odd, w.number(1)), self.panel))
            following = b.add(other, w.number(1))
            more = b.icmp_signed("<", following, self.others)
            b.store(zero, w.packed)
            with w.counted(zero, self.panels, 1) as own:
                ahead = b.add(own, w.number(1))
                begins = b.and_(b.icmp_signed("==", other, zero), b.icmp_signed("<", ahead, self.panels))

                def meanwhile(step: ir.Value) -> None:
                    with b.if_then(begins):
                        for half in range(2):
                            self.unit(self.kept, self.panel_of(ahead), ahead, step, w.number(half))
                    with b.if_then(more):
                        self.share(there, following, b.add(b.mul(own, self.steps), step))

                self.results(own, other, here, meanwhile)

    def panel_of(self, number: ir.Value) -> ir.Value:
        """Where a panel that is kept lies."""
        return self.w.at(self.first, self.b.mul(number, self.panel))

    def share(self, target: ir.Value, panel: ir.Value, done: ir.Value) -> None:
        """Those units of the next panel that passes which are due after so many steps of this one's."""
        w, b = self.w, self.b
        for _ in range(2):
            units = b.load(w.packed, typ=INT64)
            needed = b.mul(b.add(units, w.number(1)), self.panels)
            with b.if_then(b.icmp_signed("<=", needed, b.mul(b.add(done, w.number(1)), w.number(2)))):
                step, half = b.lshr(units, w.number(1)), b.and_(units, w.number(1))
                self.unit(self.passing, target, panel, step, half)
                b.store(b.add(units, w.number(1)), w.packed)

    def unit(self, x: Operand, target: ir.Value, panel: ir.Value, step: ir.Value, half: ir.Value) -> None:
        """Pack 16 rows or columns for some steps."""
        w, b = self.w, self.b
        across = b.add(b.mul(panel, w.number(SIDE)), b.mul(half, w.number(SIDE // 2)))
        along = b.mul(step, w.number(DEPTH))
        source = b.add(x.base, b.add(b.mul(across, x.across), b.mul(along, x.along)))
        left = b.sub(x.extent, across), b.sub(self.depth, along)
        place = w.at(target, b.add(b.mul(step, w.number(STEP)), b.mul(half, w.number(TILE))))
        b.call(x.pack, [w.pointer(source), x.across if x.is_along else x.along, x.following, place, *left])

    def results(self, own: ir.Value, other: ir.Value, here: ir.Value, meanwhile: Callable[[ir.Value], None]) -> None:
        """Products of two panels, one kept and one that passes, something else being done after each 32 steps."""
        w, b, t = self.w, self.b, self.w.table_of
        left = [b.sub(x.extent, b.mul(at, w.number(SIDE))) for x, at in ((self.kept, own), (self.passing, other))]
        both = [self.panel_of(own), here]
        row, column = own, other
        if not w.product.keeps_a:
            row, column, left, both = other, own, left[::-1], both[::-1]
        place = b.add(self.y, b.mul(b.mul(row, w.number(SIDE)), t["y_row"]))
        place = w.pointer(b.add(place, b.mul(column, w.number(4 * SIDE))))
        whole = b.and_(*(b.icmp_signed(">=", each, w.number(SIDE)) for each in left))
        direct = b.and_(whole, b.icmp_signed("==", self.adds, w.number(0)))
        before, target = (b.select(condition, place, w.results) for condition in (whole, direct))
        stride, step = (b.select(condition, t["y_row"], w.number(4 * SIDE)) for condition in (direct, whole))
        for tile in range(4):  # read for nothing: writing goes faster where memory was
            w.tiles("tileloadd64", tile, self.quarter(before, step, tile), step)
        for tile in range(4):
            w.tiles("tilezero", tile)
        with w.counted(w.number(0), self.steps, 1) as step:
            offset = b.mul(step, w.number(STEP))
            self.multiplied(*(w.at(panel, offset) for panel in both))
            meanwhile(step)
        for tile in range(4):
            w.tiles("tilestored64", tile, self.quarter(target, stride, tile), stride)
        with b.if_then(b.not_(direct)):
            self.merge(place, left)

    def quarter(self, target: ir.Value, stride: ir.Value, tile: int) -> ir.Value:
        """Where a quarter of the results lies."""
        down = self.b.mul(stride, self.w.number(SIDE // 2 * (tile // 2)))
        return self.w.at(target, self.b.add(down, self.w.number(LINE * (tile % 2))))

    def multiplied(self, a: ir.Value, b: ir.Value) -> None:
        """Add the products of the parts of two pairs of tiles."""
        w, loaded = self.w, [-1, -1]
        for parts in _PRODUCTS:
            for operand, address in enumerate((a, b)):
                if loaded[operand] != parts[operand]:
                    loaded[operand] = parts[operand]
                    for half in range(2):
                        place = w.at(address, w.number((2 * parts[operand] + half) * TILE))
                        w.tiles("tileloadd64", 4 + 2 * operand + half, place, w.number(LINE))
            for tile in range(4):
                w.tiles("tdpbf16ps", tile, 4 + tile // 2, 6 + tile % 2)

    def merge(self, place: ir.Value, left: Sequence[ir.Value]) -> None:
        """Copy what there is of 32 x 32 results to where they lie, or add it to what is there."""
        w, b, e = self.w, self.b, self.w.e
        adds = b.icmp_signed("!=", self.adds, w.number(0))
        with w.counted(w.number(0), w.least(left[0], w.number(SIDE)), 1) as row:
            target = w.at(place, b.mul(row, w.table_of["y_row"]))
            source = w.at(w.results, b.mul(row, w.number(4 * SIDE)))
            for first in range(0, SIDE, WIDTH):
                some = Memory(e, w.number(first), b.sub(left[1], w.number(first)))
                x, old = (
                    e.floats(some.load(e, w.at(y, w.number(4 * first)), INT32, some.mask)) for y in (source, target)
                )
                x = e.bits(b.select(adds, b.fadd(x, old), x))
                some.store(e, w.at(target, w.number(4 * first)), INT32, x, some.mask)


class _Pack:
    """Writes a function of (source, stride, following, target, rows or columns left, steps left) that packs a unit.

    Elements lie side by side along the sum or across it, and the others `stride` bytes apart. What there is none of is
    zero. Another unit, `following` bytes further, is fetched into the cache. A row of a tile of a is
    a row's elements 0 and 16, 1 and 17, …; one of b is that of all columns.

    Attributes:
        function: within a module.
    """

    def __init__(self, module: ir.Module, name: str, along: bool, turned: bool) -> None:
        type = ir.FunctionType(ir.VoidType(), [POINTER, INT64, INT64, POINTER, INT64, INT64])
        self.function = ir.Function(module, type, name)
        self.function.linkage = "internal"
        for attribute in ("nounwind", "noinline"):
            self.function.attributes.add(attribute)
        self.along, self.turned = along, turned
        self.b = ir.IRBuilder(self.function.append_basic_block())
        self.e = Lanes(self.b, WIDTH)
        self.write()

    def write(self) -> None:
        """What there is, or where that is not all, a copy with zeros."""
        b = self.b
        source, stride, following, target, across, steps = self.function.args
        width = DEPTH if self.along else WIDTH
        copy = b.inttoptr(b.ptrtoint(b.alloca(ir.ArrayType(FLOAT, WIDTH * DEPTH)), INT64), POINTER)
        fits = [b.icmp_signed(">=", x, ir.Constant(INT64, most)) for x, most in ((across, WIDTH), (steps, DEPTH))]
        whole, before = b.and_(*fits), b.block
        with b.if_then(b.not_(whole)):
            lines, lanes = (across, steps) if self.along else (steps, across)
            self.copied(source, stride, copy, lines, lanes, width)
            partial = b.block
        chosen, step = b.phi(POINTER), b.phi(INT64)
        for value, low, high in ((chosen, copy, source), (step, ir.Constant(INT64, 4 * width), stride)):
            value.add_incoming(high, before)
            value.add_incoming(low, partial)
        self.packed(chosen, step, following, target)
        b.ret_void()

    def copied(
        self, source: ir.Value, stride: ir.Value, copy: ir.Value, lines: ir.Value, lanes: ir.Value, width: int
    ) -> None:
        """Lines of which some elements are there, and some lines."""
        b, e, zero = self.b, self.e, ir.Constant(self.e.type(INT32), None)
        for line in range(WIDTH * DEPTH // width):
            there = b.icmp_signed(">", lines, ir.Constant(INT64, line))
            for first in range(0, width, WIDTH):
                left = b.select(there, b.sub(lanes, ir.Constant(INT64, first)), ir.Constant(INT64, 0))
                some = Memory(e, ir.Constant(INT64, first), left)
                place = self.at(source, b.add(b.mul(stride, ir.Constant(INT64, line)), ir.Constant(INT64, 4 * first)))
                x = b.select(some.mask, some.load(e, place, INT32, some.mask), zero)
                b.store(x, self.at(copy, ir.Constant(INT64, 4 * (line * width + first))), align=4)

    def packed(self, source: ir.Value, stride: ir.Value, following: ir.Value, target: ir.Value) -> None:
        """A whole unit."""
        b = self.b

        def line(number: int, first: int = 0) -> ir.Value:
            offset = b.add(b.mul(stride, ir.Constant(INT64, number)), ir.Constant(INT64, 4 * first))
            place = self.at(source, offset)
            hints = (ir.Constant(INT32, hint) for hint in (0, 3, 1))  # to be read, soon, as data
            self.e.call("llvm.prefetch.p0", ir.VoidType(), self.at(place, following), *hints)
            return b.load(place, align=4, typ=self.e.type(FLOAT))

        def pair(number: int) -> tuple[ir.Value, ir.Value]:
            return (line(number), line(number, WIDTH)) if self.along else (line(number), line(number + WIDTH))

        pairs = [pair(number) for number in range(WIDTH)]
        if self.turned:
            pairs = list(zip(*(self.transposed(list(half)) for half in zip(*pairs))))
        for row, both in enumerate(pairs):
            parts = zip(*map(self.parts, both))
            for part, (low, high) in enumerate(parts):
                word = b.or_(b.lshr(low, self.e.constant(INT32, 16)), b.and_(high, self.e.constant(INT32, _TOP)))
                b.store(word, self.at(target, ir.Constant(INT64, 2 * TILE * part + LINE * row)), align=4)

    def parts(self, x: ir.Value) -> list[ir.Value]:
        """Three numbers, in the upper halves of their bits, that add up to each. Infinities and NaN are the last, which
        is multiplied by the first part alone; so are numbers that would be rounded to infinity.
        """
        b, e, found = self.b, self.e, []
        zero, bits = ir.Constant(e.type(INT32), None), e.bits(x)
        finite = b.icmp_unsigned("<", b.add(bits, bits), e.constant(INT32, _HUGE))
        for _ in range(PARTS - 1):
            near = b.and_(b.add(e.bits(x), e.constant(INT32, _HALF)), e.constant(INT32, _TOP))
            near = b.select(finite, near, zero)
            found.append(near)
            x = b.fsub(x, e.floats(near))
        return [*found, e.bits(x)]

    def transposed(self, rows: list[ir.Value]) -> list[ir.Value]:
        """A matrix of 16 x 16 turned: lanes of rows 1, 2, 4 and 8 apart change places."""
        for apart in (1, 2, 4, 8):
            low = [lane if not lane & apart else lane - apart + WIDTH for lane in range(WIDTH)]
            high = [lane + apart if not lane & apart else lane + WIDTH for lane in range(WIDTH)]
            for first in (i for i in range(WIDTH) if not i & apart):
                pair = rows[first], rows[first + apart]
                rows[first], rows[first + apart] = (shuffled(self.b, pair, order) for order in (low, high))
        return rows

    def at(self, address: ir.Value, offset: ir.Value) -> ir.Value:
        return self.b.gep(address, [offset], source_etype=INT8)

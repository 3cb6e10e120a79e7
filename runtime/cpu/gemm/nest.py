"""Products of float32 matrices as machine code: what the loops of all kinds of registers have in common.

Some steps along the sum are taken at once, and of these some rows of a, or some columns of b. These are *kept*, packed
or as they lie, while the other operand passes by (Goto and van de Geijn, "Anatomy of high-performance matrix
multiplication", 2008). Registers hold a block of results while these steps are summed. Then it is written, added to
what is there, or given to the epilogue with the last steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import llvmlite.ir as ir

from foreplan.graph.types import FLOAT32
from foreplan.jit.builder import BIT, FLOAT, I32, I64
from foreplan.runtime.cpu.codegen.epilogue import Making, Then
from foreplan.runtime.cpu.codegen.lanes import Lanes
from foreplan.runtime.cpu.codegen.llvm import compiled_as
from foreplan.runtime.cpu.codegen.loops import WIDTH, Memory, Writer

if TYPE_CHECKING:
    from foreplan.jit.llvm import Passes

ITEM = FLOAT32.itemsize
# Numbers of the table, in order: addresses, bytes to the next matrix, to the next row or column, and to the next step;
# scratch memory; extents; rows or columns, and steps along the sum, that are kept at once; whether what is there is
# added to. Then those of the kind of registers, and for each operand of the epilogue its address and the bytes to its
# next row.
ENTRIES = (
    *("a", "a_matrix", "a_row", "a_step", "b", "b_matrix", "b_column", "b_step", "y", "y_matrix", "y_row"),
    *("scratch", "rows", "columns", "depth", "most_kept", "most_steps", "adds"),
)


@dataclass(frozen=True)
class Form:
    """What a loop is made for, on registers of one kind.

    Attributes:
        then: the epilogue of each result; None: results are written.
        passes: see `foreplan.jit.machine.Module`.
        further: numbers of the table behind those of all kinds.
        behind: what follows the table.
    """

    then: Then | None
    passes: ClassVar[Passes] = "usual"
    further: ClassVar[tuple[str, ...]] = ()
    behind: ClassVar[bytes] = b""

    @property
    def keeps_a(self) -> bool:
        """Whether some rows of a are kept while all of b passes; else columns of b are."""
        return False

    @property
    def nest(self) -> Callable[[Any], Nest]:
        """What writes the loop."""
        raise NotImplementedError


@cache
def compiled_product(form: Form) -> Callable[[int, int, bytes], None]:
    """A call of (start, stop, table) for matrices [start, stop): y = a·b, or y += a·b, or an epilogue of a·b while y
    holds sums of some steps.
    """
    return compiled_as(form, lambda: form.nest(form).written(), form.passes)


class Nest(Writer):
    """Writes such a loop.

    Attributes:
        form: what it is made for.
        t: the table, by name.
        making: the epilogue, if any.
        depth: steps along the sum that are at hand.
        adds: whether what is there is added to.
        last: whether the sums are then complete, and the epilogue follows, if there is one.
    """

    depth: ir.Value
    adds: ir.Value
    last: ir.Value

    def __init__(self, form: Form) -> None:
        super().__init__()
        names = (*ENTRIES, *form.further)
        self.form, self.e = form, Lanes(self.b, WIDTH)
        self.t = {name: self.entry(i) for i, name in enumerate(names)}
        self.making = Making(self, form.then, len(names)) if form.then else None

    def write(self) -> None:
        """All matrices: of each, some steps along the sum at a time; of these, some rows or columns."""
        b, t = self.b, self.t
        with b.counted(self.start, self.stop) as matrix:
            bases = [b.add(t[x], b.mul(matrix, t[f"{x}_matrix"])) for x in "aby"]
            with b.counted(0, b.blocks(t["depth"], t["most_steps"])) as segment:
                first = b.mul(segment, t["most_steps"])
                left = b.sub(t["depth"], first)
                self.depth = b.least(left, t["most_steps"])
                self.adds = b.or_(b.icmp_signed("!=", t["adds"], 0), b.icmp_signed(">", first, 0))
                self.last = b.icmp_signed("<=", left, t["most_steps"]) if self.making else ir.Constant(BIT, 0)
                a, other = (b.add(base, b.mul(first, t[f"{x}_step"])) for x, base in zip("ab", bases))
                extent = t["rows" if self.form.keeps_a else "columns"]
                with b.counted(0, b.blocks(extent, t["most_kept"])) as number:
                    at = b.mul(number, t["most_kept"])
                    self.kept(a, other, bases[2], at, b.least(b.sub(extent, at), t["most_kept"]))
        self.ended()
        b.ret_void()

    def ended(self) -> None:
        """What follows all loops."""

    def kept(self, a: ir.Value, other: ir.Value, y: ir.Value, at: ir.Value, extent: ir.Value) -> None:
        """Some rows of a or columns of b, with all of the other operand.

        Args:
            a, other, y: addresses of a, b and y, those of operands from the first step on.
            at: the first row or column, and `extent` how many there are.
        """
        raise NotImplementedError

    def summed(
        self, steps: ir.Value, count: int, add: Callable[[ir.Value, list[ir.Value]], list[ir.Value]], each: int = 1
    ) -> list[ir.Value]:
        """A number of sums, which begin with 0 and grow at steps 0, each, … below `steps`."""
        b, type = self.b, self.e.type(FLOAT)
        before, body, after = b.block, b.append_basic_block(), b.append_basic_block()
        b.branch(body)
        b.position_at_end(body)
        index, sums = b.phi(I64), [b.phi(type) for _ in range(count)]
        new = add(index, sums)
        following = b.add(index, each)
        for phi, end in zip((index, *sums), (following, *new)):
            phi.add_incoming(ir.Constant(phi.type, 0 if phi is index else None), before)
            phi.add_incoming(end, body)
        b.cbranch(b.icmp_signed("<", following, steps), body, after)
        b.position_at_end(after)
        return new

    def lines(self, base: ir.Value, step: ir.Value, first: ir.Value, extent: ir.Value, count: int) -> list[ir.Value]:
        """The beginnings of some rows or columns from one on; beyond the end, the last one again."""
        b, last = self.b, self.b.sub(extent, 1)
        return [b.pointer(b.add(base, b.mul(b.least(b.add(first, i), last), step))) for i in range(count)]

    def some(self, left: ir.Value, first: ir.Value | int = 0) -> Memory:
        """Sixteen elements from one on, or those that are left."""
        return Memory(self.e, first, self.b.sub(left, first))

    def read(self, some: Memory, row: ir.Value) -> ir.Value:
        """These elements of a row; zero where there are none."""
        return some.load(self.e, self.b.behind(row, self.b.mul(some.at, ITEM)), I32, some.mask)

    def finish(
        self, source: ir.Value, place: ir.Value, starts: Sequence[ir.Value], left: Sequence[ir.Value],
        size: tuple[int, int], *, unrolled: bool = False,
    ) -> None:  # fmt: skip
        """Write a block of results from memory, row by row.

        Args:
            source, place: where they are, and where they go.
            starts: the places of the epilogue's operands.
            left: rows and columns from here on.
            size: rows and columns of a block.
        """
        b = self.b
        with b.counted(0, b.least(left[0], size[0])) as row:
            target = b.behind(place, b.mul(row, self.t["y_row"]))
            own = b.behind(source, b.mul(row, size[1] * ITEM))
            here = self.making.below(starts, row) if self.making else []
            if unrolled:
                for first in range(0, size[1], WIDTH):
                    self.merge(own, target, here, self.some(left[1], first))
            else:
                with b.counted(0, b.blocks(b.least(left[1], size[1]), WIDTH)) as vector:
                    self.merge(own, target, here, self.some(left[1], b.mul(vector, WIDTH)))

    def merge(self, source: ir.Value, target: ir.Value, here: Sequence[ir.Value], some: Memory) -> None:
        """Sixteen results of a row: added to what is there, then written, or given to the epilogue."""
        b, e = self.b, self.e
        offset = b.mul(some.at, ITEM)
        x, place = b.load(b.behind(source, offset), align=ITEM, typ=e.type(FLOAT)), b.behind(target, offset)
        old = e.floats(some.load(e, place, I32, b.select(self.adds, some.mask, 0)))
        x = b.select(self.adds, b.fadd(x, old), x)
        if self.making is None:
            some.store(e, place, I32, e.bits(x), some.mask)
            return
        with b.if_else(self.last) as (made, partial):
            with partial:
                some.store(e, place, I32, e.bits(x), some.mask)
            with made:
                self.making.make(x, here, some)

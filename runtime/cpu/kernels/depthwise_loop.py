"""Depth-wise convolutions as machine code: four results of a row at a time, sixteen channels of each."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache

import llvmlite.ir as ir

from foreplan.jit.builder import FLOAT, I64
from foreplan.runtime.cpu.codegen.epilogue import Making, Then
from foreplan.runtime.cpu.codegen.lanes import Lanes
from foreplan.runtime.cpu.codegen.llvm import compiled_as
from foreplan.runtime.cpu.codegen.loops import WIDTH, Memory, Writer

RESULTS = 4  # of a row, which share what they read
BYTES = 4 * WIDTH
# Numbers of the table, in order: the address of images, and bytes to the next one, row and column; the address of
# weights, and bytes from a tap to the next; rows and columns of images, and of results; zeros before the first row and
# column; channels. Operands of the epilogue follow.
ENTRIES = (
    *("x", "x_image", "x_row", "x_column", "w", "w_tap", "height", "width", "tall", "broad", "above", "left"),
    "channels",
)
Address = Callable[[int, int, int, ir.Value], ir.Value]


@dataclass(frozen=True)
class Form:
    """The form of a convolution that a loop is made for.

    Attributes:
        taps, strides, dilations: along rows and columns.
        then: the epilogue of each result.
    """

    taps: tuple[int, int]
    strides: tuple[int, int]
    dilations: tuple[int, int]
    then: Then


@cache
def compiled_depthwise(form: Form) -> Callable[[int, int, bytes], None]:
    """A call of (start, stop, table) for rows [start, stop) of all images of results."""
    return compiled_as(form, lambda: _Depthwise(form).written())


class _Depthwise(Writer):
    """Writes such a loop."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form, self.e = form, Lanes(self.b, WIDTH)
        self.table_of = {name: self.entry(i) for i, name in enumerate(ENTRIES)}
        self.making = Making(self, form.then, len(ENTRIES))
        step, gap = form.strides[1], form.dilations[1]
        # Columns that four results read, from the first one's first tap on; and by column, the results and their taps.
        self.columns: dict[int, list[tuple[int, int]]] = {}
        for result in range(RESULTS):
            for tap in range(form.taps[1]):
                self.columns.setdefault(result * step + tap * gap, []).append((result, tap))
        self.places = self.b.local(ir.ArrayType(I64, 2 * form.taps[0] * len(self.columns)))
        self.zeros = self.b.local(self.e.type(FLOAT))

    def write(self) -> None:
        """Row after row."""
        b, t, (step, _) = self.b, self.table_of, self.form.strides
        b.store(ir.Constant(self.e.type(FLOAT), None), self.zeros)
        outside = b.ptrtoint(self.zeros, I64)
        with b.counted(self.start, self.stop) as row:
            image, y = b.udiv(row, t["tall"]), b.urem(row, t["tall"])
            base = b.add(t["x"], b.mul(image, t["x_image"]))
            first = b.sub(b.mul(y, step), t["above"])
            lines = [b.add(first, tap * self.form.dilations[0]) for tap in range(self.form.taps[0])]
            # As unsigned numbers, negative ones are too large as well.
            inside = [b.icmp_unsigned("<", line, t["height"]) for line in lines]
            starts = [b.add(base, b.mul(line, t["x_row"])) for line in lines]
            all_lines = inside[0]
            for each in inside[1:]:
                all_lines = b.and_(all_lines, each)
            with b.counted(0, b.add(t["broad"], RESULTS - 1), RESULTS) as x:
                top = b.add(b.mul(row, t["broad"]), x)
                left = b.sub(t["broad"], x)
                made = [self.making.at(b.add(top, i), b.index(0)) for i in range(RESULTS)]
                column = b.sub(b.mul(x, self.form.strides[1]), t["left"])
                last = b.add(column, max(self.columns))
                whole = b.and_(b.icmp_signed(">=", column, 0), b.icmp_signed("<", last, t["width"]))
                whole = b.and_(b.and_(whole, all_lines), b.icmp_signed(">=", left, RESULTS))
                with b.if_else(whole) as (yes, no):
                    with yes:
                        here = b.mul(column, t["x_column"])
                        firsts = [b.add(start, here) for start in starts]
                        steps = {each: b.mul(each, t["x_column"]) for each in self.columns}

                        def direct(line: int, column: int, index: int, at: ir.Value) -> ir.Value:
                            return b.add(b.add(firsts[line], steps[column]), b.mul(at, 4))

                        self.in_steps(0, t["channels"], lambda at, some: self.sums(at, some, None, made, direct))
                    with no:
                        self.find(x, list(zip(starts, inside)), outside)
                        self.in_steps(0, t["channels"], lambda at, some: self.sums(at, some, left, made, self.found))
        b.ret_void()

    def found(self, line: int, column: int, index: int, at: ir.Value) -> ir.Value:
        """The address of sixteen channels from one on, at a place that was found."""
        b = self.b
        address, step = (b.word(self.places, 2 * index + i) for i in range(2))
        return b.add(address, b.mul(b.udiv(at, WIDTH), step))

    def find(self, x: ir.Value, lines: list[tuple[ir.Value, ir.Value]], outside: ir.Value) -> None:
        """The address of each place that four results read, and bytes from sixteen channels to the next."""
        b, t = self.b, self.table_of
        first = b.sub(b.mul(x, self.form.strides[1]), t["left"])
        index = 0
        for start, there in lines:
            for column in self.columns:
                at = b.add(first, column)
                inside = b.and_(there, b.icmp_unsigned("<", at, t["width"]))
                address = b.select(inside, b.add(start, b.mul(at, t["x_column"])), outside)
                for number in (address, b.select(inside, b.index(BYTES), 0)):
                    b.store(number, b.gep(self.places, [index], source_etype=I64))
                    index += 1

    def sums(
        self, at: ir.Value, some: ir.Value | None, left: ir.Value | None, made: list[list[ir.Value]], address: Address
    ) -> None:
        """Sixteen channels of four results.

        Args:
            some: how many channels there are; `left`: how many results. None: all.
            address: of what is read: by line and column, the number of this place, and a channel.
        """
        b, e, (rows, taps) = self.b, self.e, self.form.taps
        memory, block = Memory(e, at, some), b.udiv(at, WIDTH)
        type, weights = e.type(FLOAT), b.add(self.table_of["w"], b.mul(block, BYTES))
        found: list[ir.Value] = [ir.Constant(type, None)] * RESULTS
        index = 0
        for row in range(rows):
            factors = []
            for tap in range(taps):
                place = b.add(weights, b.mul(self.table_of["w_tap"], row * taps + tap))
                factors.append(b.load(b.pointer(place), align=4, typ=type))
            for column, users in self.columns.items():
                place = b.pointer(address(row, column, index, at))
                index += 1
                mask = None if some is None else memory.mask
                x = memory.load(e, place, FLOAT, mask)
                for result, tap in users:
                    found[result] = e.b.intrinsic("fmuladd", x, factors[tap], found[result])
        for i, (total, places) in enumerate(zip(found, made)):
            with nullcontext() if left is None else b.if_then(b.icmp_signed("<", i, left)):
                self.making.make(total, places, memory)

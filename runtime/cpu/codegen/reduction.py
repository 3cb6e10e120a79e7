"""Loops that reduce tensors, as machine code: along the innermost axis, or along those before it, column by column.

Sums of float32 and of halves are taken in float64. Sums of float64 keep the rounding error of each addition (Neumaier,
"Rundungsfehleranalyse einiger Verfahren zur Summation endlicher Summen", ZAMM 1974, with the branch-free sum of two
numbers by Knuth). One part makes each result, in an order that depends only on the tensor's extents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import llvmlite.ir as ir
import numpy as np

from foreplan.graph import DType
from foreplan.graph.types import BOOL, FLOAT64
from foreplan.jit.builder import DOUBLE, I32, Builder
from foreplan.runtime.cpu.codegen.conversions import convert, register_type, stored
from foreplan.runtime.cpu.codegen.expressions import EMIT
from foreplan.runtime.cpu.codegen.lanes import Lanes, shuffled
from foreplan.runtime.cpu.codegen.llvm import compiled_as
from foreplan.runtime.cpu.codegen.loops import WIDTH, Memory, Operand, Place, Writer

COLUMNS = 512  # columns that are summed together: worth fetching, and their totals stay in the cache
_FUNCTIONS = {"sum": "add", "mean": "add", "prod": "mul", "max": "max", "min": "min"}
State = tuple[ir.Value, ...]  # a total, and the rounding errors of its additions


@dataclass(frozen=True)
class Reduction:
    """The form of a reduction that a loop is made for.

    Attributes:
        how: as the op's.
        columns: whether the innermost axis is kept.
        kept: axes that are kept, with those merged that can be; of columns without the innermost.
        reduced: axes that are reduced, likewise without the innermost.
    """

    how: str
    input: Operand
    output: Operand
    columns: bool
    kept: int
    reduced: int


@cache
def compiled_reduction(reduction: Reduction) -> Callable[[int, int, bytes], None]:
    """A call of (start, stop, table) for places of the kept axes in C order; of columns, `COLUMNS` of them each.

    The table is int64: extents of kept and reduced axes and of the innermost, the bits of the float64 that a mean is
    multiplied by; the input's address and strides in bytes along kept and reduced axes and the innermost; the output's
    address and strides along kept axes, and, of columns, the innermost.
    """
    return compiled_as(reduction, lambda: _Writer(reduction).written())


class _Folding:
    """How elements are brought together.

    Attributes:
        type: of the totals.
        exact: whether rounding errors of additions are kept.
    """

    def __init__(self, how: str, dtype: DType, output: DType) -> None:
        self.how, self.dtype, self.output = how, dtype, output
        adds = how in ("sum", "mean")
        self.type = FLOAT64 if dtype.is_float and (adds or how == "prod") else dtype
        self.exact = adds and dtype == FLOAT64

    def start(self, e: Lanes) -> State:
        """The neutral element."""
        element = register_type(self.type)
        if self.how in ("max", "min"):
            sign = -1 if self.how == "max" else 1
            number: float | int = sign * np.inf
            if self.type == BOOL:
                number = int(self.how == "min")
            elif not self.type.is_float:
                info = np.iinfo(self.type.numpy)
                number = int(info.min if self.how == "max" else info.max)
            return (e.constant(element, number),)
        one = e.constant(element, float(self.how == "prod") if self.type.is_float else int(self.how == "prod"))
        return (one, e.constant(element, 0.0)) if self.exact else (one,)

    def joined(self, e: Lanes, old: State, new: State) -> State:
        """Two states as one."""
        if not self.exact:
            return (EMIT[_FUNCTIONS[self.how]](e, self.type, old[0], new[0]),)
        b, (x, lost), (y, other) = e.b, old, new
        total = b.fadd(x, y)
        part = b.fsub(total, x)
        error = b.fadd(b.fsub(x, b.fsub(total, part)), b.fsub(y, part))
        return total, b.fadd(b.fadd(lost, other), error)

    def element(self, e: Lanes, x: ir.Value, mask: ir.Value | None) -> State:
        """Elements as they come from memory; nothing in lanes where there is none."""
        start = self.start(e)
        x = convert(e, x, self.dtype, self.type)
        return (x if mask is None else e.b.select(mask, x, start[0]), *start[1:])

    def result(self, e: Lanes, state: State, factor: ir.Value) -> ir.Value:
        """The element of the output."""
        b, x = e.b, state[0]
        if self.exact:
            lost = b.fadd(x, state[1])  # of no use where the total is infinite
            x = b.select(b.fcmp_unordered("uno", lost, lost), x, lost)
        if self.how == "mean":
            x = b.fmul(x, e.splat(factor))
        return convert(e, x, self.type, self.output)

    def across(self, e: Lanes, state: State) -> State:
        """The lanes of a state in one, as a scalar."""
        b, width = e.b, e.width
        while width > 1:
            width //= 2
            half = replace(e, width=width)
            low, high = (_picked(b, state, first, width) for first in (0, width))
            state = self.joined(half, low, high)
        return tuple(b.extract_element(x, ir.Constant(I32, 0)) for x in state)


def _picked(b: Builder, state: State, first: int, width: int) -> State:
    return tuple(shuffled(b, (x, ir.Constant(x.type, ir.Undefined)), range(first, first + width)) for x in state)


class _Writer(Writer):
    """Writes such a loop."""

    def __init__(self, reduction: Reduction) -> None:
        super().__init__()
        self.reduction = reduction
        self.folding = _Folding(reduction.how, reduction.input.dtype, reduction.output.dtype)
        kept, reduced = reduction.kept, reduction.reduced
        axes = kept + reduced + 1
        extents = [self.entry(i) for i in range(axes)]
        self.kept, self.reduced, self.inner = extents[:kept], extents[kept:-1], extents[-1]
        self.factor = self.b.bitcast(self.entry(axes), DOUBLE)
        self.source = self.b.pointer(self.entry(axes + 1))
        steps = [self.entry(axes + 2 + i) for i in range(axes)]
        self.kept_steps, self.reduced_steps, self.step = steps[:kept], steps[kept:-1], steps[-1]
        self.target = self.b.pointer(self.entry(2 * axes + 2))
        self.target_steps = [self.entry(2 * axes + 3 + i) for i in range(kept + reduction.columns)]
        self.rows = self.b.index(1)
        for extent in self.reduced:
            self.rows = self.b.mul(self.rows, extent)

    def write(self) -> None:
        """All of it."""
        e = Lanes(self.b, WIDTH)
        self.totals = [self.b.alloca(x.type, COLUMNS // WIDTH) for x in self.folding.start(e)]
        with self.b.counted(self.start, self.stop) as part:
            if self.reduction.columns:
                self.columns(part)
            else:
                at = self.unravelled(part, self.kept) if self.kept else []
                source = self.place(self.reduction.input, self.source, self.kept_steps, at)
                target = self.place(self.reduction.output, self.target, self.target_steps, at)
                self.total(source, target)
        self.b.ret_void()

    def row(self, source: Place, row: ir.Value) -> Place:
        """A place of the reduced axes before the innermost."""
        at = self.unravelled(row, self.reduced) if self.reduced else []
        return self.place(self.reduction.input, source.address, self.reduced_steps, at)

    def total(self, source: Place, target: Place) -> None:
        """One result."""
        e = Lanes(self.b, WIDTH)
        for place, x in zip(self.totals, self.folding.start(e)):
            self.b.store(x, place)
        with self.b.counted(0, self.rows) as row:
            begins = self.row(source, row)
            self.in_steps(0, self.inner, lambda at, left: self.add([begins], at, left, 0))
        one = replace(e, width=0)
        state = self.folding.across(e, tuple(self.b.load(place, typ=e.type(self.element)) for place in self.totals))
        dtype = self.reduction.output.dtype
        self.b.store(stored(one, self.folding.result(one, state, self.factor), dtype), target.address)

    @property
    def element(self) -> ir.Type:
        """The type of totals."""
        return register_type(self.folding.type)

    def add(self, rows: Sequence[Place], at: ir.Value, left: ir.Value | None, slot: ir.Value) -> None:
        """Elements from `at` of some rows, to the totals of a slot."""
        e = Lanes(self.b, WIDTH)
        memory = Memory(e, at, left)
        type = e.type(self.element)
        places = [self.b.gep(total, [slot], source_etype=type) for total in self.totals]
        state = tuple(self.b.load(place, typ=type) for place in places)
        for row in rows:
            x = memory.read(self.reduction.input, row, self.step)
            state = self.folding.joined(e, state, self.folding.element(e, x, None if left is None else memory.mask))
        for place, x in zip(places, state):
            self.b.store(x, place)

    def columns(self, part: ir.Value) -> None:
        """Results side by side."""
        b = self.b
        blocks = b.blocks(self.inner, COLUMNS)
        *at, block = self.unravelled(part, [*self.kept, blocks])
        low = b.mul(block, COLUMNS)
        high = b.add(low, COLUMNS)
        high = b.least(high, self.inner)
        source = self.place(self.reduction.input, self.source, self.kept_steps, at)
        target = self.place(self.reduction.output, self.target, self.target_steps[:-1], at)

        def slot(at: ir.Value) -> ir.Value:
            return b.udiv(b.sub(at, low), WIDTH)

        def clear(at: ir.Value, left: ir.Value | None) -> None:
            e = Lanes(b, WIDTH)
            for total, x in zip(self.totals, self.folding.start(e)):
                b.store(x, b.gep(total, [slot(at)], source_etype=x.type))

        def finish(at: ir.Value, left: ir.Value | None) -> None:
            e = Lanes(b, WIDTH)
            type = e.type(self.element)
            state = tuple(b.load(b.gep(total, [slot(at)], source_etype=type), typ=type) for total in self.totals)
            result = self.folding.result(e, state, self.factor)
            Memory(e, at, left).write(self.reduction.output, target, self.target_steps[-1], result)

        self.in_steps(low, high, clear)
        together = b.and_(self.rows, -4)
        for first, last, count in ((0, together, 4), (together, self.rows, 1)):
            with b.counted(first, last, count) as row:
                begins = [self.row(source, b.add(row, i)) for i in range(count)]
                self.in_steps(low, high, lambda at, left: self.add(begins, at, left, slot(at)))  # noqa: B023
        self.in_steps(low, high, finish)

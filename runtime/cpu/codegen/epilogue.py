"""Epilogues: maps of the results of a product before they are written, as windows and as instructions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import llvmlite.ir as ir

from foreplan.graph import Window
from foreplan.graph.layouts import lie_alike
from foreplan.graph.types import FLOAT32
from foreplan.ops.expr import parse_expr, subexpressions
from foreplan.runtime.cpu.codegen.conversions import loaded, memory_type
from foreplan.runtime.cpu.codegen.expressions import emit
from foreplan.runtime.cpu.codegen.loops import CONTIGUOUS, FIXED, STRIDED, Memory, Operand, Place, Writer, operand_kind
from foreplan.runtime.cpu.onednn import library as c
from foreplan.runtime.kernel import Refused

FURTHER, MADE = 1 << 24, 1 << 25  # arguments of the epilogue: each further input, and each output


@dataclass(frozen=True)
class Then:
    """The epilogue of each result.

    Attributes:
        exprs: one an output, over a result, a0, and further operands.
        further: how these operands lie along a row of results.
        outputs: likewise.
    """

    exprs: tuple[str, ...]
    further: tuple[Operand, ...]
    outputs: tuple[Operand, ...]


@dataclass(frozen=True)
class Made:
    """The epilogue of a product, instead of writing it.

    Attributes:
        exprs: one an output, over the product, a0, and further inputs.
        inputs: further ones, each broadcast to the product's shape, of strides 0 along some axes.
        outputs: of that shape.
    """

    exprs: tuple[str, ...]
    inputs: tuple[Window, ...]
    outputs: tuple[Window, ...]

    def overwrites(self, first: int = 0) -> tuple[tuple[int, int], ...]:
        """Pairs of an output and an input that lies like it, and may be changed in place; inputs count from `first`."""
        inputs = list(enumerate(self.inputs, first))
        return tuple((o, i) for o, y in enumerate(self.outputs) for i, x in inputs if lie_alike(x, y))

    @property
    def beside(self) -> int:
        """Bytes that are read and written besides the operands of the product and one result."""
        return sum(x.type.nbytes for x in (*self.inputs, *self.outputs[1:]) if all(x.strides))

    @property
    def then(self) -> Then:
        """The same in the form that loops take."""
        further, outputs = (
            tuple(operand_kind(x.type.dtype, x.strides[-1]) for x in found) for found in (self.inputs, self.outputs)
        )
        if any(x.kind == STRIDED for x in (*further, *outputs)) or any(x.kind == FIXED for x in outputs):
            raise Refused(f"{', '.join(self.exprs)} of operands that do not lie along rows")
        return Then(self.exprs, further, outputs)


class Making:
    """Writes what is made of float32 results, some of a row at a time.

    Attributes:
        then: the epilogue.
        rows: of each operand, the address and the bytes to the next row, from the table.
    """

    def __init__(self, writer: Writer, then: Then, first: int) -> None:
        """Take operands from the table: two entries each, from an entry on."""
        self.w, self.b, self.then = writer, writer.b, then
        self.exprs = [parse_expr(text) for text in then.exprs]
        self.operands = (*then.further, *then.outputs)
        self.rows = [(writer.entry(at), writer.entry(at + 1)) for at in range(first, first + self.entries, 2)]

    @property
    def entries(self) -> int:
        """The number of these entries."""
        return 2 * len(self.operands)

    @property
    def parts(self) -> int:
        """The parts of the expressions, common ones once."""
        return len(subexpressions(*self.exprs))

    def at(self, row: ir.Value, column: ir.Value) -> list[ir.Value]:
        """The address of each operand at a row and a column."""
        b, found = self.b, []
        for (address, stride), x in zip(self.rows, self.operands):
            along = x.dtype.itemsize if x.kind == CONTIGUOUS else 0
            place = b.add(b.add(address, b.mul(row, stride)), b.mul(column, along))
            found.append(b.pointer(place))
        return found

    def below(self, places: Sequence[ir.Value], rows: ir.Value | int) -> list[ir.Value]:
        """The addresses so many rows further down."""
        return [self.b.behind(place, self.b.mul(rows, stride)) for place, (_, stride) in zip(places, self.rows)]

    def make(self, x: ir.Value, places: Sequence[ir.Value], some: Memory) -> None:
        """Compute some elements, given the places of a row."""
        count = len(self.then.further)
        found = [x, *(self._read(some, *each) for each in zip(self.operands, places[:count]))]
        results = emit(some.e, self.exprs, found, [FLOAT32, *(operand.dtype for operand in self.then.further)])
        for operand, start, y in zip(self.then.outputs, places[count:], results):
            some.write(operand, Place(start, None), 0, y)

    def _read(self, some: Memory, operand: Operand, start: ir.Value) -> ir.Value:
        """Some elements of a further operand's row, or its only element."""
        if operand.kind == CONTIGUOUS:
            return some.read(operand, Place(start, None), 0)
        return loaded(some.e, some.e.splat(self.b.load(start, typ=memory_type(operand.dtype))), operand.dtype)


def entries_of(made: Made, addresses: Mapping[int, int], top: int = 0, left: int = 0) -> list[int]:
    """The table's entries for operands, from a row and a column on.

    Args:
        addresses: by argument; the first output is `DST`.
    """
    table = []
    places = [addresses[FURTHER + i] for i in range(len(made.inputs))]
    places += [addresses[MADE + i if i else c.DST] for i in range(len(made.outputs))]
    for window, address in zip((*made.inputs, *made.outputs), places):
        row, column = window.strides
        table += [address + top * row + left * column, row]
    return table

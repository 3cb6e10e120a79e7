"""Loops over tensors that compute scalar expressions, sixteen elements at a time, as machine code.

A loop is made for expressions, element types, the number of axes, and how each operand lies along the innermost one.
Addresses, extents and strides come in a table, so one loop serves tensors of any size. Every step reads all
its elements before it writes: an output may overwrite any input with the same layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import llvmlite.ir as ir

from foreplan.ops.expr import parse_expr
from foreplan.runtime.cpu.codegen.conversions import loaded, memory_type
from foreplan.runtime.cpu.codegen.expressions import emit
from foreplan.runtime.cpu.codegen.lanes import Lanes
from foreplan.runtime.cpu.codegen.llvm import compiled_as
from foreplan.runtime.cpu.codegen.loops import FIXED, WIDTH, Memory, Operand, Place, Writer

UNIT = 1024  # elements of a part of a loop with a single axis


@dataclass(frozen=True)
class Loop:
    """What a loop is made for.

    Attributes:
        exprs: an expression an output, over the inputs.
        axes: of the tensors, with those merged that can be.
    """

    exprs: tuple[str, ...]
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    axes: int


@cache
def compiled_loop(loop: Loop) -> Callable[[int, int, bytes], None]:
    """A call of (start, stop, table) for rows [start, stop): places of all axes but the last, in C order; or, with a
    single axis, for units of `UNIT` elements.

    The table is int64: the extent of each axis, and for each input and output its address (of bits: of the first's
    byte) and its stride along each axis, in bytes (of bits: in bits). Denormal numbers in the inputs are no zeros.
    """
    call = compiled_as(loop, lambda: _Elementwise(loop).written())
    call.reads_denormals = True  # type: ignore[attr-defined]
    return call


class _Elementwise(Writer):
    """Writes such a loop."""

    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self.loop = loop
        self.exprs = [parse_expr(text) for text in loop.exprs]
        self.operands = (*loop.inputs, *loop.outputs)

    def write(self) -> None:
        axes, b = self.loop.axes, self.b
        extents = [self.entry(i) for i in range(axes)]
        starts = range(axes, axes + len(self.operands) * (axes + 1), axes + 1)
        addresses = [b.pointer(self.entry(at)) for at in starts]
        strides = [[self.entry(at + 1 + axis) for axis in range(axes)] for at in starts]
        steps = [row[-1] for row in strides]
        if axes == 1:
            low, high = (b.mul(x, UNIT) for x in (self.start, self.stop))
            high = b.least(high, extents[0])
            self.row([self.place(*found, ()) for found in zip(self.operands, addresses, strides)], steps, low, high)
        else:
            with b.counted(self.start, self.stop) as row:
                at = self.unravelled(row, extents[:-1])
                places = [self.place(*found, at) for found in zip(self.operands, addresses, strides)]
                self.row(places, steps, 0, extents[-1])
        b.ret_void()

    def row(self, places: Sequence[Place], steps: Sequence[ir.Value], low: ir.Value, high: ir.Value) -> None:
        """Elements [low, high) of the innermost axis."""
        e, count = Lanes(self.b, WIDTH), len(self.loop.inputs)
        fixed = {
            i: loaded(e, e.splat(self.b.load(place.address, typ=memory_type(x.dtype))), x.dtype)
            for i, (x, place) in enumerate(zip(self.loop.inputs, places))
            if x.kind == FIXED
        }

        def step(at: ir.Value, left: ir.Value | None) -> None:
            memory = Memory(Lanes(self.b, WIDTH), at, left)
            found = [
                fixed[i] if i in fixed else memory.read(*each)
                for i, each in enumerate(zip(self.loop.inputs, places, steps))
            ]
            results = emit(memory.e, self.exprs, found, [x.dtype for x in self.loop.inputs])
            for each in zip(self.loop.outputs, places[count:], steps[count:], results):
                memory.write(*each)

        self.in_steps(low, high, step)

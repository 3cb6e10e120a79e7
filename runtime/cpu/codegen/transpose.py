"""Copies from one order of the axes to another, as machine code: sixteen by sixteen elements at a time, or sixteen
elements of each of two to four channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import llvmlite.ir as ir
import numpy as np

from foreplan.graph import DType
from foreplan.graph.op import Arrays
from foreplan.jit.builder import Builder
from foreplan.runtime.cpu.codegen.conversions import memory_type
from foreplan.runtime.cpu.codegen.lanes import Lanes, exchanged, shuffled
from foreplan.runtime.cpu.codegen.llvm import compiled_as
from foreplan.runtime.cpu.codegen.loops import CONTIGUOUS, WIDTH, Memory, Operand, Place, Writer
from foreplan.runtime.cpu.threads import current_threads, ranged
from foreplan.runtime.kernel import Run

LEAST = 8  # elements along either axis that are worth a tile
FEW = range(2, 5)  # along the far axis: of so few, several places of the near axis fill a vector of the copy
AHEAD = 4  # a tile is fetched into the cache this many tiles before it is copied
PART = 32 * 1024  # elements that are worth a thread


@dataclass(frozen=True)
class Axis:
    """An axis, and how many bytes lie from one element to the next in the source and in the copy."""

    extent: int
    source: int
    target: int


@dataclass(frozen=True)
class Transposition:
    """A copy.

    Attributes:
        outer: axes along which tiles are repeated.
        near: the axis along which elements lie side by side in the source.
        far: the axis along which they do in the copy.
    """

    dtype: DType
    outer: tuple[Axis, ...]
    near: Axis
    far: Axis
    overwrites: tuple[tuple[int, int], ...] = ()
    workspace: int = 0

    def bind(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray) -> Run:
        """The loop, compiled when it is first asked for."""
        axes = (*self.outer, self.near, self.far)
        table = [axis.extent for axis in axes]
        table += [inputs[0].ctypes.data, *(axis.source for axis in axes)]
        table += [outputs[0].ctypes.data, *(axis.target for axis in axes)]
        parts = math.prod(axis.extent for axis in self.outer) * -(-self.near.extent // WIDTH)
        packed = np.array(table, np.int64).tobytes()
        grain = -(-PART // (WIDTH * self.far.extent))
        few = self.far.extent if self.far.extent < LEAST else 0
        return ranged(_compiled(self.dtype, len(self.outer), few), parts, grain, current_threads(), packed)


def transposition(dtype: DType, axes: Sequence[Axis]) -> Transposition | None:
    """The copy, if both sides have an axis along which elements lie side by side, and not the same one."""
    item = dtype.itemsize
    near = next((axis for axis in axes if axis.source == item), None)
    far = next((axis for axis in axes if axis.target == item), None)
    if near is None or far is None or near is far or near.extent < LEAST:
        return None
    if far.extent < LEAST and not (far.extent in FEW and near.target == far.extent * item):
        return None
    return Transposition(dtype, tuple(axis for axis in axes if axis not in (near, far)), near, far)


@cache
def _compiled(dtype: DType, outer: int, few: int) -> Callable[[int, int, bytes], None]:
    """A call of (start, stop, table) for sixteens along the near axis, within places of the outer axes in C order.

    Args:
        few: the extent of the far axis, if it is small.

    The table is int64: extents of outer axes, near and far; the source's address and strides along these; the copy's.
    """
    operand = Operand(dtype, CONTIGUOUS)
    return compiled_as(("transpose", dtype, outer, few), lambda: _Writer(operand, outer, few).written())


class _Writer(Writer):
    """Writes such a loop."""

    def __init__(self, operand: Operand, outer: int, few: int) -> None:
        super().__init__()
        self.operand, self.few = operand, few
        axes = outer + 2
        self.extents = [self.entry(i) for i in range(axes)]
        self.addresses = [self.b.pointer(self.entry(at)) for at in (axes, 2 * axes + 1)]
        self.steps = [[self.entry(at + 1 + i) for i in range(axes)] for at in (axes, 2 * axes + 1)]

    def write(self) -> None:
        """All of it."""
        b = self.b
        *outer, near, far = self.extents
        strips = b.blocks(near, WIDTH)
        with b.counted(self.start, self.stop) as part:
            *at, strip = self.unravelled(part, [*outer, strips])
            places = [
                self.place(self.operand, address, steps[:-2], at) for address, steps in zip(self.addresses, self.steps)
            ]
            first = b.mul(strip, WIDTH)
            if self.few:
                self.mixed(places, first)
            else:
                blocks = b.blocks(far, WIDTH)
                with b.counted(0, blocks) as block:
                    self.fetch(places[0], first, b.add(block, AHEAD), blocks)
                    self.tile(places, first, b.mul(block, WIDTH))
        b.ret_void()

    def tile(self, places: Sequence[Place], near: ir.Value, far: ir.Value) -> None:
        """Elements from `near` and `far` of their axes, as many as there are."""
        b, (source, target) = self.b, places
        e = Lanes(b, WIDTH)
        element = memory_type(self.operand.dtype)
        left = [b.sub(extent, at) for extent, at in zip(self.extents[-2:], (near, far))]
        reads, writes = Memory(e, near, left[0]), Memory(e, far, left[1])
        rows = []
        for i in range(WIDTH):
            row = self.place(self.operand, source.address, [self.steps[0][-1]], [b.add(far, i)])
            address = b.gep(row.address, [near], source_etype=element)
            rows.append(reads.load(e, address, element, self.within(e, reads.mask, i, left[1])))
        for i, column in enumerate(transposed(b, rows)):
            row = self.place(self.operand, target.address, [self.steps[1][-2]], [b.add(near, i)])
            address = b.gep(row.address, [far], source_etype=element)
            writes.store(e, address, element, column, self.within(e, writes.mask, i, left[0]))

    def mixed(self, places: Sequence[Place], near: ir.Value) -> None:
        """Elements from `near` of its axis, and all of the far one: the copy has those of a place side by side."""
        b, (source, target) = self.b, places
        e, element = Lanes(b, WIDTH), memory_type(self.operand.dtype)
        left = b.sub(self.extents[-2], near)
        reads = Memory(e, near, left)
        rows = []
        for i in range(self.few):
            row = self.place(self.operand, source.address, [self.steps[0][-1]], [i])
            rows.append(reads.load(e, b.gep(row.address, [near], source_etype=element), element, reads.mask))
        begin, count = (b.mul(x, self.few) for x in (near, left))
        for i, mixed in enumerate(interleaved(b, rows)):
            at = WIDTH * i
            writes = Memory(e, at, b.sub(count, at))
            address = b.gep(target.address, [b.add(begin, at)], source_etype=element)
            writes.store(e, address, element, mixed, writes.mask)

    def fetch(self, source: Place, near: ir.Value, block: ir.Value, blocks: ir.Value) -> None:
        """Fetch a tile of this strip or of the next into the cache: hardware does not fetch so many rows ahead."""
        b = self.b
        over = b.icmp_signed(">=", block, blocks)
        near = b.select(over, b.add(near, WIDTH), near)
        far = b.mul(b.select(over, b.sub(block, blocks), block), WIDTH)
        for i in range(WIDTH):
            row = self.place(self.operand, source.address, [self.steps[0][-1]], [b.add(far, i)])
            address = b.gep(row.address, [near], source_etype=memory_type(self.operand.dtype))
            b.prefetch(address)

    def within(self, e: Lanes, mask: ir.Value, index: int, count: ir.Value) -> ir.Value:
        """The lanes of a mask if there are more than `index` rows, else none."""
        return self.b.select(self.b.icmp_signed("<", index, count), mask, 0)


def interleaved(b: Builder, rows: Sequence[ir.Value]) -> list[ir.Value]:
    """The elements of some rows in turn: the first of each, then the second of each, in as many vectors."""
    found, count = list[ir.Value](), len(rows)
    for first in range(0, count * WIDTH, WIDTH):
        sources = [divmod(first + lane, count) for lane in range(WIDTH)]  # place within a row, row
        whole = rows[0]
        for i in range(1, count):
            so_far = [at for at, _ in sources] if i == 1 else range(WIDTH)
            order = [WIDTH + at if row == i else before for (at, row), before in zip(sources, so_far)]
            whole = shuffled(b, (whole, rows[i]), order)
        found.append(whole)
    return found


def transposed(b: Builder, rows: list[ir.Value]) -> list[ir.Value]:
    """The columns of a square matrix: blocks that change places, of half its rows, of a quarter, and so on."""
    half = len(rows) // 2
    while half:
        orders, changed = exchanged(len(rows), half), list(rows)
        for i in range(len(rows)):
            if not i & half:
                pair = rows[i], rows[i + half]
                changed[i], changed[i + half] = (shuffled(b, pair, order) for order in orders)
        rows, half = changed, half // 2
    return rows

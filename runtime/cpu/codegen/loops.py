"""The parts of compiled loops: counting, tables, and steps of sixteen elements from and to memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import llvmlite.ir as ir

from foreplan.graph import DType
from foreplan.graph.types import BOOL
from foreplan.jit.builder import BIT, I8, I16, I32, I64, KERNEL, POINTER
from foreplan.runtime.cpu.codegen.conversions import loaded, memory_type, stored
from foreplan.runtime.cpu.codegen.lanes import Lanes
from foreplan.runtime.cpu.codegen.llvm import new_function

WIDTH = 16  # elements a step
CONTIGUOUS, FIXED, STRIDED = "contiguous", "fixed", "strided"
BITS, STRIDED_BITS = "bits", "strided bits"  # one bit an element, strides in bits; `bits`: rows begin with a byte


@dataclass(frozen=True)
class Operand:
    """How an operand lies along the innermost axis.

    Attributes:
        kind: elements side by side; one for the whole axis; elements anywhere; or bits.
    """

    dtype: DType
    kind: str


def operand_kind(dtype: DType, stride: int) -> Operand:
    """An operand whose elements lie `stride` bytes apart along the innermost axis."""
    return Operand(dtype, CONTIGUOUS if stride == dtype.itemsize else STRIDED if stride else FIXED)


def bits_kind(strides: Sequence[int]) -> Operand:
    """A mask of one bit an element, with its strides in bits, the innermost axis last."""
    whole = strides[-1] == 1 and all(stride % 8 == 0 for stride in strides[:-1])
    return Operand(BOOL, BITS if whole else STRIDED_BITS)


@dataclass(frozen=True)
class Place:
    """The beginning of an operand's row: its address; of bits the tensor's address, and the number of the first bit."""

    address: ir.Value
    bit: ir.Value | None


class Writer:
    """Writes the instructions of a function of (start, stop, table), which returns nothing unless its type says so."""

    def __init__(self, type: ir.FunctionType = KERNEL) -> None:
        self.function, self.b = new_function(type)
        self.start, self.stop, self.table = self.function.args

    def write(self) -> None:
        """All of it."""
        raise NotImplementedError

    def written(self) -> ir.Function:
        """The function, whole."""
        self.write()
        return self.function

    def entry(self, index: int) -> ir.Value:
        """A number of the table."""
        return self.b.word(self.table, index)

    def unravelled(self, row: ir.Value, extents: Sequence[ir.Value]) -> list[ir.Value]:
        """The place along each of the axes before the last."""
        at = []
        for extent in reversed(extents[1:]):
            at.append(self.b.urem(row, extent))
            row = self.b.udiv(row, extent)
        return [row, *reversed(at)]

    def place(self, operand: Operand, address: ir.Value, strides: Sequence[ir.Value], at: Sequence[ir.Value]) -> Place:
        """Where a row begins, at a place along each of the axes before the last."""
        offset = self.b.index(0)
        for place, stride in zip(at, strides):
            offset = self.b.add(offset, self.b.mul(place, stride))
        if operand.kind == STRIDED_BITS:
            return Place(address, offset)
        if operand.kind == BITS:
            offset = self.b.ashr(offset, 3)
        return Place(self.b.behind(address, offset), None)

    def in_steps(self, low: ir.Value | int, high: ir.Value, step: Callable[[ir.Value, ir.Value | None], None]) -> None:
        """A loop over elements [low, high) of an axis, several at a time; `step` writes its instructions.

        Args:
            step: called with the place of the first element, and with how many there are (None: `WIDTH`).
        """
        with self.b.counted(low, high, WIDTH) as at:
            step(at, None)
        whole = self.b.and_(self.b.sub(high, low), -WIDTH)
        end = self.b.add(whole, low)
        with self.b.if_then(self.b.icmp_signed("<", end, high)):
            step(end, self.b.sub(high, end))


class Memory:
    """Reads and writes of one step.

    Attributes:
        at: place of its first element along the axis.
        left: how many elements there are; None for all.
    """

    def __init__(self, e: Lanes, at: ir.Value | int, left: ir.Value | None) -> None:
        self.e, self.b, self.at, self.left = e, e.b, e.b.index(at), left
        self.mask = e.constant(BIT, 1) if left is None else self.below(e, left)

    def below(self, e: Lanes, count: ir.Value) -> ir.Value:
        """A mask of the first `count` lanes."""
        lanes = e.constant(I32, list(range(e.width)))
        return self.b.icmp_signed("<", lanes, e.splat(self.b.trunc(count, I32)))

    def read(self, operand: Operand, place: Place, stride: ir.Value) -> ir.Value:
        """Its elements, for arithmetic; zero in lanes without an element."""
        if operand.kind == BITS:
            return self._read_bits(place)
        if operand.kind == STRIDED_BITS:
            return self._gather_bits(place, stride)
        element = memory_type(operand.dtype)
        if operand.kind == STRIDED:
            x = self._gather(self._pointers(place.address, stride), element)
        else:
            address = self.b.gep(place.address, [self.at], source_etype=element)
            x = self.load(self.e, address, element, None if self.left is None else self.mask)
        return loaded(self.e, x, operand.dtype)

    def write(self, operand: Operand, place: Place, stride: ir.Value, x: ir.Value) -> None:
        """Write its elements."""
        if operand.kind == BITS:
            self._write_bits(place, x)
            return
        element, x = memory_type(operand.dtype), stored(self.e, x, operand.dtype)
        if operand.kind == STRIDED:
            self._scatter(self._pointers(place.address, stride), element, x)
        else:
            address = self.b.gep(place.address, [self.at], source_etype=element)
            self.store(self.e, address, element, x, None if self.left is None else self.mask)

    def load(self, e: Lanes, address: ir.Value, element: ir.IntType, mask: ir.Value | None) -> ir.Value:
        """Elements side by side, as they are in memory; all of them, or zero where the mask is not set."""
        type, align = e.type(element), _bytes(element)
        if mask is None:
            return self.b.load(address, align=align, typ=type)
        arguments = (address, ir.Constant(I32, align), mask, ir.Constant(type, None))
        return self.b.named(f"llvm.masked.load.{_name(type)}.p0", type, *arguments)

    def store(self, e: Lanes, address: ir.Value, element: ir.IntType, x: ir.Value, mask: ir.Value | None) -> None:
        """Elements side by side, as they are in memory; all of them, or those where the mask is set."""
        align = _bytes(element)
        if mask is None:
            self.b.store(x, address, align=align)
        else:
            arguments = (x, address, ir.Constant(I32, align), mask)
            self.b.named(f"llvm.masked.store.{_name(x.type)}.p0", ir.VoidType(), *arguments)

    def _indices(self) -> ir.Value:
        """The place of each lane along the axis."""
        return self.b.add(self.e.splat(self.at), self.e.constant(I64, list(range(WIDTH))))

    def _pointers(self, address: ir.Value, stride: ir.Value) -> ir.Value:
        offsets = self.b.mul(self._indices(), self.e.splat(stride))
        return self.b.inttoptr(self.b.add(self.e.splat(self.b.ptrtoint(address, I64)), offsets), self.e.type(POINTER))

    def _gather(self, pointers: ir.Value, element: ir.IntType) -> ir.Value:
        type = self.e.type(element)
        arguments = (pointers, ir.Constant(I32, _bytes(element)), self.mask, ir.Constant(type, None))
        return self.b.named(f"llvm.masked.gather.{_name(type)}.v{WIDTH}p0", type, *arguments)

    def _scatter(self, pointers: ir.Value, element: ir.IntType, x: ir.Value) -> None:
        arguments = (x, pointers, ir.Constant(I32, _bytes(element)), self.mask)
        self.b.named(f"llvm.masked.scatter.{_name(x.type)}.v{WIDTH}p0", ir.VoidType(), *arguments)

    def _bit_bytes(self, place: Place) -> tuple[Lanes, ir.Value, ir.Value | None]:
        """The bytes of a step's bits, and which of them there are."""
        pair = Lanes(self.b, WIDTH // 8)
        address = self.b.behind(place.address, self.b.lshr(self.at, 3))
        if self.left is None:
            return pair, address, None
        count = self.b.lshr(self.b.add(self.left, 7), 3)
        return pair, address, self.below(pair, count)

    def _read_bits(self, place: Place) -> ir.Value:
        pair, address, mask = self._bit_bytes(place)
        return self.b.bitcast(self.load(pair, address, I8, mask), self.e.type(BIT))

    def _write_bits(self, place: Place, x: ir.Value) -> None:
        pair, address, mask = self._bit_bytes(place)
        self.store(pair, address, I8, self.b.bitcast(self.b.bitcast(x, I16), pair.type(I8)), mask)

    def _gather_bits(self, place: Place, stride: ir.Value) -> ir.Value:
        e, b = self.e, self.b
        at = b.add(e.splat(place.bit), b.mul(self._indices(), e.splat(stride)))
        offsets = b.add(e.splat(b.ptrtoint(place.address, I64)), b.lshr(at, 3))
        found = self._gather(b.inttoptr(offsets, e.type(POINTER)), I8)
        return b.trunc(b.lshr(found, b.trunc(b.and_(at, 7), e.type(I8))), e.type(BIT))


def _bytes(element: ir.Type) -> int:
    return element.width // 8 if isinstance(element, ir.IntType) else 8 if isinstance(element, ir.DoubleType) else 4


def _name(type: ir.VectorType) -> str:
    element = type.element
    if isinstance(element, ir.IntType):
        return f"v{type.count}i{element.width}"
    return f"v{type.count}f{8 * _bytes(element)}"

"""Instructions on several lanes at once: functions and loops are written in them, for both compilers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import llvmlite.ir as ir
import numpy as np

BIT, INT8, INT16, INT32, INT64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
HALF, FLOAT, DOUBLE = ir.HalfType(), ir.FloatType(), ir.DoubleType()
_SUFFIXES = {HALF: "f16", FLOAT: "f32", DOUBLE: "f64"}


@dataclass(frozen=True)
class Lanes:
    """An instruction builder whose values have several lanes, or are scalars.

    Attributes:
        builder: where instructions go.
        width: lanes of a value; 0 for scalars.
    """

    builder: ir.IRBuilder
    width: int = 0

    def type(self, element: ir.Type) -> ir.Type:
        """The type of values with such elements."""
        return ir.VectorType(element, self.width) if self.width else element

    def constant(self, element: ir.Type, number: float | int | Sequence[int]) -> ir.Constant:
        """A number in every lane, or one a lane; rounded to the element type."""
        if isinstance(element, ir.FloatType) and not isinstance(number, Sequence):
            with np.errstate(over="ignore"):
                number = float(np.float32(number))
        if not self.width:
            return ir.Constant(element, number)
        numbers = number if isinstance(number, Sequence) else [number] * self.width
        return ir.Constant(self.type(element), [ir.Constant(element, n) for n in numbers])

    def splat(self, scalar: ir.Value) -> ir.Value:
        """A scalar in every lane."""
        if not self.width:
            return scalar
        b, type = self.builder, self.type(scalar.type)
        one = b.insert_element(ir.Constant(type, ir.Undefined), scalar, ir.Constant(INT32, 0))
        zeros = ir.Constant(ir.VectorType(INT32, self.width), None)
        return b.shuffle_vector(one, ir.Constant(type, ir.Undefined), zeros)

    def intrinsic(self, name: str, *values: ir.Value) -> ir.Value:
        """An LLVM intrinsic that is overloaded on the type of its first argument, and gives that type."""
        type = values[0].type
        element = type.element if isinstance(type, ir.VectorType) else type
        suffix = _SUFFIXES.get(element) or f"i{element.width}"
        lanes = f"v{type.count}" if isinstance(type, ir.VectorType) else ""
        return self.call(f"llvm.{name}.{lanes}{suffix}", type, *values)

    def call(self, name: str, result: ir.Type, *values: ir.Value) -> ir.Value:
        """A call of a function by its name."""
        found = self.builder.module.globals.get(name)
        if found is None:
            found = ir.Function(self.builder.module, ir.FunctionType(result, [value.type for value in values]), name)
        return self.builder.call(found, values)

    def each(self, function: Callable[..., ir.Value], *values: ir.Value) -> ir.Value:
        """A function of scalars, lane by lane."""
        if not self.width:
            return function(*values)
        b, result = self.builder, None
        for lane in (ir.Constant(INT32, i) for i in range(self.width)):
            one = function(*(b.extract_element(value, lane) for value in values))
            result = ir.Constant(self.type(one.type), ir.Undefined) if result is None else result
            result = b.insert_element(result, one, lane)
        return result

    def fma(self, a: ir.Value, b: ir.Value | float, c: ir.Value | float) -> ir.Value:
        """a · b + c, rounded once; b and c may be literals."""
        element = a.type.element if self.width else a.type
        b, c = (x if isinstance(x, ir.Value) else self.constant(element, x) for x in (b, c))
        return self.intrinsic("fma", a, b, c)

    def horner(self, x: ir.Value, *coefficients: float) -> ir.Value:
        """A polynomial, the coefficient of the highest power first."""
        total: ir.Value | float = coefficients[0]
        if len(coefficients) == 1:
            return self.constant(x.type.element if self.width else x.type, total)
        total = self.fma(x, *coefficients[:2])
        for coefficient in coefficients[2:]:
            total = self.fma(total, x, coefficient)
        return total

    def select(self, condition: ir.Value, yes: ir.Value, no: ir.Value) -> ir.Value:
        """`yes` in lanes where the condition holds, else `no`."""
        return self.builder.select(condition, yes, no)

    def bits(self, x: ir.Value) -> ir.Value:
        """The bits of floats as integers."""
        element = x.type.element if self.width else x.type
        return self.builder.bitcast(x, self.type(INT64 if element == DOUBLE else INT16 if element == HALF else INT32))

    def floats(self, x: ir.Value, element: ir.Type = FLOAT) -> ir.Value:
        """Bits as floats."""
        return self.builder.bitcast(x, self.type(element))

    def behind(self, address: ir.Value, nbytes: ir.Value) -> ir.Value:
        """An address some bytes further."""
        return self.builder.gep(address, [nbytes], source_etype=INT8)

    def prefetch(self, address: ir.Value, *, write: bool = False) -> None:
        """Let a line of memory come to the first cache, to be read or written soon."""
        hints = (ir.Constant(INT32, hint) for hint in (int(write), 3, 1))  # to the nearest cache, as data
        self.call("llvm.prefetch.p0", ir.VoidType(), address, *hints)


def exchanged(count: int, apart: int) -> tuple[list[int], list[int]]:
    """The order of the lanes of two values, numbered one after the other, after an exchange: the first gets the lanes
    at places without a bit, the second those with it, so lanes at this distance change places.
    """
    lanes = range(count)
    low = [lane if not lane & apart else count + lane - apart for lane in lanes]
    return low, [lane + apart if not lane & apart else count + lane for lane in lanes]


def shuffled(builder: ir.IRBuilder, pair: Sequence[ir.Value], order: Sequence[int]) -> ir.Value:
    """Lanes of two values, numbered one after the other, in an order."""
    lanes = ir.Constant(ir.VectorType(INT32, len(order)), [ir.Constant(INT32, i) for i in order])
    return builder.shuffle_vector(*pair, lanes)

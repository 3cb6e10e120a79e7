"""Instructions on several lanes at once: functions and loops are written in them, for both compilers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import llvmlite.ir as ir

from foreplan.jit.builder import DOUBLE, FLOAT, HALF, I16, I32, I64, Builder, constant


@dataclass(frozen=True)
class Lanes:
    """An instruction builder whose values have several lanes, or are scalars.

    Attributes:
        b: where instructions go.
        width: lanes of a value; 0 for scalars.
    """

    b: Builder
    width: int = 0

    def type(self, element: ir.Type) -> ir.Type:
        """The type of values with such elements."""
        return ir.VectorType(element, self.width) if self.width else element

    def constant(self, element: ir.Type, number: float | Sequence[int]) -> ir.Constant:
        """A number in every lane, or one a lane; rounded to the element type."""
        if isinstance(number, Sequence):
            return ir.Constant(self.type(element), [ir.Constant(element, n) for n in number])
        return constant(self.type(element), number)

    def splat(self, scalar: ir.Value) -> ir.Value:
        """A scalar in every lane."""
        if not self.width:
            return scalar
        b, type = self.b, self.type(scalar.type)
        one = b.insert_element(ir.Constant(type, ir.Undefined), scalar, ir.Constant(I32, 0))
        zeros = ir.Constant(ir.VectorType(I32, self.width), None)
        return b.shuffle_vector(one, ir.Constant(type, ir.Undefined), zeros)

    def each(self, function: Callable[..., ir.Value], *values: ir.Value) -> ir.Value:
        """A function of scalars, lane by lane."""
        if not self.width:
            return function(*values)
        b, result = self.b, None
        for lane in (ir.Constant(I32, i) for i in range(self.width)):
            one = function(*(b.extract_element(value, lane) for value in values))
            result = ir.Constant(self.type(one.type), ir.Undefined) if result is None else result
            result = b.insert_element(result, one, lane)
        return result

    def fma(self, a: ir.Value, b: ir.Value | float, c: ir.Value | float) -> ir.Value:
        """a · b + c, rounded once; b and c may be literals."""
        b, c = (x if isinstance(x, ir.Value) else constant(a.type, x) for x in (b, c))
        return self.b.intrinsic("fma", a, b, c)

    def horner(self, x: ir.Value, *coefficients: float) -> ir.Value:
        """A polynomial, the coefficient of the highest power first."""
        total: ir.Value | float = coefficients[0]
        if len(coefficients) == 1:
            return constant(x.type, total)
        total = self.fma(x, *coefficients[:2])
        for coefficient in coefficients[2:]:
            total = self.fma(total, x, coefficient)
        return total

    def bits(self, x: ir.Value) -> ir.Value:
        """The bits of floats as integers."""
        element = x.type.element if self.width else x.type
        return self.b.bitcast(x, self.type(I64 if element == DOUBLE else I16 if element == HALF else I32))

    def floats(self, x: ir.Value, element: ir.Type = FLOAT) -> ir.Value:
        """Bits as floats."""
        return self.b.bitcast(x, self.type(element))


def exchanged(count: int, apart: int) -> tuple[list[int], list[int]]:
    """The order of the lanes of two values, numbered one after the other, after an exchange: the first gets the lanes
    at places without a bit, the second those with it, so lanes at this distance change places.
    """
    lanes = range(count)
    low = [lane if not lane & apart else count + lane - apart for lane in lanes]
    return low, [lane + apart if not lane & apart else count + lane for lane in lanes]


def shuffled(b: Builder, pair: Sequence[ir.Value], order: Sequence[int]) -> ir.Value:
    """Lanes of two values, numbered one after the other, in an order."""
    lanes = ir.Constant(ir.VectorType(I32, len(order)), [ir.Constant(I32, i) for i in order])
    return b.shuffle_vector(*pair, lanes)

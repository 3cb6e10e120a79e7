"""What expressions stand for while a function is translated, and the instructions that arithmetic takes.

Numbers follow NumPy's rules: literals take the type of what they meet, and integers wrap around. Integers with and
without a sign do not mix.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import llvmlite.ir as ir
import numpy as np

from foreplan.jit import builder
from foreplan.jit.builder import BIT, DOUBLE, FLOAT, HALF, I8, I64, POINTER, Builder
from foreplan.jit.types import BOOL, FLOAT64, INT64, UINT64, ArrayType, NoneType, TupleType, Type

ARITHMETIC = {"+": "add", "-": "sub", "*": "mul", "&": "and_", "|": "or_", "^": "xor", "<<": "shl"}
_FOLDED = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "//": operator.floordiv,
    "%": operator.mod, "&": operator.and_, "|": operator.or_, "^": operator.xor, "<<": operator.lshift,
    ">>": operator.rshift, "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le,
    ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
COMPARISONS = frozenset({"==", "!=", "<", "<=", ">", ">="})


class Untranslatable(TypeError):
    """Something that compiled functions do not have."""


@dataclass(frozen=True)
class Number:
    """A number that is known when the function runs."""

    dtype: np.dtype[Any]
    value: ir.Value


@dataclass(frozen=True)
class Fixed:
    """What is known when a function is compiled: a literal, a global constant, a function, None."""

    value: Any


@dataclass(frozen=True)
class Array:
    """An array.

    Attributes:
        data: its address.
        shape: extents, int64.
        strides: in bytes; of a dense array, empty.
        own: it, or what it is a view of, is made by this function, and ends with it.
    """

    type: ArrayType
    data: ir.Value
    shape: tuple[ir.Value, ...]
    strides: tuple[ir.Value, ...] = ()
    own: bool = False


@dataclass(frozen=True)
class Record:
    """A named tuple in a table, at an address."""

    type: TupleType
    address: ir.Value


@dataclass(frozen=True)
class Tuple:
    """A tuple of values."""

    items: tuple[Value, ...]


Value = Number | Fixed | Array | Record | Tuple


def register(dtype: np.dtype[Any]) -> ir.Type:
    """The type of a number in a register."""
    if dtype.kind == "f":
        return {2: HALF, 4: FLOAT, 8: DOUBLE}[dtype.itemsize]
    return BIT if dtype == BOOL else ir.IntType(8 * dtype.itemsize)


def memory(dtype: np.dtype[Any]) -> ir.Type:
    """The type of a number in memory."""
    return I8 if dtype == BOOL else register(dtype)


def parts_of(type: Type) -> list[ir.Type]:
    """The types of the registers that a value takes."""
    if isinstance(type, np.dtype):
        return [register(type)]
    if isinstance(type, ArrayType):
        return [POINTER, *[I64] * (type.ndim * (1 if type.dense else 2))]
    if isinstance(type, NoneType):
        return []
    return [POINTER] if type.names else [part for item in type.items for part in parts_of(item)]


def taken_apart(value: Value) -> list[ir.Value]:
    """A value that is no constant, as registers."""
    if isinstance(value, Number):
        return [value.value]
    if isinstance(value, Array):
        return [value.data, *value.shape, *value.strides]
    if isinstance(value, Record):
        return [value.address]
    return [part for item in value.items for part in taken_apart(item)] if isinstance(value, Tuple) else []


def put_together(type: Type, parts: Iterable[ir.Value], *, own: bool = False) -> Value:
    """The value of a type from its registers."""
    parts = iter(parts)
    if isinstance(type, np.dtype):
        return Number(type, next(parts))
    if isinstance(type, NoneType):
        return Fixed(None)
    if isinstance(type, TupleType):
        return Record(type, next(parts)) if type.names else Tuple(tuple(put_together(x, parts) for x in type.items))
    data, shape = next(parts), tuple(next(parts) for _ in range(type.ndim))
    return Array(type, data, shape, () if type.dense else tuple(next(parts) for _ in range(type.ndim)), own)


def type_of_value(value: Value) -> Type:
    """The type that a variable or an argument has when it gets this value.

    Raises:
        Untranslatable: no variable can have it.
    """
    if isinstance(value, Number):
        return value.dtype
    if isinstance(value, Array | Record):
        return value.type
    if isinstance(value, Tuple):
        return TupleType(tuple(map(type_of_value, value.items)))
    if value.value is None:
        return NoneType()
    if isinstance(value.value, tuple):
        return TupleType(tuple(type_of_value(Fixed(item)) for item in value.value))
    return dtype_of(value)


def dtype_of(value: Value) -> np.dtype[Any]:
    """The type of a number."""
    if isinstance(value, Number):
        return value.dtype
    if isinstance(value, Fixed) and isinstance(value.value, bool | int | float | np.generic):
        return INT64 if type(value.value) is int else np.dtype(type(value.value))
    raise Untranslatable(f"no number: {value}")


def is_literal(value: Value) -> bool:
    """Whether a number takes the type of what it meets."""
    return isinstance(value, Fixed) and type(value.value) in (int, float)


def common(values: Sequence[Value]) -> np.dtype[Any]:
    """The type in which numbers meet."""
    strong = [dtype_of(value) for value in values if not is_literal(value)]
    if not strong:
        return np.result_type(*map(dtype_of, values))
    found = strong[0]
    for other in strong[1:]:
        if UINT64 in (found, other) and "i" in (found.kind, other.kind):
            raise Untranslatable(f"{found} and {other} do not mix")
        found = np.result_type(found, other)
    literals = [value.value for value in values if is_literal(value)]  # type: ignore[union-attr]
    if any(isinstance(x, float) for x in literals) and found.kind != "f":
        return FLOAT64
    return INT64 if literals and found == BOOL else found


class Instructions:
    """Writes the instructions of arithmetic.

    Attributes:
        b: where they go.
        flags: by which arithmetic of floats may differ from IEEE 754's.
    """

    def __init__(self, b: Builder, flags: Sequence[str] = ()) -> None:
        self.b, self.flags = b, tuple(flags)

    def number(self, value: Value, dtype: np.dtype[Any]) -> Number:
        """A number as one of a type; a conversion that loses nothing but digits, or sense if a sign is there.

        Raises:
            Untranslatable: a float as an integer.
        """
        if isinstance(value, Fixed):
            if not isinstance(value.value, bool | int | float | np.generic):
                raise Untranslatable(f"no number: {value.value!r}")
            if dtype.kind != "f" and isinstance(value.value, float | np.floating):
                raise Untranslatable(f"{value.value!r} where {dtype} is expected")
            return Number(dtype, constant(value.value, dtype))
        if not isinstance(value, Number):
            raise Untranslatable(f"no number: {value}")
        if value.dtype.kind == "f" and dtype.kind not in "f":
            raise Untranslatable(f"{value.dtype} where {dtype} is expected")
        return self.cast(value, dtype)

    def cast(self, value: Number, dtype: np.dtype[Any]) -> Number:
        """A number as C converts it."""
        b, x, old, type = self.b, value.value, value.dtype, register(dtype)
        if old == dtype:
            return value
        if dtype == BOOL:
            return Number(BOOL, self.truth(value))
        if old.kind == "f":
            if dtype.kind == "f":
                return Number(dtype, (b.fpext if dtype.itemsize > old.itemsize else b.fptrunc)(x, type))
            return Number(dtype, (b.fptoui if dtype.kind == "u" else b.fptosi)(x, type))
        if dtype.kind == "f":
            return Number(dtype, (b.sitofp if old.kind == "i" else b.uitofp)(x, type))
        if register(old).width == type.width:
            return Number(dtype, x)
        if register(old).width > type.width:
            return Number(dtype, b.trunc(x, type))
        return Number(dtype, (b.sext if old.kind == "i" else b.zext)(x, type))

    def truth(self, value: Value) -> ir.Value:
        """Whether a number is not zero."""
        if isinstance(value, Fixed):
            return ir.Constant(BIT, bool(value.value))
        if not isinstance(value, Number):
            raise Untranslatable("the truth of what is no number")
        if value.dtype == BOOL:
            return value.value
        return (self.b.fcmp_unordered if value.dtype.kind == "f" else self.b.icmp_unsigned)("!=", value.value, 0)

    def binary(self, op: str, left: Value, right: Value) -> Value:
        """A number by an operator, as Python writes it."""
        if isinstance(left, Fixed) and isinstance(right, Fixed):
            with np.errstate(over="ignore"):
                return Fixed(_FOLDED[op](left.value, right.value))
        if op in COMPARISONS and (mixed := self._with_and_without_sign(op, left, right)) is not None:
            return mixed
        dtype = common([left, right])
        if op in COMPARISONS:
            x, y = self.number(left, dtype), self.number(right, dtype)
            return Number(BOOL, self._compared(op, x.value, y.value, dtype))
        if dtype == BOOL and op not in "&|^":
            dtype = INT64
        if op == "/" and dtype.kind != "f":
            dtype = FLOAT64
        x, y = self.number(left, dtype), self.number(right, dtype)
        if dtype.kind == "f":
            return Number(dtype, self._float(op, x.value, y.value))
        return Number(dtype, self._integer(op, x.value, y.value, dtype))

    def _with_and_without_sign(self, op: str, left: Value, right: Value) -> Value | None:
        """Whether a uint64 and an integer with a sign compare so; None of other numbers."""
        kinds = [None if is_literal(value) else dtype_of(value) for value in (left, right)]
        if None in kinds or UINT64 not in kinds or not any(kind and kind.kind == "i" for kind in kinds):
            return None
        x, y = (self.cast(self.number(value, dtype_of(value)), INT64).value for value in (left, right))
        signed, lower = (y, False) if kinds[0] == UINT64 else (x, True)  # below 0, it is the lower one
        below = op == "!=" or op in (("<", "<=") if lower else (">", ">="))
        is_below = self.b.icmp_signed("<", signed, 0)
        return Number(BOOL, self.b.select(is_below, ir.Constant(BIT, below), self.b.icmp_unsigned(op, x, y)))

    def _compared(self, op: str, x: ir.Value, y: ir.Value, dtype: np.dtype[Any]) -> ir.Value:
        if dtype.kind == "f":
            return (self.b.fcmp_unordered if op == "!=" else self.b.fcmp_ordered)(op, x, y)
        return (self.b.icmp_signed if dtype.kind == "i" else self.b.icmp_unsigned)(op, x, y)

    def _float(self, op: str, x: ir.Value, y: ir.Value) -> ir.Value:
        names = {"+": "fadd", "-": "fsub", "*": "fmul", "/": "fdiv"}
        if op not in names:
            raise Untranslatable(f"{op} of floats")
        return getattr(self.b, names[op])(x, y, flags=self.flags)

    def _integer(self, op: str, x: ir.Value, y: ir.Value, dtype: np.dtype[Any]) -> ir.Value:
        b, unsigned = self.b, dtype.kind == "u"
        if op in ARITHMETIC:
            return getattr(b, ARITHMETIC[op])(x, y)
        if op == ">>":
            return (b.lshr if unsigned else b.ashr)(x, y)
        if unsigned:
            return (b.udiv if op == "//" else b.urem)(x, y)
        if isinstance(y, ir.Constant) and y.constant > 0 and y.constant & (y.constant - 1) == 0:
            bits = y.constant.bit_length() - 1  # a shift rounds down, as Python does
            return b.ashr(x, bits) if op == "//" else b.and_(x, y.constant - 1)
        rest = b.srem(x, y)
        if isinstance(y, ir.Constant):
            away = b.icmp_signed("<" if y.constant > 0 else ">", rest, 0)
        else:
            away = b.icmp_signed("<", b.xor(rest, y), 0)
        lower = b.and_(b.icmp_signed("!=", rest, 0), away)
        if op == "%":
            return b.add(rest, b.select(lower, y, 0))
        return b.sub(b.sdiv(x, y), b.zext(lower, register(dtype)))

    def negated(self, value: Value) -> Value:
        """Minus a number."""
        if isinstance(value, Fixed):
            return Fixed(-value.value)
        dtype = common([value, Fixed(0)])
        x = self.number(value, dtype).value
        return Number(dtype, self.b.fneg(x, flags=self.flags) if dtype.kind == "f" else self.b.neg(x))

    def inverted(self, value: Value) -> Value:
        """The bits of an integer inverted."""
        if isinstance(value, Fixed):
            return Fixed(~value.value)
        if dtype_of(value).kind not in "iu":
            raise Untranslatable("the inverted bits of what is no integer")
        return Number(dtype_of(value), self.b.not_(self.number(value, dtype_of(value)).value))

    def extreme(self, op: str, values: Sequence[Value]) -> Value:
        """The first of the least or greatest of numbers, as Python's `min` (op <) and `max` (>) find it."""
        if all(isinstance(value, Fixed) for value in values):
            return Fixed((min if op == "<" else max)(value.value for value in values))  # type: ignore[union-attr]
        dtype = common(values)
        found, *others = (self.number(value, dtype).value for value in values)
        for other in others:
            found = self.b.select(self._compared(op, other, found, dtype), other, found)
        return Number(dtype, found)

    def from_word(self, word: ir.Value, dtype: np.dtype[Any]) -> Number:
        """A number from its bits in a table."""
        b, type = self.b, register(dtype)
        if dtype.kind == "f":
            bits = word if dtype.itemsize == 8 else b.trunc(word, ir.IntType(8 * dtype.itemsize))
            return Number(dtype, b.bitcast(bits, type))
        return Number(dtype, word if type == I64 else b.trunc(word, type))

    def to_word(self, value: Number) -> ir.Value:
        """The bits of a number for a table."""
        b, x = self.b, value.value
        if value.dtype.kind == "f":
            x = b.bitcast(x, ir.IntType(8 * value.dtype.itemsize))
        return x if x.type == I64 else b.zext(x, I64)


def constant(value: Any, dtype: np.dtype[Any]) -> ir.Constant:
    """A number that is known, as one of a type."""
    return builder.constant(
        register(dtype), float(value) if dtype.kind == "f" else bool(value) if dtype == BOOL else int(value)
    )


def as_index(e: Instructions, value: Value) -> ir.Value:
    """An integer as int64."""
    if dtype_of(value).kind == "f":
        raise Untranslatable("an index that is no integer")
    return e.number(value, INT64).value

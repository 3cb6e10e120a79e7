"""Element types on the CPU: their types in registers and in memory, and conversions between them.

Halves (float16, bfloat16) are computed with as float32 and rounded after each operation, as NumPy does.
"""

from __future__ import annotations

import llvmlite.ir as ir

from foreplan.graph import DType
from foreplan.graph.types import FLOAT32, FLOAT64
from foreplan.jit.builder import BIT, DOUBLE, FLOAT, HALF, I8, I16, I32, I64
from foreplan.runtime.cpu.codegen.lanes import Lanes

_INTEGERS = {1: I8, 2: I16, 4: I32, 8: I64}


def register_type(dtype: DType) -> ir.Type:
    """The type of values in registers, for arithmetic."""
    if dtype.is_float:
        return DOUBLE if dtype.itemsize == 8 else FLOAT
    return BIT if dtype.category == "bool" else _INTEGERS[dtype.itemsize]


def memory_type(dtype: DType) -> ir.Type:
    """The type of values in memory; halves as integers, and truth values as bytes."""
    return register_type(dtype) if dtype.is_float and dtype.itemsize > 2 else _INTEGERS[dtype.itemsize]


def loaded(e: Lanes, x: ir.Value, dtype: DType) -> ir.Value:
    """A value from memory, for arithmetic."""
    b = e.b
    if dtype.category == "bool":
        return b.icmp_unsigned("!=", x, 0)
    if dtype.name == "bfloat16":
        return e.floats(b.shl(b.zext(x, e.type(I32)), 16))
    return b.fpext(e.floats(x, HALF), e.type(FLOAT)) if dtype.name == "float16" else x


def stored(e: Lanes, x: ir.Value, dtype: DType) -> ir.Value:
    """A value as memory holds it."""
    b = e.b
    if dtype.category == "bool":
        return b.zext(x, e.type(I8))
    if dtype.name == "bfloat16":
        return b.trunc(b.lshr(e.bits(x), 16), e.type(I16))
    return e.bits(b.fptrunc(x, e.type(HALF))) if dtype.name == "float16" else x


def rounded(e: Lanes, x: ir.Value, dtype: DType) -> ir.Value:
    """A float32 value, rounded to the nearest value of a half; others as they are."""
    b = e.b
    if dtype.name == "float16":
        return b.fpext(b.fptrunc(x, e.type(HALF)), e.type(FLOAT))
    if dtype.name != "bfloat16":
        return x
    bits, high = e.bits(x), e.constant(I32, 0xFFFF0000)
    odd = b.and_(b.lshr(bits, 16), 1)
    near = b.and_(b.add(b.add(bits, odd), 0x7FFF), high)
    nan = b.and_(b.or_(bits, 0x400000), high)
    return e.floats(b.select(b.fcmp_unordered("uno", x, x), nan, near))


def convert(e: Lanes, x: ir.Value, old: DType, new: DType) -> ir.Value:
    """A value as another element type's, as C converts."""
    if old == new:
        return x
    if new.category == "bool":
        return truth(e, x, old)
    if new.is_float:
        return _to_float(e, x, old, new)
    return _float_to_integer(e, x, old, new) if old.is_float else _to_width(e, x, old, register_type(new))


def truth(e: Lanes, x: ir.Value, dtype: DType) -> ir.Value:
    """Whether a value is not zero; NaN is not."""
    if dtype.is_float:
        return e.b.fcmp_unordered("!=", x, 0.0)
    return x if dtype.category == "bool" else e.b.icmp_unsigned("!=", x, 0)


def _to_float(e: Lanes, x: ir.Value, old: DType, new: DType) -> ir.Value:
    b, type = e.b, e.type(register_type(new))
    if old.is_float:
        if old == FLOAT64:
            x = b.fptrunc(x, type) if new == FLOAT32 else _to_odd(e, x)
        return b.fpext(x, type) if new == FLOAT64 else rounded(e, x, new)
    return rounded(e, b.sitofp(x, type) if old.category == "int" else b.uitofp(x, type), new)


def _to_odd(e: Lanes, x: ir.Value) -> ir.Value:
    """A float64 value as float32, rounded to an odd last bit if it is inexact, so that it can be rounded again."""
    b = e.b
    near = b.fptrunc(x, e.type(FLOAT))
    back, bits = b.fpext(near, e.type(DOUBLE)), e.bits(near)
    even = b.icmp_unsigned("==", b.and_(bits, 1), 0)
    wrong = b.and_(even, b.fcmp_ordered("!=", back, x))
    below = b.fcmp_ordered("<", b.intrinsic("fabs", back), b.intrinsic("fabs", x))
    step = b.select(below, e.constant(I32, 1), e.constant(I32, -1))
    return e.floats(b.select(wrong, b.add(bits, step), bits))


def _float_to_integer(e: Lanes, x: ir.Value, old: DType, new: DType) -> ir.Value:
    """Toward zero, by way of an integer of 32 or 64 bits. NaN and what is beyond its range become its least number, as
    x86's instructions give it: LLVM leaves this open, and lanes would differ.
    """
    signed = new.name != "uint64"
    bits = 64 if new.itemsize == 8 or new.name == "uint32" else 32
    b, element, wide = e.b, register_type(old), e.type(ir.IntType(bits))
    low, beyond = (-(2 ** (bits - 1)), 2 ** (bits - 1)) if signed else (0, 2**bits)
    least, limit = e.constant(element, low), e.constant(element, beyond)
    inside = b.and_(b.fcmp_ordered(">=", x, least), b.fcmp_ordered("<", x, limit))
    x = b.select(inside, x, least)
    whole = b.fptosi(x, wide) if signed else b.fptoui(x, wide)
    return whole if new.itemsize * 8 == bits else b.trunc(whole, e.type(register_type(new)))


def _to_width(e: Lanes, x: ir.Value, old: DType, element: ir.IntType) -> ir.Value:
    width = register_type(old).width
    if width == element.width:
        return x
    if width > element.width:
        return e.b.trunc(x, e.type(element))
    return e.b.sext(x, e.type(element)) if old.category == "int" else e.b.zext(x, e.type(element))

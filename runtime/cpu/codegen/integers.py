"""Integer division, powers and shifts with NumPy's meaning where the processor has none."""

from __future__ import annotations

import llvmlite.ir as ir

from foreplan.graph import DType
from foreplan.runtime.cpu.codegen.lanes import Lanes


def _element(e: Lanes, x: ir.Value) -> ir.IntType:
    return x.type.element if e.width else x.type


def _safe(e: Lanes, t: DType, a: ir.Value, b: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Whether b is zero; and b, or 1 where a / b has no value."""
    element = _element(e, a)
    zero, one = e.constant(element, 0), e.constant(element, 1)
    empty = e.builder.icmp_unsigned("==", b, zero)
    wrong = empty
    if t.category == "int":
        least = e.builder.icmp_signed("==", a, e.constant(element, -(1 << element.width - 1)))
        over = e.builder.and_(least, e.builder.icmp_signed("==", b, e.constant(element, -1)))
        wrong = e.builder.or_(empty, over)
    return empty, e.select(wrong, one, b)


def _divided(e: Lanes, t: DType, a: ir.Value, b: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Quotient toward zero and its remainder; zero where b is."""
    empty, safe = _safe(e, t, a, b)
    zero, signed = e.constant(_element(e, a), 0), t.category == "int"
    quotient = e.builder.sdiv(a, safe) if signed else e.builder.udiv(a, safe)
    rest = e.builder.sub(a, e.builder.mul(quotient, safe))
    return e.select(empty, zero, quotient), e.select(empty, zero, rest)


def divide(e: Lanes, t: DType, a: ir.Value, b: ir.Value) -> ir.Value:
    """The quotient toward zero."""
    return _divided(e, t, a, b)[0]


def c_remainder(e: Lanes, t: DType, a: ir.Value, b: ir.Value) -> ir.Value:
    """The remainder, with the sign of a."""
    return _divided(e, t, a, b)[1]


def _lower(e: Lanes, t: DType, rest: ir.Value, b: ir.Value) -> ir.Value:
    """Whether rounding down differs from rounding toward zero."""
    zero = e.constant(_element(e, b), 0)
    signs = (e.builder.icmp_signed("<", x, zero) for x in (rest, b))
    return e.builder.and_(e.builder.icmp_unsigned("!=", rest, zero), e.builder.xor(*signs))


def floor_divide(e: Lanes, t: DType, a: ir.Value, b: ir.Value) -> ir.Value:
    """The quotient rounded down."""
    quotient, rest = _divided(e, t, a, b)
    if t.category != "int":
        return quotient
    one = e.constant(_element(e, a), 1)
    return e.select(_lower(e, t, rest, b), e.builder.sub(quotient, one), quotient)


def remainder(e: Lanes, t: DType, a: ir.Value, b: ir.Value) -> ir.Value:
    """The remainder of rounding down, with the sign of b."""
    rest = c_remainder(e, t, a, b)
    return e.select(_lower(e, t, rest, b), e.builder.add(rest, b), rest) if t.category == "int" else rest


def shift_left(e: Lanes, t: DType, a: ir.Value, b: ir.Value) -> ir.Value:
    """a · 2^b; zero where all bits are shifted out."""
    element = _element(e, a)
    within, zero = e.builder.icmp_unsigned("<", b, e.constant(element, element.width)), e.constant(element, 0)
    return e.select(within, e.builder.shl(a, e.select(within, b, zero)), zero)


def shift_right(e: Lanes, t: DType, a: ir.Value, b: ir.Value) -> ir.Value:
    """a / 2^b rounded down; 0 or -1, by the sign, where all bits are shifted out."""
    element = _element(e, a)
    within = e.builder.icmp_unsigned("<", b, e.constant(element, element.width))
    if t.category == "int":
        return e.builder.ashr(a, e.select(within, b, e.constant(element, element.width - 1)))
    zero = e.constant(element, 0)
    return e.select(within, e.builder.lshr(a, e.select(within, b, zero)), zero)


def power(e: Lanes, a: ir.Value, b: ir.Value) -> ir.Value:
    """a to the b by squaring, which wraps around; the result has no meaning if b is negative."""
    element = _element(e, a)
    name = f"power.i{element.width}"
    if e.builder.module.globals.get(name) is None:
        _define_power(e.builder.module, name, element)
    return e.each(lambda *x: e.builder.call(e.builder.module.globals[name], x), a, b)


def _define_power(module: ir.Module, name: str, element: ir.IntType) -> None:
    function = ir.Function(module, ir.FunctionType(element, [element, element]), name)
    function.linkage = "internal"
    entry, loop, body, end = (function.append_basic_block(label) for label in ("entry", "loop", "body", "end"))
    zero, one = ir.Constant(element, 0), ir.Constant(element, 1)
    ir.IRBuilder(entry).branch(loop)
    b = ir.IRBuilder(loop)
    base, left, total = (b.phi(element) for _ in range(3))
    b.cbranch(b.icmp_unsigned("!=", left, zero), body, end)
    b = ir.IRBuilder(body)
    odd = b.icmp_unsigned("!=", b.and_(left, one), zero)
    after = (b.mul(base, base), b.lshr(left, one), b.select(odd, b.mul(total, base), total))
    b.branch(loop)
    for phi, first, then in zip((base, left, total), (*function.args, one), after):
        phi.add_incoming(first, entry)
        phi.add_incoming(then, body)
    ir.IRBuilder(end).ret(total)

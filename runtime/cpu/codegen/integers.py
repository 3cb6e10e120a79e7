"""Integer division, powers and shifts with NumPy's meaning where the processor has none."""

from __future__ import annotations

import llvmlite.ir as ir

from foreplan.graph import DType
from foreplan.jit.builder import Builder
from foreplan.runtime.cpu.codegen.lanes import Lanes


def _width(x: ir.Value) -> int:
    """Bits of an integer, or of a vector's."""
    return (x.type.element if isinstance(x.type, ir.VectorType) else x.type).width


def _safe(e: Lanes, t: DType, a: ir.Value, b: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Whether b is zero; and b, or 1 where a / b has no value."""
    wrong = empty = e.b.icmp_unsigned("==", b, 0)
    if t.category == "int":
        least = e.b.icmp_signed("==", a, -(1 << _width(a) - 1))
        over = e.b.and_(least, e.b.icmp_signed("==", b, -1))
        wrong = e.b.or_(empty, over)
    return empty, e.b.select(wrong, 1, b)


def _divided(e: Lanes, t: DType, a: ir.Value, b: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Quotient toward zero and its remainder; zero where b is."""
    empty, safe = _safe(e, t, a, b)
    quotient = (e.b.sdiv if t.category == "int" else e.b.udiv)(a, safe)
    rest = e.b.sub(a, e.b.mul(quotient, safe))
    return e.b.select(empty, 0, quotient), e.b.select(empty, 0, rest)


def divide(e: Lanes, t: DType, a: ir.Value, b: ir.Value) -> ir.Value:
    """The quotient toward zero."""
    return _divided(e, t, a, b)[0]


def c_remainder(e: Lanes, t: DType, a: ir.Value, b: ir.Value) -> ir.Value:
    """The remainder, with the sign of a."""
    return _divided(e, t, a, b)[1]


def _lower(e: Lanes, t: DType, rest: ir.Value, b: ir.Value) -> ir.Value:
    """Whether rounding down differs from rounding toward zero."""
    signs = (e.b.icmp_signed("<", x, 0) for x in (rest, b))
    return e.b.and_(e.b.icmp_unsigned("!=", rest, 0), e.b.xor(*signs))


def floor_divide(e: Lanes, t: DType, a: ir.Value, b: ir.Value) -> ir.Value:
    """The quotient rounded down."""
    quotient, rest = _divided(e, t, a, b)
    if t.category != "int":
        return quotient
    return e.b.select(_lower(e, t, rest, b), e.b.sub(quotient, 1), quotient)


def remainder(e: Lanes, t: DType, a: ir.Value, b: ir.Value) -> ir.Value:
    """The remainder of rounding down, with the sign of b."""
    rest = c_remainder(e, t, a, b)
    return e.b.select(_lower(e, t, rest, b), e.b.add(rest, b), rest) if t.category == "int" else rest


def shift_left(e: Lanes, t: DType, a: ir.Value, b: ir.Value) -> ir.Value:
    """a · 2^b; zero where all bits are shifted out."""
    within = e.b.icmp_unsigned("<", b, _width(b))
    return e.b.select(within, e.b.shl(a, e.b.select(within, b, 0)), 0)


def shift_right(e: Lanes, t: DType, a: ir.Value, b: ir.Value) -> ir.Value:
    """a / 2^b rounded down; 0 or -1, by the sign, where all bits are shifted out."""
    within = e.b.icmp_unsigned("<", b, _width(b))
    if t.category == "int":
        return e.b.ashr(a, e.b.select(within, b, _width(b) - 1))
    return e.b.select(within, e.b.lshr(a, e.b.select(within, b, 0)), 0)


def power(e: Lanes, a: ir.Value, b: ir.Value) -> ir.Value:
    """a to the b by squaring, which wraps around; the result has no meaning if b is negative."""
    name = f"power.i{_width(a)}"
    if e.b.module.globals.get(name) is None:
        _define_power(e.b.module, name, ir.IntType(_width(a)))
    return e.each(lambda *x: e.b.call(e.b.module.globals[name], x), a, b)


def _define_power(module: ir.Module, name: str, element: ir.IntType) -> None:
    function = ir.Function(module, ir.FunctionType(element, [element, element]), name)
    function.linkage = "internal"
    entry, loop, body, end = (function.append_basic_block(label) for label in ("entry", "loop", "body", "end"))
    Builder(entry).branch(loop)
    b = Builder(loop)
    base, left, total = (b.phi(element) for _ in range(3))
    b.cbranch(b.icmp_unsigned("!=", left, 0), body, end)
    b = Builder(body)
    odd = b.icmp_unsigned("!=", b.and_(left, 1), 0)
    after = (b.mul(base, base), b.lshr(left, 1), b.select(odd, b.mul(total, base), total))
    b.branch(loop)
    for phi, first, then in zip((base, left, total), (*function.args, ir.Constant(element, 1)), after):
        phi.add_incoming(first, entry)
        phi.add_incoming(then, body)
    Builder(end).ret(total)

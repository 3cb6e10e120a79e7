"""Transcendental functions of float32 without branches, for lanes and for compiled loops, which LLVM vectorises.

All treat infinity, NaN and subnormal numbers as NumPy does. Their errors, in units in the last place, are in
tests/cpu/test_functions.py. Coefficients were fitted in float64 by reweighted least squares (Lawson, 1961) to the least
relative error of the result. Sums that cancel are fused multiply-adds: `reassoc` cannot reorder them.

    from foreplan.runtime.cpu.codegen.functions import exp32      # in a compiled loop: exp32(x[i])
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.ir as ir
import numpy as np

from foreplan.jit import Emitted
from foreplan.jit.types import FLOAT32
from foreplan.jit.values import Instructions, Number, Value
from foreplan.runtime.cpu.codegen.lanes import DOUBLE, FLOAT, INT32, Lanes

_LOG2E = 1.4426950408889634
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4  # their sum is ln 2, and n · high is exact
_EXPM1 = (0.000198458845, 0.00139407197, 0.00833338965, 0.0416663587, 0.166666657, 0.5)
_LOG = (
    0.0674663857,
    -0.116756514,
    0.118881628,
    -0.124055892,
    0.142195523,
    -0.166679963,
    0.200021192,
    -0.250000089,
    0.333333135,
)
_ERF = (
    8.51310469e-05,
    -0.000817563967,
    0.00520385895,
    -0.0268605091,
    0.112837151,
    -0.376126349,
    0.128379167,
)  # less x itself
_LOG_ERFC = (
    0.000198219728,
    -0.00306549086,
    0.0223152153,
    -0.104113683,
    -0.636976063,
    -1.12779725,
    -0.000166447164,
)
_SQRT_HALF_BITS = 0x3F3504F3
_SUBNORMAL_SCALE = 23  # 2^23 makes every subnormal number normal


def _number(e: Lanes, number: float) -> ir.Constant:
    return e.constant(FLOAT, number)


def _clamped(e: Lanes, x: ir.Value, low: float, high: float) -> ir.Value:
    """x within [low, high]; NaN stays."""
    b = e.builder
    x = e.select(b.fcmp_ordered(">", x, _number(e, high)), _number(e, high), x)
    return e.select(b.fcmp_ordered("<", x, _number(e, low)), _number(e, low), x)


def _is_nan(e: Lanes, x: ir.Value) -> ir.Value:
    return e.builder.fcmp_unordered("uno", x, x)


def _power_of_two(e: Lanes, n: ir.Value) -> ir.Value:
    """2^n for whole n from -126 to 127."""
    b = e.builder
    return e.floats(b.shl(b.add(n, e.constant(INT32, 127)), e.constant(INT32, 23)))


def _reduced(e: Lanes, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """n and e^r - 1, where x = n ln 2 + r and |r| <= ln 2 / 2."""
    n = e.intrinsic("rint", e.builder.fmul(x, _number(e, _LOG2E)))
    r = e.fma(n, -_LN2_LOW, e.fma(n, -_LN2_HIGH, x))
    square = e.builder.fmul(r, r)
    whole = e.builder.fptosi(n, e.type(INT32))
    return whole, e.fma(square, e.horner(r, *_EXPM1), r)


def exp(e: Lanes, x: ir.Value) -> ir.Value:
    """e to the x."""
    b = e.builder
    n, less = _reduced(e, _clamped(e, x, -105.0, 90.0))
    half = b.ashr(n, e.constant(INT32, 1))  # 2^n itself may be no normal number
    first, second = _power_of_two(e, half), _power_of_two(e, b.sub(n, half))
    return e.select(_is_nan(e, x), x, b.fmul(e.fma(first, less, first), second))


def expm1(e: Lanes, x: ir.Value) -> ir.Value:
    """e to the x, less 1."""
    b = e.builder
    n, less = _reduced(e, _clamped(e, x, -30.0, 88.9))
    half = _power_of_two(e, b.sub(n, e.constant(INT32, 1)))  # 2^(n - 1), as 2^n may be too large
    result = e.fma(half, less, b.fsub(half, _number(e, 0.5)))
    result = e.select(b.icmp_signed("==", n, e.constant(INT32, 0)), less, b.fadd(result, result))
    return e.select(_is_nan(e, x), x, e.intrinsic("copysign", result, x))


def log(e: Lanes, x: ir.Value) -> ir.Value:
    """Natural logarithm."""
    b = e.builder
    small = b.fcmp_ordered("<", x, _number(e, 2.0**-126))
    bits = e.bits(e.select(small, b.fmul(x, _number(e, 2.0**_SUBNORMAL_SCALE)), x))
    # x = 2^n · (1 + f) with sqrt(1/2) <= 1 + f < sqrt(2)
    above = b.sub(bits, e.constant(INT32, _SQRT_HALF_BITS))
    n = b.ashr(above, e.constant(INT32, 23))
    mantissa = e.floats(b.sub(bits, b.shl(n, e.constant(INT32, 23))))
    f = b.fsub(mantissa, _number(e, 1.0))
    n = e.select(small, b.sub(n, e.constant(INT32, _SUBNORMAL_SCALE)), n)
    power = b.sitofp(n, e.type(FLOAT))
    square = b.fmul(f, f)
    rest = e.fma(b.fmul(square, f), e.horner(f, *_LOG), b.fmul(power, _number(e, _LN2_LOW)))
    rest = e.fma(square, -0.5, rest)
    result = e.fma(power, _LN2_HIGH, b.fadd(f, rest))
    result = e.select(b.fcmp_ordered("==", x, _number(e, np.inf)), x, result)
    result = e.select(b.fcmp_ordered("==", x, _number(e, 0.0)), _number(e, -np.inf), result)
    return e.select(b.fcmp_unordered("<", x, _number(e, 0.0)), _number(e, np.nan), result)


def log1p(e: Lanes, x: ir.Value) -> ir.Value:
    """Logarithm of 1 + x, corrected by the rounding error of the sum; not for loops that may reorder sums."""
    b, one = e.builder, _number(e, 1.0)
    total = b.fadd(one, x)
    lost = b.fsub(x, b.fsub(total, one))
    whole = log(e, total)
    ordinary = b.fcmp_ordered("<", e.intrinsic("fabs", whole), _number(e, np.inf))
    return e.intrinsic("copysign", e.select(ordinary, b.fadd(whole, b.fdiv(lost, total)), whole), x)


def tanh(e: Lanes, x: ir.Value) -> ir.Value:
    """Hyperbolic tangent: t / (t + 2) of t = e^2x - 1."""
    b = e.builder
    size = e.intrinsic("fabs", x)
    size = e.select(b.fcmp_ordered(">", size, _number(e, 10.0)), _number(e, 10.0), size)
    t = expm1(e, b.fadd(size, size))
    return e.intrinsic("copysign", b.fdiv(t, b.fadd(t, _number(e, 2.0))), x)


def sigmoid(e: Lanes, x: ir.Value) -> ir.Value:
    """1 / (1 + e^-x), by the power that is at most 1."""
    b, one = e.builder, _number(e, 1.0)
    power = exp(e, b.fneg(e.intrinsic("fabs", x)))
    top = e.select(b.fcmp_ordered("<", x, _number(e, 0.0)), power, one)
    return b.fdiv(top, b.fadd(one, power))


def erf(e: Lanes, x: ir.Value) -> ir.Value:
    """The error function: odd near zero, 1 - e^polynomial beyond."""
    b = e.builder
    size = e.intrinsic("fabs", x)
    near = e.fma(e.horner(b.fmul(x, x), *_ERF), x, x)
    far = e.select(b.fcmp_ordered(">", size, _number(e, 4.0)), _number(e, 4.0), size)
    beyond = b.fsub(_number(e, 1.0), exp(e, e.horner(far, *_LOG_ERFC)))
    beyond = e.intrinsic("copysign", beyond, x)
    return e.select(b.fcmp_unordered("<", size, _number(e, 0.9)), near, beyond)


def divmod(e: Lanes, x: ir.Value, y: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Quotient rounded down, and the remainder with the sign of y, of float32 or float64; as NumPy's."""
    b = e.builder
    element = DOUBLE if e.bits(x).type != e.type(INT32) else FLOAT
    zero, one = e.constant(element, 0.0), e.constant(element, 1.0)
    ratio, rest = b.fdiv(x, y), b.frem(x, y)
    quotient = b.fdiv(b.fsub(x, rest), y)
    left = b.fcmp_unordered("!=", rest, zero)
    other = b.xor(b.fcmp_ordered("<", y, zero), b.fcmp_ordered("<", rest, zero))
    lower = b.and_(left, other)
    quotient = e.select(lower, b.fsub(quotient, one), quotient)
    rest = e.select(lower, b.fadd(rest, y), e.select(left, rest, e.intrinsic("copysign", zero, y)))
    floor = e.intrinsic("floor", quotient)
    far = b.fcmp_ordered(">", b.fsub(quotient, floor), e.constant(element, 0.5))
    floor = e.select(far, b.fadd(floor, one), floor)
    floor = e.select(b.fcmp_unordered("!=", quotient, zero), floor, e.intrinsic("copysign", zero, ratio))
    by_zero = b.fcmp_ordered("==", y, zero)
    return e.select(by_zero, ratio, floor), e.select(by_zero, e.constant(element, np.nan), rest)


def _for_loops(function: Callable[[Lanes, ir.Value], ir.Value]) -> Any:
    """The function of a float32 in compiled loops."""

    def made(e: Instructions, x: Value) -> Value:
        return Number(FLOAT32, function(Lanes(e.b), e.number(x, FLOAT32).value))

    made.__name__ = made.__qualname__ = function.__name__
    made.__doc__ = function.__doc__
    return Emitted(made)


exp32, expm132, log32, tanh32, sigmoid32, erf32 = (
    _for_loops(function) for function in (exp, expm1, log, tanh, sigmoid, erf)
)

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
from foreplan.jit.builder import FLOAT, I32, constant
from foreplan.jit.types import FLOAT32
from foreplan.jit.values import Instructions, Number, Value
from foreplan.runtime.cpu.codegen.lanes import Lanes

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


def _clamped(e: Lanes, x: ir.Value, low: float, high: float) -> ir.Value:
    """x within [low, high]; NaN stays."""
    b = e.b
    x = b.select(b.fcmp_ordered(">", x, high), high, x)
    return b.select(b.fcmp_ordered("<", x, low), low, x)


def _is_nan(e: Lanes, x: ir.Value) -> ir.Value:
    return e.b.fcmp_unordered("uno", x, x)


def _power_of_two(e: Lanes, n: ir.Value) -> ir.Value:
    """2^n for whole n from -126 to 127."""
    b = e.b
    return e.floats(b.shl(b.add(n, 127), 23))


def _reduced(e: Lanes, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """n and e^r - 1, where x = n ln 2 + r and |r| <= ln 2 / 2."""
    n = e.b.intrinsic("rint", e.b.fmul(x, _LOG2E))
    r = e.fma(n, -_LN2_LOW, e.fma(n, -_LN2_HIGH, x))
    square = e.b.fmul(r, r)
    whole = e.b.fptosi(n, e.type(I32))
    return whole, e.fma(square, e.horner(r, *_EXPM1), r)


def exp(e: Lanes, x: ir.Value) -> ir.Value:
    """e to the x."""
    b = e.b
    n, less = _reduced(e, _clamped(e, x, -105.0, 90.0))
    half = b.ashr(n, 1)  # 2^n itself may be no normal number
    first, second = _power_of_two(e, half), _power_of_two(e, b.sub(n, half))
    return b.select(_is_nan(e, x), x, b.fmul(e.fma(first, less, first), second))


def expm1(e: Lanes, x: ir.Value) -> ir.Value:
    """e to the x, less 1."""
    b = e.b
    n, less = _reduced(e, _clamped(e, x, -30.0, 88.9))
    half = _power_of_two(e, b.sub(n, 1))  # 2^(n - 1), as 2^n may be too large
    result = e.fma(half, less, b.fsub(half, 0.5))
    result = b.select(b.icmp_signed("==", n, 0), less, b.fadd(result, result))
    return b.select(_is_nan(e, x), x, b.intrinsic("copysign", result, x))


def log(e: Lanes, x: ir.Value) -> ir.Value:
    """Natural logarithm."""
    b = e.b
    small = b.fcmp_ordered("<", x, 2.0**-126)
    bits = e.bits(b.select(small, b.fmul(x, 2.0**_SUBNORMAL_SCALE), x))
    # x = 2^n · (1 + f) with sqrt(1/2) <= 1 + f < sqrt(2)
    above = b.sub(bits, _SQRT_HALF_BITS)
    n = b.ashr(above, 23)
    mantissa = e.floats(b.sub(bits, b.shl(n, 23)))
    f = b.fsub(mantissa, 1.0)
    n = b.select(small, b.sub(n, _SUBNORMAL_SCALE), n)
    power = b.sitofp(n, e.type(FLOAT))
    square = b.fmul(f, f)
    rest = e.fma(b.fmul(square, f), e.horner(f, *_LOG), b.fmul(power, _LN2_LOW))
    rest = e.fma(square, -0.5, rest)
    result = e.fma(power, _LN2_HIGH, b.fadd(f, rest))
    result = b.select(b.fcmp_ordered("==", x, np.inf), x, result)
    result = b.select(b.fcmp_ordered("==", x, 0.0), -np.inf, result)
    return b.select(b.fcmp_unordered("<", x, 0.0), np.nan, result)


def log1p(e: Lanes, x: ir.Value) -> ir.Value:
    """Logarithm of 1 + x, corrected by the rounding error of the sum; not for loops that may reorder sums."""
    b = e.b
    total = b.fadd(1.0, x)
    lost = b.fsub(x, b.fsub(total, 1.0))
    whole = log(e, total)
    ordinary = b.fcmp_ordered("<", b.intrinsic("fabs", whole), np.inf)
    return b.intrinsic("copysign", b.select(ordinary, b.fadd(whole, b.fdiv(lost, total)), whole), x)


def tanh(e: Lanes, x: ir.Value) -> ir.Value:
    """Hyperbolic tangent: t / (t + 2) of t = e^2x - 1."""
    b = e.b
    size = b.intrinsic("fabs", x)
    size = b.select(b.fcmp_ordered(">", size, 10.0), 10.0, size)
    t = expm1(e, b.fadd(size, size))
    return b.intrinsic("copysign", b.fdiv(t, b.fadd(t, 2.0)), x)


def sigmoid(e: Lanes, x: ir.Value) -> ir.Value:
    """1 / (1 + e^-x), by the power that is at most 1."""
    b = e.b
    power = exp(e, b.fneg(b.intrinsic("fabs", x)))
    top = b.select(b.fcmp_ordered("<", x, 0.0), power, 1.0)
    return b.fdiv(top, b.fadd(1.0, power))


def erf(e: Lanes, x: ir.Value) -> ir.Value:
    """The error function: odd near zero, 1 - e^polynomial beyond."""
    b = e.b
    size = b.intrinsic("fabs", x)
    near = e.fma(e.horner(b.fmul(x, x), *_ERF), x, x)
    far = b.select(b.fcmp_ordered(">", size, 4.0), 4.0, size)
    beyond = b.fsub(1.0, exp(e, e.horner(far, *_LOG_ERFC)))
    beyond = b.intrinsic("copysign", beyond, x)
    return b.select(b.fcmp_unordered("<", size, 0.9), near, beyond)


def divmod(e: Lanes, x: ir.Value, y: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Quotient rounded down, and the remainder with the sign of y, of float32 or float64; as NumPy's."""
    b = e.b
    zero = constant(x.type, 0.0)
    ratio, rest = b.fdiv(x, y), b.frem(x, y)
    quotient = b.fdiv(b.fsub(x, rest), y)
    left = b.fcmp_unordered("!=", rest, 0.0)
    other = b.xor(b.fcmp_ordered("<", y, 0.0), b.fcmp_ordered("<", rest, 0.0))
    lower = b.and_(left, other)
    quotient = b.select(lower, b.fsub(quotient, 1.0), quotient)
    rest = b.select(lower, b.fadd(rest, y), b.select(left, rest, b.intrinsic("copysign", zero, y)))
    floor = b.intrinsic("floor", quotient)
    far = b.fcmp_ordered(">", b.fsub(quotient, floor), 0.5)
    floor = b.select(far, b.fadd(floor, 1.0), floor)
    floor = b.select(b.fcmp_unordered("!=", quotient, 0.0), floor, b.intrinsic("copysign", zero, ratio))
    by_zero = b.fcmp_ordered("==", y, 0.0)
    return b.select(by_zero, ratio, floor), b.select(by_zero, np.nan, rest)


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

"""Scalar expressions as instructions: one entry a function of `ops.expr`, with NumPy's meaning of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import llvmlite.ir as ir
import numpy as np

from foreplan.graph import DType
from foreplan.graph.types import BOOL, DTYPES, FLOAT32
from foreplan.jit.builder import FLOAT
from foreplan.ops.expr import Arg, Call, Const, Expr, infer_dtypes, subexpressions
from foreplan.ops.map import operand_dtypes
from foreplan.runtime.cpu.codegen import functions, integers
from foreplan.runtime.cpu.codegen.conversions import convert, register_type, rounded, truth
from foreplan.runtime.cpu.codegen.lanes import Lanes

Emit = Callable[..., ir.Value]  # (lanes, element type of the arguments, arguments…)


def _plain(real: str, whole: str, truths: str = "") -> Emit:
    """One instruction for floats, another for integers, and perhaps one for truth values."""

    def emit(e: Lanes, t: DType, *x: ir.Value) -> ir.Value:
        name: str = real if t.is_float else truths if t == BOOL else whole
        return getattr(e.b, name)(*x)

    return emit


def _intrinsic(name: str) -> Emit:
    """An LLVM intrinsic of floats; integers stay as they are."""
    return lambda e, t, x: e.b.intrinsic(name, x) if t.is_float else x


def _libm(name: str, ours: Callable[[Lanes, ir.Value], ir.Value] | None = None) -> Emit:
    """The C library's function lane by lane, or foreplan's own for float32."""

    def emit(e: Lanes, t: DType, *x: ir.Value) -> ir.Value:
        element = register_type(t)
        if ours is not None and element == FLOAT:
            return ours(e, *x)
        one, symbol = replace(e, width=0), name + ("f" if element == FLOAT else "")
        return e.each(lambda *scalars: one.b.named(symbol, element, *scalars), *x)

    return emit


def _compare(sign: str) -> Emit:
    def emit(e: Lanes, t: DType, a: ir.Value, b: ir.Value) -> ir.Value:
        if t.is_float:
            return (e.b.fcmp_unordered if sign == "!=" else e.b.fcmp_ordered)(sign, a, b)
        return (e.b.icmp_signed if t.category == "int" else e.b.icmp_unsigned)(sign, a, b)

    return emit


def _is_number(x: ir.Value) -> bool:
    """Whether an expression is a literal other than NaN."""
    if not isinstance(x, ir.Constant) or x.constant is None:
        return False
    first = x.constant[0].constant if isinstance(x.constant, list) else x.constant
    return first == first


def _extreme(sign: str) -> Emit:
    """The greater or the less of two; NaN where one of them is."""

    def emit(e: Lanes, t: DType, a: ir.Value, b: ir.Value) -> ir.Value:
        if not t.is_float:
            return e.b.select(_compare(sign)(e, t, a, b), a, b)
        if _is_number(b):
            return e.b.select(e.b.fcmp_unordered(sign, a, b), a, b)
        first = e.b.fcmp_ordered(sign, a, b)
        if not _is_number(a):
            first = e.b.or_(first, e.b.fcmp_unordered("uno", a, a))
        return e.b.select(first, a, b)

    return emit


_max, _min = _extreme(">"), _extreme("<")


def _clip(e: Lanes, t: DType, x: ir.Value, low: ir.Value, high: ir.Value) -> ir.Value:
    return _min(e, t, _max(e, t, x, low), high)


def _relu(e: Lanes, t: DType, x: ir.Value) -> ir.Value:
    return _max(e, t, x, _number(e, t, 0))


def _number(e: Lanes, t: DType, number: float) -> ir.Constant:
    """A literal, rounded to its type."""
    with np.errstate(over="ignore"):
        scalar = t.numpy.type(number)
    return e.constant(register_type(t), float(scalar) if t.is_float else int(scalar))


def _negative(e: Lanes, t: DType, x: ir.Value) -> ir.Value:
    return e.b.fneg(x) if t.is_float else e.b.neg(x)


def _absolute(e: Lanes, t: DType, x: ir.Value) -> ir.Value:
    if t.is_float:
        return e.b.intrinsic("fabs", x)
    return e.b.select(_compare("<")(e, t, x, _number(e, t, 0)), e.b.neg(x), x) if t.category == "int" else x


def _sign(e: Lanes, t: DType, x: ir.Value) -> ir.Value:
    zero, one = _number(e, t, 0), _number(e, t, 1)
    if t.category == "uint":
        return e.b.select(_compare(">")(e, t, x, zero), one, zero)
    neither = e.b.select(_compare("==")(e, t, x, zero), zero, x)  # x itself: NaN
    below = e.b.select(_compare("<")(e, t, x, zero), _number(e, t, -1), neither)
    return e.b.select(_compare(">")(e, t, x, zero), one, below)


def _square(e: Lanes, t: DType, x: ir.Value) -> ir.Value:
    return e.b.fmul(x, x) if t.is_float else e.b.mul(x, x)


def _reciprocal(e: Lanes, t: DType, x: ir.Value) -> ir.Value:
    return e.b.fdiv(_number(e, t, 1), x)


def _rsqrt(e: Lanes, t: DType, x: ir.Value) -> ir.Value:
    return _reciprocal(e, t, rounded(e, e.b.intrinsic("sqrt", x), t))


def _sigmoid(e: Lanes, t: DType, x: ir.Value) -> ir.Value:
    if register_type(t) == FLOAT:
        return functions.sigmoid(e, x)
    zero, one = _number(e, t, 0), _number(e, t, 1)
    power = _libm("exp")(e, t, e.b.fneg(e.b.intrinsic("fabs", x)))
    top = e.b.select(e.b.fcmp_ordered(">=", x, zero), one, power)
    return e.b.fdiv(top, e.b.fadd(one, power))


def _power(e: Lanes, t: DType, x: ir.Value, y: ir.Value) -> ir.Value:
    if not t.is_float:
        return integers.power(e, x, y)
    if _is_number(y):
        exponent = y.constant[0].constant if e.width else y.constant
        squared = e.b.fmul(x, x)
        if exponent in (2, 3, 4):
            return e.b.fmul(squared, {2: _number(e, t, 1), 3: x, 4: squared}[exponent])
        if exponent == -1:
            return _reciprocal(e, t, x)
    return _libm("pow")(e, t, x, y)


def _floor_divide(e: Lanes, t: DType, a: ir.Value, b: ir.Value) -> ir.Value:
    return functions.divmod(e, a, b)[0] if t.is_float else integers.floor_divide(e, t, a, b)


def _remainder(e: Lanes, t: DType, a: ir.Value, b: ir.Value) -> ir.Value:
    return functions.divmod(e, a, b)[1] if t.is_float else integers.remainder(e, t, a, b)


def _truncated_divide(e: Lanes, t: DType, a: ir.Value, b: ir.Value) -> ir.Value:
    """C's integer division: the quotient toward zero."""
    if not t.is_float:
        return integers.divide(e, t, a, b)
    quotient, rest = functions.divmod(e, a, b)
    zero = _number(e, t, 0)
    signs = (e.b.fcmp_ordered("<", x, zero) for x in (a, b))
    up = e.b.and_(e.b.fcmp_unordered("!=", rest, zero), e.b.xor(*signs))
    return e.b.fadd(quotient, e.b.select(up, _number(e, t, 1), zero))


def _c_remainder(e: Lanes, t: DType, a: ir.Value, b: ir.Value) -> ir.Value:
    return e.b.frem(a, b) if t.is_float else integers.c_remainder(e, t, a, b)


def _is_nan(e: Lanes, t: DType, x: ir.Value) -> ir.Value:
    return e.b.fcmp_unordered("uno", x, x) if t.is_float else _compare("!=")(e, t, x, x)


def _is_infinite(e: Lanes, t: DType, x: ir.Value) -> ir.Value:
    if not t.is_float:
        return _compare("!=")(e, t, x, x)
    return e.b.fcmp_ordered("==", e.b.intrinsic("fabs", x), _number(e, t, np.inf))


def _truths(name: str) -> Emit:
    return lambda e, t, a, b: getattr(e.b, name)(a, b)


# Conditions and logic take truth values; all others take arguments of one element type.
EMIT: Mapping[str, Emit] = {
    "add": _plain("fadd", "add", "or_"),
    "sub": _plain("fsub", "sub"),
    "mul": _plain("fmul", "mul", "and_"),
    "div": lambda e, t, a, b: e.b.fdiv(a, b),
    "pow": _power,
    "floordiv": _floor_divide,
    "truncdiv": _truncated_divide,
    "mod": _remainder,
    "fmod": _c_remainder,
    "max": _max,
    "min": _min,
    "atan2": _libm("atan2"),
    "neg": _negative,
    "abs": _absolute,
    "sign": _sign,
    **{name: _intrinsic(name) for name in ("floor", "ceil", "trunc", "sqrt")},
    "round": _intrinsic("rint"),
    "square": _square,
    "rsqrt": _rsqrt,
    "reciprocal": _reciprocal,
    "exp": _libm("exp", functions.exp),
    "expm1": _libm("expm1", functions.expm1),
    "log": _libm("log", functions.log),
    "log1p": _libm("log1p", functions.log1p),
    **{name: _libm(name) for name in ("sin", "cos", "tan", "asin", "acos", "atan")},
    **{name: _libm(name) for name in ("sinh", "cosh", "asinh", "acosh", "atanh")},
    "tanh": _libm("tanh", functions.tanh),
    "sigmoid": _sigmoid,
    "relu": _relu,
    "erf": _libm("erf", functions.erf),
    "isnan": _is_nan,
    "isinf": _is_infinite,
    **{
        name: _compare(sign)
        for name, sign in zip(("eq", "ne", "lt", "le", "gt", "ge"), ("==", "!=", "<", "<=", ">", ">="))
    },
    "and": _truths("and_"),
    "or": _truths("or_"),
    "xor": _truths("xor"),
    "not": lambda e, t, x: e.b.not_(x),
    "bitand": _truths("and_"),
    "bitor": _truths("or_"),
    "bitxor": _truths("xor"),
    "bitnot": lambda e, t, x: e.b.not_(x),
    "shiftleft": integers.shift_left,
    "shiftright": integers.shift_right,
    "clip": _clip,
}
_LOGIC = ("and", "or", "xor", "not")


def emit(e: Lanes, exprs: Sequence[Expr], args: Sequence[ir.Value], dtypes: Sequence[DType]) -> list[ir.Value]:
    """The values of expressions, as the types that `infer_dtypes` gives them.

    Args:
        args: values of a0, a1, …, as `register_type` of their element types.
    """
    types = infer_dtypes(dtypes, *exprs)
    found: dict[Expr, ir.Value] = {}

    def operand(arg: Expr, wanted: DType | None) -> ir.Value:
        own = types[arg] or FLOAT32
        if isinstance(arg, Const):
            return _number(e, wanted or own, arg.value)
        return convert(e, found[arg], own, wanted or own)

    def value_of(part: Call) -> ir.Value:
        if part.function in DTYPES:
            (arg,) = part.args
            return convert(e, operand(arg, None), types[arg] or FLOAT32, DTYPES[part.function])
        if part.function == "where":
            condition, yes, no = part.args
            chosen = truth(e, operand(condition, None), types[condition] or FLOAT32)
            return e.b.select(chosen, operand(yes, types[part]), operand(no, types[part]))
        wanted = [BOOL] * len(part.args) if part.function in _LOGIC else operand_dtypes(part, types)
        t = wanted[0] or FLOAT32
        value = EMIT[part.function](e, t, *(operand(arg, t) for arg in part.args))
        return value if types[part] == BOOL else rounded(e, value, types[part] or FLOAT32)

    for part in subexpressions(*exprs):
        if isinstance(part, Arg):
            found[part] = args[part.index]
        elif isinstance(part, Call):
            found[part] = value_of(part)
    return [operand(expr, types[expr]) for expr in exprs]

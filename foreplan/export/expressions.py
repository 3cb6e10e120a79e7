"""Scalar expressions as ONNX nodes on whole tensors: one table of functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from foreplan.base.errors import UnsupportedError
from foreplan.export.emitter import Emitter
from foreplan.graph import DType
from foreplan.graph.types import BOOL, DTYPES, FLOAT32, INT32
from foreplan.ops.expr import FUNCTIONS, Arg, Call, Const, Expr, infer_dtypes, subexpressions
from foreplan.ops.map import operand_dtypes

# (emitter, names of the arguments, the type that they have been converted to) → the name of the result.
Write = Callable[[Emitter, list[str], DType], str]


def write_expressions(e: Emitter, exprs: Sequence[Expr], args: Sequence[str], dtypes: Sequence[DType]) -> list[str]:
    """The results of expressions, broadcast no further than what each reads.

    Raises:
        UnsupportedError: standard ONNX has no such function of such elements.
    """
    types = infer_dtypes(dtypes, *exprs)
    found: dict[Expr, str] = {}

    def operand(part: Expr, dtype: DType | None) -> str:
        if isinstance(part, Const):
            return e.scalar(part.value, dtype or FLOAT32)
        return found[part] if dtype is None else e.cast(found[part], types[part] or FLOAT32, dtype)

    for part in subexpressions(*exprs):
        if isinstance(part, Arg):
            found[part] = args[part.index]
        elif isinstance(part, Call):
            found[part] = _call(e, part, operand, types)
    return [operand(expr, types[expr] or FLOAT32) for expr in exprs]


def _call(
    e: Emitter, part: Call, operand: Callable[[Expr, DType | None], str], types: Mapping[Expr, DType | None]
) -> str:
    if part.function not in FUNCTIONS:
        return operand(part.args[0], DTYPES[part.function])
    wanted = operand_dtypes(part, types)
    if part.function in ("and", "or", "xor", "not"):
        wanted = [BOOL] * len(wanted)
    dtype = wanted[-1] or FLOAT32
    table = _OF_TRUTHS if dtype == BOOL else _OF_NUMBERS
    write = table.get(part.function)
    if write is None:
        raise UnsupportedError(f"standard ONNX has no op that gives {part.function}() of {dtype}")
    narrow = dtype.is_narrow and part.function in _WIDENED
    wide = dtype.wide if narrow else dtype
    given = [operand(arg, each) for arg, each in zip(part.args, wanted)]
    if part.function == "where":
        return write(e, given, dtype)
    result = write(e, [e.cast(x, dtype, wide) for x in given], wide)
    return e.cast(result, wide, dtype) if narrow else result


def _same(name: str) -> Write:
    return lambda e, x, dtype: e.op(name, *x)


def _of_floats(write: Write, otherwise: Write | None = None) -> Write:
    """For a function that ONNX has of floats alone; of integers it is the number itself, or something else."""

    def written(e: Emitter, x: list[str], dtype: DType) -> str:
        if dtype.is_float:
            return write(e, x, dtype)
        return x[0] if otherwise is None else otherwise(e, x, dtype)

    return written


def _neg(e: Emitter, x: list[str], dtype: DType) -> str:
    return e.op("Sub", e.scalar(0, dtype), x[0]) if dtype.category == "uint" else e.op("Neg", x[0])


def _trunc(e: Emitter, x: list[str], dtype: DType) -> str:
    return e.op("Mul", e.op("Sign", x[0]), e.op("Floor", e.op("Abs", x[0])))


def _fmod(e: Emitter, x: list[str], dtype: DType) -> str:
    return e.op("Mod", *x, fmod=1)


def _mod(e: Emitter, x: list[str], dtype: DType) -> str:
    """The remainder, of the sign of the divisor."""
    if not dtype.is_float:
        return e.op("Mod", *x)
    rest, zero = _fmod(e, x, dtype), e.scalar(0, dtype)
    other = e.op("Xor", e.op("Less", rest, zero), e.op("Less", x[1], zero))
    off = e.op("And", other, e.op("Not", e.op("Equal", rest, zero)))
    return e.op("Where", off, e.op("Add", rest, x[1]), rest)


def _floordiv(e: Emitter, x: list[str], dtype: DType) -> str:
    exact = e.op("Div", e.op("Sub", x[0], _mod(e, x, dtype)), x[1])
    return e.op("Round", exact) if dtype.is_float else exact


def _truncdiv(e: Emitter, x: list[str], dtype: DType) -> str:
    quotient = e.op("Div", *x)
    return _trunc(e, [quotient], dtype) if dtype.is_float else quotient


def _atan2(e: Emitter, x: list[str], dtype: DType) -> str:
    """The arc tangent of a quotient, in the right quadrant."""
    (a, b), zero = x, e.scalar(0, dtype)
    half, whole = e.scalar(math.pi / 2, dtype), e.scalar(math.pi, dtype)
    below = e.op("Less", a, zero)
    angle = e.op("Atan", e.op("Div", a, b))
    turned = e.op("Where", below, e.op("Sub", angle, whole), e.op("Add", angle, whole))
    upright = e.op("Mul", e.op("Sign", a), half)
    left = e.op("Where", e.op("Less", b, zero), turned, upright)
    return e.op("Where", e.op("Greater", b, zero), angle, left)


def _near_zero(e: Emitter, x: str, dtype: DType, near: str, far: str) -> str:
    return e.op("Where", e.op("Less", e.op("Abs", x), e.scalar(0.5, dtype)), near, far)


def _expm1(e: Emitter, x: list[str], dtype: DType) -> str:
    """(u − 1) · x / log u with u = eˣ near zero, where u − 1 has lost its digits (Kahan)."""
    one, u = e.scalar(1, dtype), e.op("Exp", x[0])
    less = e.op("Sub", u, one)
    ratio = e.op("Div", e.op("Mul", less, x[0]), e.op("Log", u))
    return _near_zero(e, x[0], dtype, e.op("Where", e.op("Equal", u, one), x[0], ratio), less)


def _log1p(e: Emitter, x: list[str], dtype: DType) -> str:
    """log u · x / (u − 1) with u = 1 + x near zero, where u has lost digits of x (Goldberg, 1991, theorem 4)."""
    one = e.scalar(1, dtype)
    u = e.op("Add", x[0], one)
    far = e.op("Log", u)
    ratio = e.op("Div", e.op("Mul", far, x[0]), e.op("Sub", u, one))
    return _near_zero(e, x[0], dtype, e.op("Where", e.op("Equal", u, one), x[0], ratio), far)


def _compared(name: str) -> Write:
    """Of numbers; truth values are compared as integers."""

    def write(e: Emitter, x: list[str], dtype: DType) -> str:
        if dtype == BOOL:
            x = [e.cast(each, BOOL, INT32) for each in x]
        return e.op(name, *x)

    return write


def _shift(direction: str) -> Write:
    def write(e: Emitter, x: list[str], dtype: DType) -> str:
        if dtype.category != "uint":
            raise UnsupportedError(f"standard ONNX shifts unsigned integers alone, and these are {dtype}")
        return e.op("BitShift", *x, direction=direction)

    return write


def _false(e: Emitter, x: list[str], dtype: DType) -> str:
    return e.op("Not", e.op("Equal", x[0], x[0]))


_COMPARED = {"lt": "Less", "le": "LessOrEqual", "gt": "Greater", "ge": "GreaterOrEqual"}
_OF_FLOATS = (
    *("sqrt", "reciprocal", "exp", "log", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh"),
    *("asinh", "acosh", "atanh", "sigmoid", "erf"),
)

_OF_NUMBERS: dict[str, Write] = {
    **{name: _same(name.capitalize()) for name in ("add", "sub", "mul", "div", "pow", "max", "min", "abs", "sign")},
    **{name: _same(name.capitalize()) for name in _OF_FLOATS},
    **{name: _compared(onnx) for name, onnx in _COMPARED.items()},
    **{name: _of_floats(_same(name.capitalize())) for name in ("floor", "ceil", "round")},
    "eq": _same("Equal"),
    "ne": lambda e, x, dtype: e.op("Not", e.op("Equal", *x)),
    "neg": _neg,
    "trunc": _of_floats(_trunc),
    "square": lambda e, x, dtype: e.op("Mul", x[0], x[0]),
    "rsqrt": lambda e, x, dtype: e.op("Reciprocal", e.op("Sqrt", x[0])),
    "relu": lambda e, x, dtype: e.op("Relu", x[0]) if dtype.is_float else e.op("Max", x[0], e.scalar(0, dtype)),
    "expm1": _expm1,
    "log1p": _log1p,
    "fmod": _fmod,
    "mod": _mod,
    "floordiv": _floordiv,
    "truncdiv": _truncdiv,
    "atan2": _atan2,
    "clip": lambda e, x, dtype: e.op("Min", e.op("Max", x[0], x[1]), x[2]),
    "where": _same("Where"),
    "isnan": _of_floats(_same("IsNaN"), _false),
    "isinf": _of_floats(_same("IsInf"), _false),
    "bitand": _same("BitwiseAnd"),
    "bitor": _same("BitwiseOr"),
    "bitxor": _same("BitwiseXor"),
    "bitnot": _same("BitwiseNot"),
    "shiftleft": _shift("LEFT"),
    "shiftright": _shift("RIGHT"),
}

_AND, _OR, _XOR, _NOT = _same("And"), _same("Or"), _same("Xor"), _same("Not")
_OF_TRUTHS: dict[str, Write] = {
    **{name: _compared(onnx) for name, onnx in _COMPARED.items()},
    **dict.fromkeys(("and", "mul", "min", "bitand"), _AND),
    **dict.fromkeys(("or", "add", "max", "bitor"), _OR),
    **dict.fromkeys(("xor", "bitxor", "ne"), _XOR),
    **dict.fromkeys(("not", "bitnot"), _NOT),
    **{name: lambda e, x, dtype: x[0] for name in ("abs", "floor", "ceil", "trunc", "round", "relu")},
    "eq": _same("Equal"),
    "where": lambda e, x, dtype: e.op("Or", e.op("And", x[0], x[1]), e.op("And", e.op("Not", x[0]), x[2])),
    "clip": lambda e, x, dtype: e.op("And", e.op("Or", x[0], x[1]), x[2]),
    "isnan": _false,
    "isinf": _false,
}

# Functions whose formula here loses digits that a narrow type does not have to spare.
_WIDENED = ("rsqrt", "expm1", "log1p", "fmod", "mod", "floordiv", "truncdiv", "atan2")

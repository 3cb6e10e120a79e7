"""Scalar expressions as CUDA C++: a statement a call, with NumPy's meaning of every function (cuda/scalar.cuh)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from foreplan.graph import DType
from foreplan.graph.types import BOOL, DTYPES, FLOAT32
from foreplan.ops.expr import Arg, Call, Const, Expr, infer_dtypes, subexpressions
from foreplan.ops.map import operand_dtypes
from foreplan.runtime.cuda.launch import STORED, stored

_INFIX = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_INFIX |= {"and": "&&", "or": "||", "xor": "!=", "bitand": "&", "bitor": "|", "bitxor": "^"}
_OF_FLOATS = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
_NAMES = {
    "add": "add",
    "sub": "subtract",
    "mul": "multiply",
    "div": "divide",
    "pow": "power",
    "floordiv": "floor_divide",
    "truncdiv": "truncated_divide",
    "mod": "remainder",
    "fmod": "truncated_remainder",
    "max": "maximum",
    "min": "minimum",
    "atan2": "angle_of",
    "neg": "negative",
    "abs": "absolute",
    "sign": "sign",
    "floor": "rounded_down",
    "ceil": "rounded_up",
    "trunc": "rounded_to_zero",
    "round": "rounded_to_even",
    "square": "square",
    "sqrt": "square_root",
    "rsqrt": "reciprocal_root",
    "reciprocal": "reciprocal",
    "exp": "exponential",
    "expm1": "exponential_less_1",
    "log": "logarithm",
    "log1p": "logarithm_of_1_and",
    "sin": "sine",
    "cos": "cosine",
    "tan": "tangent",
    "asin": "arcsine",
    "acos": "arccosine",
    "atan": "arctangent",
    "sinh": "hyperbolic_sine",
    "cosh": "hyperbolic_cosine",
    "tanh": "hyperbolic_tangent",
    "asinh": "area_sine",
    "acosh": "area_cosine",
    "atanh": "area_tangent",
    "sigmoid": "sigmoid",
    "relu": "relu",
    "erf": "error_function",
    "isnan": "is_nan",
    "isinf": "is_infinite",
    "bitnot": "bits_not",
    "shiftleft": "shift_left",
    "shiftright": "shift_right",
    "clip": "clip",
}
# Powers that need no logarithm, by their exponent.
_POWERS = {str(Const(2)): "scalar::square({0})", str(Const(3)): "{0} * scalar::square({0})"}
_POWERS |= {str(Const(2.0)): _POWERS[str(Const(2))], str(Const(3.0)): _POWERS[str(Const(3))]}
_LOGIC = ("and", "or", "xor", "not")


def wide(dtype: DType) -> str:
    """The C++ type of arithmetic on such elements."""
    return STORED[dtype.wide.name]


def statements(
    exprs: Sequence[Expr], args: Sequence[str], dtypes: Sequence[DType], names: Sequence[str]
) -> tuple[str, ...]:
    """Declarations that compute expressions, each common part once.

    Args:
        args: the names for a0, a1, …, as `wide` of their element types.
        dtypes: of the arguments.
        names: of the variable for each expression, as `wide` of its element type.
    """
    types = infer_dtypes(dtypes, *exprs)
    found: dict[Expr, str] = {Arg(i): text for i, text in enumerate(args)}
    lines: list[str] = []

    def operand(arg: Expr, wanted: DType | None) -> str:
        own = types[arg] or FLOAT32
        if isinstance(arg, Const):
            return literal(arg.value, wanted or own)
        return _converted(found[arg], own, wanted or own)

    for part in subexpressions(*exprs):
        if isinstance(part, Call):
            dtype = types[part] or FLOAT32
            found[part] = f"t{len(lines)}"
            lines.append(f"const {wide(dtype)} {found[part]} = {_value(part, types, operand)};")
    for expr, name in zip(exprs, names, strict=True):
        dtype = types[expr] or FLOAT32
        lines.append(f"const {wide(dtype)} {name} = {operand(expr, dtype)};")
    return tuple(lines)


def literal(number: float, dtype: DType) -> str:
    """A number in the type of arithmetic on such elements, rounded to the elements' type."""
    if dtype == BOOL:
        return "true" if number else "false"
    if not dtype.is_float:
        suffix = "ull" if dtype.category == "uint" else "ll"
        whole = int(number)
        text = f"(-{-whole - 1}ll - 1)" if whole < 0 else f"{whole}{suffix}"
        return f"static_cast<{wide(dtype)}>({text})"
    value = _rounded(number, dtype)
    if math.isnan(value):
        return f"static_cast<{wide(dtype)}>(NOT_A_NUMBER)"
    if math.isinf(value):
        return f"static_cast<{wide(dtype)}>({'-' if value < 0 else ''}INFINITE)"
    text = repr(value) + ("f" if dtype.wide == FLOAT32 else "")
    return f"({text})" if text.startswith("-") else text


def _rounded(number: float, dtype: DType) -> float:
    import numpy as np

    with np.errstate(over="ignore"):
        return float(dtype.numpy.type(number))


def _converted(text: str, own: DType, wanted: DType) -> str:
    if own == wanted:
        return text
    if wanted.wide != wanted:
        number = text if own.is_float else f"scalar::to<float>({text})"
        return f"scalar::rounded<{stored(wanted)}>({number})"
    return text if wide(own) == wide(wanted) else f"scalar::to<{wide(wanted)}>({text})"


def _value(part: Call, types: Mapping[Expr, DType | None], operand: object) -> str:
    """The text of one call."""
    assert callable(operand)
    dtype = types[part] or FLOAT32
    if part.function in DTYPES:
        (arg,) = part.args
        text: str = operand(arg, None)
        return _converted(text, types[arg] or FLOAT32, dtype)
    if part.function == "where":
        condition, yes, no = part.args
        return f"{operand(condition, BOOL)} ? {operand(yes, dtype)} : {operand(no, dtype)}"
    wanted = [BOOL] * len(part.args) if part.function in _LOGIC else operand_dtypes(part, types)
    given = [operand(arg, kind) for arg, kind in zip(part.args, wanted)]
    of = wanted[0] or FLOAT32
    if part.function == "not":
        return f"!{given[0]}"
    if part.function == "pow" and of.is_float and (power := _POWERS.get(str(part.args[1]))) is not None:
        text = power.format(given[0])
        return text if dtype.wide == dtype else f"scalar::rounded<{stored(dtype)}>({text})"
    sign = _INFIX.get(part.function) or (_OF_FLOATS.get(part.function) if of.is_float else None)
    if sign is not None:
        text = f"{given[0]} {sign} {given[1]}"
        text = text if dtype == BOOL or dtype.is_float else f"static_cast<{wide(dtype)}>({text})"
    else:
        text = f"scalar::{_NAMES[part.function]}({', '.join(given)})"
    return text if dtype == BOOL or dtype.wide == dtype else f"scalar::rounded<{stored(dtype)}>({text})"

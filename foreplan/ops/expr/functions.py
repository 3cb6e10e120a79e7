"""The table of scalar functions: each one's NumPy kernel, element type and partial derivatives."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from foreplan.ops.expr.nodes import Call, Const, Expr, Scalar, call, subexpressions, where

Partials = Callable[..., Sequence[Expr | Scalar | None]]


@dataclass(frozen=True)
class Function:
    """One scalar function.

    Attributes:
        compute: returns a NumPy ufunc, or a function that is called like one, with `out=`.
        arity: number of arguments.
        result: `same` (the promoted type of the arguments), `bool`, or `float` (the promoted type, never an integer).
        partials: from (args…, y) the partial derivatives; y is the function's own result. None: not differentiable.
        uses_output: the partials read y and not the arguments. Of an outermost call, backward keeps only the output.
        is_compiled: NumPy lacks it, so it is compiled; a process that runs it loads LLVM.
    """

    compute: Callable[[], Callable[..., Any]]
    arity: int
    result: str = "same"
    partials: Partials | None = None
    uses_output: bool = False
    is_compiled: bool = False


def _np(name: str) -> Callable[[], Callable[..., Any]]:
    return lambda: getattr(np, name)


def _special(name: str) -> Callable[[], Callable[..., Any]]:
    def load() -> Callable[..., Any]:
        from foreplan.ops.expr import special

        return getattr(special, name)

    return load


def _relu() -> Callable[..., Any]:
    return lambda x, out: np.maximum(x, out.dtype.type(0), out=out)


def _where() -> Callable[..., Any]:
    def where(condition: Any, a: Any, b: Any, out: np.ndarray) -> None:
        # `out` may lie in the bytes of `a` or of `b`, element for element; the other one is then written second.
        if a is out or (isinstance(a, np.ndarray) and np.may_share_memory(a, out)):
            np.copyto(out, b, where=~condition if np.ndim(condition) == 0 else np.logical_not(condition))
            if a is not out:
                np.copyto(out, a, where=condition)
        else:
            np.copyto(out, b)
            np.copyto(out, a, where=condition)

    return where


def _power() -> Callable[..., Any]:
    def power(a: Any, b: Any, out: np.ndarray) -> None:
        if out.dtype.kind == "i":  # NumPy raises for negative exponents of signed integers; unsigned, it wraps around
            bits = np.dtype(f"u{out.itemsize}")
            np.power(a.view(bits), b.view(bits), out=out.view(bits))
        else:
            np.power(a, b, out=out)

    return power


def _round() -> Callable[..., Any]:
    def rint(x: Any, out: np.ndarray) -> None:
        if out.dtype.kind in "iub":  # NumPy gives floats for integers
            np.copyto(out, x)
        else:
            np.rint(x, out=out)

    return rint


def _rsqrt() -> Callable[..., Any]:
    def rsqrt(x: Any, out: np.ndarray) -> None:
        np.sqrt(x, out=out)
        np.reciprocal(out, out=out)

    return rsqrt


def _trunc_div() -> Callable[..., Any]:
    def trunc_div(a: Any, b: Any, out: np.ndarray) -> None:
        # Integer division as in C and in ONNX's Div: the quotient is rounded toward zero.
        quotient = np.floor_divide(a, b)
        quotient += (np.remainder(a, b) != 0) & ((np.asarray(a) < 0) != (np.asarray(b) < 0))
        out[...] = quotient

    return trunc_div


def _chosen(wins: str) -> Partials:
    """Partial derivatives of the maximum (`wins` is "ge") or the minimum ("le") of two arguments."""

    def partials(a: Expr, b: Expr, y: Expr) -> Sequence[Expr]:
        share = where(call("eq", a, b), 0.5, 1.0)  # a tie is shared, as JAX and PyTorch do
        return where(call(wins, a, b), share, 0.0), where(call(wins, b, a), share, 0.0)

    return partials


def _pow_partials(a: Expr, b: Expr, y: Expr) -> Sequence[Expr]:
    if isinstance(b, Const):
        return b.value * a ** (b.value - 1), Const(0.0)
    return b * a ** (b - 1), where(a > 0, y * call("log", where(a > 0, a, 1.0)), 0.0)


def _inside(low: Expr, high: Expr, y: Expr) -> Expr:
    return where(call("and", y > low, y < high), 1.0, 0.0)


def _zero(*args: Expr) -> Sequence[Scalar]:
    return tuple(0.0 for _ in args[:-1])


_TWO_OVER_SQRT_PI = 2.0 / math.sqrt(math.pi)

FUNCTIONS: dict[str, Function] = {
    "add": Function(_np("add"), 2, "same", lambda a, b, y: (1.0, 1.0)),
    "sub": Function(_np("subtract"), 2, "same", lambda a, b, y: (1.0, -1.0)),
    "mul": Function(_np("multiply"), 2, "same", lambda a, b, y: (b, a)),
    "div": Function(_np("true_divide"), 2, "float", lambda a, b, y: (1.0 / b, -(a / b) / b)),
    "pow": Function(_power, 2, "same", _pow_partials),
    "floordiv": Function(_np("floor_divide"), 2, "same", _zero),
    "truncdiv": Function(_trunc_div, 2, "same", _zero),
    "mod": Function(_np("remainder"), 2, "same", lambda a, b, y: (1.0, -call("floor", a / b))),
    "fmod": Function(_np("fmod"), 2, "same", lambda a, b, y: (1.0, -call("trunc", a / b))),
    "max": Function(_np("maximum"), 2, "same", _chosen("ge")),
    "min": Function(_np("minimum"), 2, "same", _chosen("le")),
    "atan2": Function(_np("arctan2"), 2, "float", lambda a, b, y: (b / (a * a + b * b), -a / (a * a + b * b))),
    "neg": Function(_np("negative"), 1, "same", lambda x, y: (-1.0,)),
    "abs": Function(_np("absolute"), 1, "same", lambda x, y: (call("sign", x),)),
    "sign": Function(_np("sign"), 1, "same", _zero),
    "floor": Function(_np("floor"), 1, "same", _zero),
    "ceil": Function(_np("ceil"), 1, "same", _zero),
    "trunc": Function(_np("trunc"), 1, "same", _zero),
    "round": Function(_round, 1, "same", _zero),
    "square": Function(_np("square"), 1, "same", lambda x, y: (2.0 * x,)),
    "sqrt": Function(_np("sqrt"), 1, "float", lambda x, y: (0.5 / y,), True),
    "rsqrt": Function(_rsqrt, 1, "float", lambda x, y: (-0.5 * y * y * y,), True),
    "reciprocal": Function(_np("reciprocal"), 1, "float", lambda x, y: (-(y * y),), True),
    "exp": Function(_np("exp"), 1, "float", lambda x, y: (y,), True),
    "expm1": Function(_np("expm1"), 1, "float", lambda x, y: (y + 1.0,), True),
    "log": Function(_np("log"), 1, "float", lambda x, y: (1.0 / x,)),
    "log1p": Function(_np("log1p"), 1, "float", lambda x, y: (1.0 / (x + 1.0),)),
    "sin": Function(_np("sin"), 1, "float", lambda x, y: (call("cos", x),)),
    "cos": Function(_np("cos"), 1, "float", lambda x, y: (-call("sin", x),)),
    "tan": Function(_np("tan"), 1, "float", lambda x, y: (1.0 + y * y,), True),
    "asin": Function(_np("arcsin"), 1, "float", lambda x, y: (call("rsqrt", 1.0 - x * x),)),
    "acos": Function(_np("arccos"), 1, "float", lambda x, y: (-call("rsqrt", 1.0 - x * x),)),
    "atan": Function(_np("arctan"), 1, "float", lambda x, y: (1.0 / (1.0 + x * x),)),
    "sinh": Function(_np("sinh"), 1, "float", lambda x, y: (call("cosh", x),)),
    "cosh": Function(_np("cosh"), 1, "float", lambda x, y: (call("sinh", x),)),
    "tanh": Function(_np("tanh"), 1, "float", lambda x, y: (1.0 - y * y,), True),
    "asinh": Function(_np("arcsinh"), 1, "float", lambda x, y: (call("rsqrt", x * x + 1.0),)),
    "acosh": Function(_np("arccosh"), 1, "float", lambda x, y: (call("rsqrt", x * x - 1.0),)),
    "atanh": Function(_np("arctanh"), 1, "float", lambda x, y: (1.0 / (1.0 - x * x),)),
    "sigmoid": Function(_special("sigmoid"), 1, "float", lambda x, y: (y * (1.0 - y),), True),
    "relu": Function(_relu, 1, "same", lambda x, y: (where(y > 0, 1.0, 0.0),), True),
    "erf": Function(
        _special("erf"), 1, "float", lambda x, y: (_TWO_OVER_SQRT_PI * call("exp", -(x * x)),), is_compiled=True
    ),
    "isnan": Function(_np("isnan"), 1, "bool"),
    "isinf": Function(_np("isinf"), 1, "bool"),
    "eq": Function(_np("equal"), 2, "bool"),
    "ne": Function(_np("not_equal"), 2, "bool"),
    "lt": Function(_np("less"), 2, "bool"),
    "le": Function(_np("less_equal"), 2, "bool"),
    "gt": Function(_np("greater"), 2, "bool"),
    "ge": Function(_np("greater_equal"), 2, "bool"),
    "and": Function(_np("logical_and"), 2, "bool"),
    "or": Function(_np("logical_or"), 2, "bool"),
    "xor": Function(_np("logical_xor"), 2, "bool"),
    "not": Function(_np("logical_not"), 1, "bool"),
    "bitand": Function(_np("bitwise_and"), 2),
    "bitor": Function(_np("bitwise_or"), 2),
    "bitxor": Function(_np("bitwise_xor"), 2),
    "bitnot": Function(_np("invert"), 1),
    "shiftleft": Function(_np("left_shift"), 2),
    "shiftright": Function(_np("right_shift"), 2),
    # clip(x, low, high): no gradient flows to the bounds.
    "clip": Function(_np("clip"), 3, "same", lambda x, lo, hi, y: (_inside(lo, hi, y), None, None), True),
    # where(condition, a, b): the condition is boolean, the result has the promoted type of a and b.
    "where": Function(_where, 3, "same", lambda c, a, b, y: (None, where(c, 1.0, 0.0), where(c, 0.0, 1.0))),
}


@lru_cache(maxsize=4096)
def scalar_flops(*exprs: Expr) -> int:
    """Scalar operations for one element; conversions are not counted."""
    return sum(isinstance(part, Call) and part.function in FUNCTIONS for part in subexpressions(*exprs))

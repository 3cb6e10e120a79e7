"""Scalar expressions, which `map` computes at each element. One table states every function; the NumPy kernel, the
derivative, the text form and every engine's kernel come from it.
"""

from foreplan.ops.expr.derivatives import derivative, is_zero
from foreplan.ops.expr.dtypes import infer_dtypes, promote
from foreplan.ops.expr.functions import FUNCTIONS, Function, scalar_flops
from foreplan.ops.expr.nodes import (
    Arg,
    Call,
    Const,
    Expr,
    Scalar,
    as_expr,
    call,
    cast,
    clip,
    erf,
    exp,
    log,
    maximum,
    minimum,
    relu,
    rsqrt,
    sigmoid,
    sqrt,
    subexpressions,
    substitute,
    tanh,
    used_args,
    where,
)
from foreplan.ops.expr.simplification import simplify
from foreplan.ops.expr.text import parse_expr

__all__ = [
    "FUNCTIONS",
    "Arg",
    "Call",
    "Const",
    "Expr",
    "Function",
    "Scalar",
    "as_expr",
    "call",
    "cast",
    "clip",
    "derivative",
    "erf",
    "exp",
    "infer_dtypes",
    "is_zero",
    "log",
    "maximum",
    "minimum",
    "parse_expr",
    "promote",
    "relu",
    "rsqrt",
    "scalar_flops",
    "sigmoid",
    "simplify",
    "sqrt",
    "subexpressions",
    "substitute",
    "tanh",
    "used_args",
    "where",
]

"""Simplifies expressions: less arithmetic, the same value."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import lru_cache

from foreplan.graph.types import DTYPES, DType
from foreplan.ops.expr.dtypes import call_dtype, own_dtypes
from foreplan.ops.expr.nodes import Call, Const, Expr, Scalar, is_literal, subexpressions

_FOLDED: dict[str, Callable[..., Scalar]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "neg": lambda a: -a,
}


def simplify(expr: Expr, args: Sequence[DType]) -> Expr:
    """The expression with literals computed and steps such as x·1 removed; no part changes its element type.

    A conversion to the element type that a part has already is such a step, but for narrow types: there it rounds.
    """
    return _simplify(expr, tuple(args))


@lru_cache(maxsize=4096)
def _simplify(expr: Expr, args: tuple[DType, ...]) -> Expr:
    memo: dict[Expr, Expr] = {}
    before = own_dtypes(args, expr)
    types: dict[Expr, DType | None] = dict(before)
    for part in subexpressions(expr):
        memo[part] = part
        if not isinstance(part, Call):
            continue
        plain = Call(part.function, tuple(memo[arg] for arg in part.args))
        types[plain] = call_dtype(plain, [types[arg] for arg in plain.args])
        if types[plain] != before[part]:  # a literal has replaced the part that set the type
            continue
        memo[part] = plain
        converted = DTYPES.get(plain.function)
        if converted is not None and not converted.is_narrow and types[plain.args[0]] == converted:
            memo[part] = plain.args[0]
            continue
        simpler = _simpler(plain)
        if simpler is None:
            continue
        types.setdefault(simpler, own_dtypes(args, simpler)[simpler])
        wanted = before[part]
        literal = types[simpler] is None and part != expr and (wanted is None or wanted.is_float)
        if types[simpler] == wanted or literal:
            memo[part] = simpler
    return memo[expr]


def _simpler(part: Call) -> Expr | None:
    """An equal expression with less arithmetic, or None. Zero times any number is zero, even times infinity or NaN."""
    function, parts = part.function, part.args
    if function in _FOLDED and all(isinstance(arg, Const) for arg in parts):
        return Const(_FOLDED[function](*(arg.value for arg in parts if isinstance(arg, Const))))
    if function == "div" and all(isinstance(arg, Const) for arg in parts) and not is_literal(parts[1], 0):
        return Const(operator.truediv(*(arg.value for arg in parts if isinstance(arg, Const))))
    if function == "mul":
        simpler = _simpler_product(*parts)
        return simpler if simpler is not None else _simpler_product(*parts[::-1])
    if function in ("add", "sub") and is_literal(parts[1], 0):
        return parts[0]
    if function == "add" and is_literal(parts[0], 0):
        return parts[1]
    if function == "sub" and is_literal(parts[0], 0):
        return Call("neg", (parts[1],))
    if function in ("div", "pow") and is_literal(parts[1], 1):
        return parts[0]
    if function == "pow" and is_literal(parts[1], 2):
        return Call("square", (parts[0],))
    if function == "neg" and isinstance(parts[0], Call) and parts[0].function == "neg":
        return parts[0].args[0]
    if function == "where" and parts[1] == parts[2]:
        return parts[1]
    return None


def _simpler_product(one: Expr, other: Expr) -> Expr | None:
    if is_literal(one, 1):
        return other
    if is_literal(one, -1):
        return Call("neg", (other,))
    if is_literal(one, 0):
        return Const(0.0)
    if isinstance(one, Call) and one.function == "where":
        condition, *sides = one.args
        if all(is_literal(x, 0) or is_literal(x, 1) for x in sides):  # other · where(c, 1, 0) = where(c, other, 0)
            return Call("where", (condition, *(other if is_literal(x, 1) else Const(0.0) for x in sides)))
    return None

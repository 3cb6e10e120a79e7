"""Derivatives of scalar expressions, as expressions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from types import MappingProxyType

from foreplan.graph.types import DTYPES
from foreplan.ops.expr.functions import FUNCTIONS
from foreplan.ops.expr.nodes import Arg, Call, Const, Expr, as_expr, is_literal, subexpressions


@lru_cache(maxsize=4096)
def derivative(expr: Expr, cotangent: Expr, output: Expr) -> Mapping[int, Expr]:
    """Cotangents of the arguments, by reverse accumulation through the expression.

    Args:
        expr: y = expr(a0, a1, …).
        cotangent: of y.
        output: stands for y where the derivative of the outermost function follows from its result (ReLU, exp, tanh,
            sigmoid, square root). Backward then keeps y and not its arguments. It may be y after rounding.

    Returns:
        Argument index → its cotangent; an argument that gets none is absent.
    """
    order = [part for part in subexpressions(expr) if isinstance(part, Call)]
    roots = set(_roots(expr))
    flowing: dict[Expr, Expr] = {expr: cotangent}
    for part in reversed(order):
        incoming = flowing.pop(part, None)
        if incoming is None:
            continue
        for arg, outgoing in _pull_back(part, incoming, output if part in roots else part):
            flowing[arg] = flowing[arg] + outgoing if arg in flowing else outgoing
    flows = {part.index: flow for part, flow in flowing.items() if isinstance(part, Arg) and not is_literal(flow, 0)}
    return MappingProxyType(flows)


def is_zero(flow: Expr) -> bool:
    """Whether a derivative is zero for certain: a product with zero, or a sum of such products."""
    zero: dict[Expr, bool] = {}
    for part in subexpressions(flow):
        args = [zero[arg] for arg in part.args] if isinstance(part, Call) else []
        if isinstance(part, Call) and part.function == "mul":
            zero[part] = any(args)
        elif isinstance(part, Call):
            zero[part] = part.function in ("add", "sub", "neg") and all(args)
        else:
            zero[part] = is_literal(part, 0)
    return zero[flow]


def _roots(expr: Expr) -> Iterator[Expr]:
    """The expression, and the one below its outermost conversions to floating-point types."""
    yield expr
    while isinstance(expr, Call) and expr.function in DTYPES and DTYPES[expr.function].is_float:
        expr = expr.args[0]
        yield expr


def _pull_back(part: Call, incoming: Expr, output: Expr) -> Iterator[tuple[Expr, Expr]]:
    """(argument, its part of the cotangent) for each argument of one call."""
    if part.function in DTYPES:
        if DTYPES[part.function].is_float:
            yield part.args[0], incoming  # the caller converts to each argument's own type
        return
    function = FUNCTIONS[part.function]
    if function.partials is None:
        return  # comparisons and logic: constant almost everywhere
    y = output if function.uses_output else part
    for arg, partial in zip(part.args, function.partials(*part.args, y)):
        if partial is None or isinstance(arg, Const):
            continue
        yield arg, as_expr(partial) * incoming

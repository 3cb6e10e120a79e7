"""Reads expressions from text; `str` writes them."""

from __future__ import annotations

import ast

from foreplan.base.errors import ModelError
from foreplan.base.syntax import expression
from foreplan.graph.types import DTYPES
from foreplan.ops.expr.functions import FUNCTIONS
from foreplan.ops.expr.nodes import Arg, Call, Const, Expr

_OPERATORS: dict[type, str] = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "div",
    ast.Pow: "pow",
    ast.Lt: "lt",
    ast.LtE: "le",
    ast.Gt: "gt",
    ast.GtE: "ge",
}


def parse_expr(text: str) -> Expr:
    """The expression that this text stands for, as `str` writes it. No code is run.

    Raises:
        ModelError: the text is not an expression.
    """
    try:
        return _from_ast(expression(text), {})
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ModelError(f"{text!r} is not a scalar expression: {error}") from None


def _from_ast(node: ast.expr, named: dict[str, Expr]) -> Expr:
    """
    Args:
        named: the parts that have been given a name so far.
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
        return Const(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _from_ast(node.operand, named)
        if isinstance(inner, Const):
            return Const(-inner.value)
    if isinstance(node, ast.Name):
        if node.id in ("nan", "inf"):
            return Const(float(node.id))
        if node.id in named:
            return named[node.id]
        if node.id[:1] == "a" and node.id[1:].isdigit():
            return Arg(int(node.id[1:]))
    if isinstance(node, ast.NamedExpr):
        value = _from_ast(node.value, named)
        if node.target.id == f"t{len(named)}":
            return named.setdefault(node.target.id, value)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return Call(_OPERATORS[type(node.op)], tuple(_from_ast(side, named) for side in (node.left, node.right)))
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _OPERATORS:
        sides = (node.left, node.comparators[0])
        return Call(_OPERATORS[type(node.ops[0])], tuple(_from_ast(side, named) for side in sides))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        function = node.func.id.rstrip("_")
        arity = 1 if function in DTYPES else FUNCTIONS[function].arity if function in FUNCTIONS else -1
        if arity == len(node.args):
            return Call(function, tuple(_from_ast(arg, named) for arg in node.args))
    raise ValueError(f"cannot read {ast.unparse(node)!r}")

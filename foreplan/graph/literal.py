"""Calls with literal arguments, as ops and first contents are written; nothing is evaluated."""

from __future__ import annotations

import ast
import math
import types
import typing
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from foreplan.base.syntax import expression
from foreplan.graph.types import DTYPES, DType

_WORDS = {"inf": math.inf, "nan": math.nan}
LARGEST = 1 << 64  # above every whole number that an argument may be


@dataclass(frozen=True)
class LiteralCall:
    """`name(1, (2, 3), key="text")`.

    Attributes:
        name: what is called.
        arguments: by place.
        keywords: by name.
    """

    name: str
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]


def literal_call(text: str) -> LiteralCall:
    """The call that a text is.

    Raises:
        ValueError: it is none, or an argument is no literal, or given twice.
    """
    try:
        call = expression(text)
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise ValueError("no call")
        keywords = {str(k.arg): _literal(k.value) for k in call.keywords}
        if len(keywords) < len(call.keywords):
            raise ValueError("an argument is given twice")
        return LiteralCall(call.func.id, tuple(_literal(each) for each in call.args), keywords)
    except (SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError(str(error)) from None


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Tuple | ast.List):
        made = [_literal(each) for each in node.elts]
        return tuple(made) if isinstance(node, ast.Tuple) else made
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Name):
        return -_literal(node.operand)
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    return ast.literal_eval(node)


def check_arguments(cls: type, arguments: dict[str, Any]) -> None:
    """Check arguments against the types that a dataclass states of its fields; an element type may be a name.

    Raises:
        ValueError: says which argument is not of its field's type.
    """
    hints = _hints(cls)
    for name, value in arguments.items():
        if not _is_of(value, hints[name]):
            stated = getattr(hints[name], "__name__", None) if isinstance(hints[name], type) else None
            raise ValueError(f"{name}={value!r:.100} is not of the type {stated or hints[name]}")


@lru_cache(maxsize=256)
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _is_of(value: Any, hint: Any) -> bool:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is float:
        return type(value) is float or _is_of(value, int)
    if hint is int:
        return type(value) is int and abs(value) < LARGEST
    if hint is DType:
        return isinstance(value, DType) or (type(value) is str and value in DTYPES)
    if origin is tuple:
        if type(value) is not tuple:
            return False
        if inner[-1] is Ellipsis:
            return all(_is_of(each, inner[0]) for each in value)
        return len(value) == len(inner) and all(map(_is_of, value, inner))
    if origin in (typing.Union, types.UnionType):
        return any(_is_of(value, each) for each in inner)
    return type(value) is hint

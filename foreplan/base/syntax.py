"""Python's own parser, for the texts of ops, expressions and functions: in one thread at a time.

It counts how deep it is for all threads together. Where another thread parses while the garbage collector runs in the
midst of one tree, it raises a SystemError (python/cpython#106905).
"""

from __future__ import annotations

import ast
import threading

_ONE = threading.RLock()


def expression(text: str) -> ast.expr:
    """The syntax tree of an expression.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: it cannot be parsed.
    """
    with _ONE:
        return ast.parse(text, mode="eval").body


def module(text: str) -> ast.Module:
    """The syntax tree of statements. Raises as `expression`."""
    with _ONE:
        return ast.parse(text)

"""Options as arguments of a function, and the text that describes them."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from foreplan.options import Options
from foreplan.options.fields import info_of

if TYPE_CHECKING:
    from foreplan.graph import Graph

P = ParamSpec("P")
Result = TypeVar("Result")
_WIDTH = 120


def describe() -> str:
    """The arguments section of a docstring: each option with its meaning."""
    lines = []
    for each in fields(Options):
        info = info_of(each)
        text = f"{each.name}: {info.help}{' ' * bool(info.more)}{info.more}"
        lines += textwrap.wrap(text, _WIDTH - 4, subsequent_indent="    ")
    return "\n".join(lines)


def taking_options(
    options: Callable[P, Options],
) -> Callable[[Callable[[Graph, Options], Result]], Callable[Concatenate[Graph, P], Result]]:
    """Let a function of a graph and options take the options as arguments; its docstring describes them.

    Args:
        options: `Options`, whose arguments the function gets.
    """

    def decorate(function: Callable[[Graph, Options], Result]) -> Callable[Concatenate[Graph, P], Result]:
        @wraps(function)
        def taking(graph: Graph, *args: P.args, **kwargs: P.kwargs) -> Result:
            return function(graph, options(*args, **kwargs))

        first, *_ = inspect.signature(function).parameters.values()
        rest = inspect.signature(options).parameters.values()
        taking.__signature__ = inspect.signature(function).replace(parameters=[first, *rest])  # type: ignore[attr-defined]
        taking.__doc__ = inspect.cleandoc(function.__doc__ or "").replace(
            "{options}", textwrap.indent(describe(), "    ").lstrip()
        )
        return taking

    return decorate

"""Checks of options: from the name and value of an option to the value that is kept; all raise UsageError."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Real
from typing import Any

from foreplan.base.arguments import instance, names_in, shown, whole
from foreplan.base.errors import UsageError
from foreplan.base.units import parse_budget, parse_bytes


def budget(name: str, value: Any) -> Any:
    """A budget: None, text as it is, or bytes, or a share."""
    bound = None if value is None else parse_budget(value)
    return value if isinstance(value, str) else bound


def workspace(name: str, value: Any) -> Any:
    """A limit of workspace: bytes, text as it is, `auto` or `unlimited`."""
    if not isinstance(value, str):
        return whole(name, value, 0)
    if value not in ("auto", "unlimited"):
        parse_bytes(value)
    return value


def number(name: str, value: Any) -> Any:
    """A real number, as float."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise UsageError(f"{name} must be a number, and is {shown(value)}")
    return float(value)


def names(name: str, value: Any) -> Any:
    """Names, as a tuple."""
    return tuple(names_in(name, value))


def some_names(name: str, value: Any) -> Any:
    """Names, or None."""
    return None if value is None else names(name, value)


def passes(name: str, value: Any) -> Any:
    """What changes a list of passes, or None."""
    if value is None:
        return None
    from foreplan.passes.pipeline import check_change

    return check_change(name, value)


def text(name: str, value: Any) -> Any:
    """A text."""
    return instance(name, value, str, "give a text")


def target_files(value: Any, place: Callable[[str], str]) -> Any:
    """A target by name, with the file of a card's profile replaced.

    Raises:
        UsageError: it is no text.
    """
    engine, colon, rest = text("target", value).partition(":")
    return engine + colon + ",".join(place(part) if part.endswith(".toml") else part for part in rest.split(","))


def lent(name: str, value: Any) -> Any:
    """A compiled step or its session, which knows what other stages have, or None."""
    if value is None:
        return None
    from foreplan.lower.program import Program
    from foreplan.options.shared_weights import SharedWeights

    if isinstance(value, SharedWeights):
        return value
    found = instance(name, getattr(value, "program", value), Program, "give what `compile` or `load_plan` returns")
    return SharedWeights(found, getattr(value, "held", ()))

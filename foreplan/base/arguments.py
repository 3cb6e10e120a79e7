"""Checks of a caller's arguments: an error at once says what was expected."""

from __future__ import annotations

import operator
import os
import reprlib
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any, SupportsIndex, TypeVar, cast

from foreplan.base.errors import UsageError

Kind = TypeVar("Kind")
MOST_THREADS = 1024  # of one program; a system ends processes that have too many
REMAT = ("off", "auto")  # whether the planner may recompute: see `foreplan.options`
SHARDS = ("none", "state", "gradients", "parameters")


def shown(value: object) -> str:
    """A wrong argument as short text."""
    return f"{reprlib.repr(value)} ({type(value).__name__})"


def whole(what: str, value: Any, least: int, most: int | None = None) -> int:
    """A whole number in range, Python's or NumPy's.

    Raises:
        UsageError: a bool, a float or text, or out of range.
    """
    try:
        number = None if isinstance(value, bool) or _is_flag(value) else operator.index(cast(SupportsIndex, value))
    except TypeError:
        number = None
    if number is None or number < least or (most is not None and number > most):
        limits = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise UsageError(f"{what} must be a whole number {limits}, and is {shown(value)}")
    return number


def number_in(what: str, value: Any, low: float, high: float) -> float:
    """A real number in [low, high), Python's or NumPy's.

    Raises:
        UsageError: a bool or text, no number, or out of range.
    """
    try:
        number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else None
    except (OverflowError, TypeError, ValueError):
        number = None
    if number is None or not low <= number < high:
        raise UsageError(f"{what} must be in [{low:g}, {high:g}), and is {shown(value)}")
    return number


def flag(what: str, value: Any) -> bool:
    """True or False, Python's or NumPy's.

    Raises:
        UsageError: anything else, also 0 and 1.
    """
    if not isinstance(value, bool) and not _is_flag(value):
        raise UsageError(f"{what} is True or False, and was given {shown(value)}")
    return bool(value)


def instance(what: str, value: Any, kind: type[Kind], how: str) -> Kind:
    """A value of one class.

    Args:
        how: the way to get one, for the message.

    Raises:
        UsageError: a value of another class.
    """
    if not isinstance(value, kind):
        raise UsageError(f"{what} must be a {kind.__name__}, and is {shown(value)}: {how}")
    return value


def choice(what: str, value: Any, choices: Iterable[str]) -> str:
    """One of several words.

    Raises:
        UsageError: another word, or no text.
    """
    listed = list(choices)
    if not isinstance(value, str) or value not in listed:
        given = repr(value) if isinstance(value, str) else shown(value)
        raise UsageError(f"there is no {what} {given}; choose one of {', '.join(listed)}")
    return value


def listed(what: str, values: Any) -> list[Any]:
    """Several values as a list.

    Raises:
        UsageError: there is nothing to list.
    """
    try:
        return list(values)
    except TypeError:
        raise UsageError(f"{what} must be a list, and is {shown(values)}") from None


def mapping(what: str, value: Any, example: str) -> Mapping[Any, Any]:
    """A mapping.

    Args:
        example: one, for the message.

    Raises:
        UsageError: anything else.
    """
    if not isinstance(value, Mapping):
        raise UsageError(f"{what} must be a mapping such as {example}, and is {shown(value)}")
    return value


def names_in(what: str, names: Any) -> list[str]:
    """A list of names.

    Raises:
        UsageError: a single name, or an element that is no name.
    """
    if isinstance(names, str):
        raise UsageError(f"{what} takes a list of names: {what}=[{names!r}]")
    try:
        listed = None if isinstance(names, Mapping) else list(names)
    except TypeError:
        listed = None
    if listed is None:
        raise UsageError(f"{what} takes a list of names, and was given {shown(names)}")
    for name in listed:
        if not isinstance(name, str):
            raise UsageError(f"{what} takes a list of names, and one of them is {shown(name)}")
    return listed


def parts_in(what: str, value: Any) -> tuple[str, ...]:
    """Numbers of parts by scope, from a mapping or from texts such as `layer1=4`; as such texts.

    Raises:
        UsageError: a scope without a number of at least 2.
    """
    pairs = (
        value.items() if isinstance(value, Mapping) else (text.rpartition("=")[::2] for text in names_in(what, value))
    )
    found = []
    for scope, count in pairs:
        number = int(count) if isinstance(count, str) and count.strip().isdecimal() else count
        if not scope or not isinstance(scope, str):
            raise UsageError(f"{what} says in how many parts what runs: {what}={{'layer1': 4}}, or layer1=4")
        found.append(f"{scope}={whole(f'{what} of {scope!r}', number, 2)}")
    return tuple(found)


def path_of(what: str, path: Any) -> str:
    """The path of a file as text.

    Raises:
        UsageError: neither text nor a path.
    """
    if not isinstance(path, str | os.PathLike):
        raise UsageError(f"{what} takes the path of a file, and was given {shown(path)}")
    text = os.fsdecode(path)
    if "\0" in text:
        raise UsageError(f"{what} takes the path of a file, which holds no null character, and was given {shown(path)}")
    return text


def _is_flag(value: Any) -> bool:
    """NumPy's own True or False; it need not have been imported."""
    return type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_")

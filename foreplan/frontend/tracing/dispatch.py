"""NumPy's functions on traced tensors: the table of traced forms for NumPy's own dispatch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import numpy as np

from foreplan.base.arguments import whole
from foreplan.base.errors import UsageError
from foreplan.frontend.tracing.methods import for_tensors
from foreplan.frontend.tracing.refusals import reason_against
from foreplan.frontend.tracing.tensor import MISTAKES, Axes
from foreplan.frontend.tracing.tracer import caller, fail
from foreplan.graph.types import MOST_AXES
from foreplan.ops.reduce import normalize_axes

Handler = TypeVar("Handler", bound=Callable[..., Any])
_TABLE: dict[Callable[..., Any], Callable[..., Any]] = {}


def traced(*functions: Any) -> Callable[[Handler], Handler]:
    """Make a function the traced form of NumPy functions."""

    def add(handler: Handler) -> Handler:
        _TABLE.update((function, handler) for function in functions)
        return handler

    return add


def _name(function: Callable[..., Any]) -> str:
    module = getattr(function, "__module__", "numpy").replace("numpy", "np", 1)
    return f"{module}.{function.__name__}"


@for_tensors
def apply_function(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A NumPy function called with at least one traced tensor.

    Raises:
        TraceError: the function, or one of its arguments, cannot be traced.
    """
    name = _name(function)
    handler = _TABLE.get(function)
    if handler is None:
        raise fail(f"{name} cannot be traced: it {reason_against(function.__name__)}")
    given = {key: value for key, value in kwargs.items() if key != "out" or value is not None}
    signature = inspect.signature(handler)
    args, named = _placed(function, signature, args)
    given = {**named, **given}
    try:
        signature.bind(*args, **given)
    except TypeError as error:
        raise fail(f"{name}: {error}; it is traced as {name}{_plain(signature)}") from None
    try:
        return handler(*args, **given)
    except UsageError as error:
        raise UsageError(f"{caller()}: {name}: {error}") from None
    except MISTAKES as error:
        raise fail(f"{name} cannot be traced with these arguments: {error}") from error


def _placed(
    function: Callable[..., Any], signature: inspect.Signature, args: Sequence[Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Arguments by place, and those by name from where the traced form lacks a parameter that NumPy has there."""
    try:
        theirs = inspect.signature(function).parameters
    except (TypeError, ValueError):  # of functions written in C
        return list(args), {}
    if any(each.kind is each.VAR_POSITIONAL for each in theirs.values()):
        return list(args), {}
    ours = list(signature.parameters)
    for place, (value, name) in enumerate(zip(args, theirs)):
        own = ours[place] if place < len(ours) else name
        if own != name and own in theirs:
            rest = dict(zip(list(theirs)[place:], args[place:]))
            default = {key: theirs[key].default for key in rest if key not in ours}
            kept = {key: value for key, value in rest.items() if key in ours or value is not default[key]}
            return list(args[:place]), kept
    return list(args), {}


def _plain(signature: inspect.Signature) -> str:
    shown = []
    for parameter in signature.parameters.values():
        default = "" if parameter.default is inspect.Parameter.empty else f"={parameter.default!r}"
        shown.append(("*" if parameter.kind is inspect.Parameter.VAR_POSITIONAL else "") + parameter.name + default)
    return f"({', '.join(shown)})"


def as_axes(axis: Axes, rank: int) -> tuple[int, ...]:
    """Axes as NumPy takes them (None for all, negative ones) as distinct ascending ones."""
    if axis is None:
        return normalize_axes(None, rank)
    listed = (axis,) if np.ndim(axis) == 0 else axis
    return normalize_axes([whole("an axis", each, -MOST_AXES) for each in cast(Sequence[int], listed)], rank)


def as_axis(axis: int, rank: int) -> int:
    """One axis, counted from the front."""
    return as_axes((axis,), rank)[0]

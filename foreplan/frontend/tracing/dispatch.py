"""NumPy's functions on traced tensors: the table of traced forms for NumPy's own dispatch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import numpy as np

from foreplan.arguments import whole
from foreplan.frontend.tracing.tensor import Axes, Tensor
from foreplan.frontend.tracing.tracer import current, fail
from foreplan.graph import Value
from foreplan.graph.types import MOST_AXES
from foreplan.ops.reduce import normalize_axes

Handler = TypeVar("Handler", bound=Callable[..., Any])
_TABLE: dict[Callable[..., Any], Callable[..., Any]] = {}
_DATA_DEPENDENT = ("nonzero", "flatnonzero", "argwhere", "unique", "extract", "compress", "trim_zeros", "bincount")


def traced(*functions: Any) -> Callable[[Handler], Handler]:
    """Make a function the traced form of NumPy functions."""

    def add(handler: Handler) -> Handler:
        _TABLE.update((function, handler) for function in functions)
        return handler

    return add


def supported_functions() -> tuple[str, ...]:
    """Names of the NumPy functions, other than ufuncs, that traced tensors take."""
    _load()
    return tuple(sorted({_name(function) for function in _TABLE}))


def _load() -> None:
    """Fill the table: the modules that declare traced functions need this one."""
    from foreplan.frontend.tracing import numpy_reduce, numpy_shape  # noqa: F401


def _name(function: Callable[..., Any]) -> str:
    module = getattr(function, "__module__", "numpy").replace("numpy", "np", 1)
    return f"{module}.{function.__name__}"


def apply_function(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A NumPy function called with at least one traced tensor.

    Raises:
        TraceError: the function, or one of its arguments, cannot be traced.
    """
    name = _name(function)
    _load()
    handler = _TABLE.get(function)
    if handler is None and function.__name__ in _DATA_DEPENDENT:
        raise fail(f"{name} gives a shape that depends on data, and shapes are static; use np.where with a mask")
    if handler is None:
        raise fail(
            f"{name} cannot be traced; write it with other NumPy functions or foreplan.nn "
            f"(traced: {', '.join(supported_functions())})"
        )
    given = {key: value for key, value in kwargs.items() if key != "out" or value is not None}
    signature = inspect.signature(handler)
    try:
        signature.bind(*args, **given)
    except TypeError as error:
        raise fail(f"{name}: {error}; it is traced as {name}{_plain(signature)}") from None
    return handler(*args, **given)


def _plain(signature: inspect.Signature) -> str:
    shown = []
    for parameter in signature.parameters.values():
        default = "" if parameter.default is inspect.Parameter.empty else f"={parameter.default!r}"
        shown.append(("*" if parameter.kind is inspect.Parameter.VAR_POSITIONAL else "") + parameter.name + default)
    return f"({', '.join(shown)})"


def wrap(value: Value) -> Tensor:
    """A value as the traced function sees it."""
    return current().wrap(value)


def as_axes(axis: Axes, rank: int) -> tuple[int, ...]:
    """Axes as NumPy takes them (None for all, negative ones) as distinct ascending ones."""
    if axis is None:
        return normalize_axes(None, rank)
    listed = (axis,) if np.ndim(axis) == 0 else axis
    return normalize_axes([whole("an axis", each, -MOST_AXES) for each in cast(Sequence[int], listed)], rank)


def as_axis(axis: int, rank: int) -> int:
    """One axis, counted from the front."""
    return as_axes((axis,), rank)[0]

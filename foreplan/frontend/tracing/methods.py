"""What tensors do by functions that themselves need tensors, such as indexing: declared there, and found by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])
_DECLARED: dict[str, Callable[..., Any]] = {}


def for_tensors(function: Function) -> Function:
    """Declare a function under its own name. The package imports every module that has one."""
    _DECLARED[function.__name__] = function
    return function


def of_tensors(name: str) -> Callable[..., Any]:
    """The function of a name."""
    return _DECLARED[name]

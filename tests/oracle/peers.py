"""JAX, imported when a test first uses it: collecting the tests loads none of it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


class _Module:
    """A module by name, as if it were imported."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)


jax: Any = _Module("jax")
jnp: Any = _Module("jax.numpy")
lax: Any = _Module("jax.lax")


def jit(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`jax.jit` with these options, of a function that is called later."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        compiled: list[Callable[..., Any]] = []

        def call(*given: Any, **named: Any) -> Any:
            if not compiled:
                compiled.append(jax.jit(function, **options))
            return compiled[0](*given, **named)

        return call

    return decorate

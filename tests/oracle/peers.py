"""Large packages that tests compare with, imported when a test first uses them: collecting loads none of them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


class _Module:
    """A module by name, as if it were imported."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest and `inspect` look for such names in whatever a module holds
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)


jax: Any = _Module("jax")
jnp: Any = _Module("jax.numpy")
lax: Any = _Module("jax.lax")
cp_model: Any = _Module("ortools.sat.python.cp_model")
networkx: Any = _Module("networkx")
onnx: Any = _Module("onnx")
onnxruntime: Any = _Module("onnxruntime")


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

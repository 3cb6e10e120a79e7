"""Large packages that tests compare with, imported when a test first uses them: collecting loads none of them."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

# XLA: a function that runs once takes longer to optimise than to run.
QUICKLY = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


class _Module:
    """A module by name, as if it were imported."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        os.environ.setdefault("XLA_FLAGS", QUICKLY)
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


def pulled(function: Callable[..., Any], cotangent: Any, *given: Any) -> tuple[Any, Any]:
    """A function's result in JAX, and the cotangents of what it is given, compiled as one: an operation at a time, each
    is compiled by itself.
    """

    def both(cotangent: Any, *given: Any) -> tuple[Any, Any]:
        result, back = jax.vjp(function, *given)
        return result, back(cotangent)

    found: tuple[Any, Any] = jax.jit(both)(cotangent, *given)
    return found

"""The source of compiled functions: syntax trees, what names stand for, and a digest of all that they depend on."""

from __future__ import annotations

import ast
import builtins
import hashlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from types import CodeType, ModuleType
from typing import Any

import numpy as np

from foreplan.base.disk_cache import sources
from foreplan.base.syntax import module

MISSING = object()
_MAKERS = ("zeros", "ones", "full", "empty", "copy", "argsort")  # calls that make an array


@dataclass(frozen=True)
class Source:
    """A function in Python that can be compiled.

    Attributes:
        fastmath: in what its arithmetic of floats may differ from IEEE 754's, in LLVM's terms.
        inline: whether its code always stands where it is called; its arithmetic is then as the caller's.
        vectorize: whether LLVM looks for loops that may work on several elements at once, in it and all that it calls,
            where it is called from outside. That takes longer, and long functions on integers have few such loops.
    """

    function: Any
    fastmath: tuple[str, ...] = ()
    inline: bool = False
    vectorize: bool = False

    @property
    def name(self) -> str:
        """Its name, as errors and files have it."""
        return str(self.function.__name__)

    def outer(self, name: str) -> Any:
        """What a name stands for outside the function, or MISSING."""
        cells = dict(zip(self.function.__code__.co_freevars, self.function.__closure__ or ()))
        if name in cells:
            return cells[name].cell_contents
        return self.function.__globals__.get(name, getattr(builtins, name, MISSING))


@dataclass(frozen=True)
class Emitted:
    """A function that writes its own instructions; only compiled functions call it.

    Attributes:
        emit: called with the translation of the caller, and the arguments as `values` describes them.
    """

    emit: Callable[..., Any]


def source_of(function: object) -> Source | None:
    """The source of a compiled function; None of anything else."""
    found = getattr(function, "source", None)
    return found if isinstance(found, Source) else None


@cache
def tree_of(source: Source) -> tuple[ast.FunctionDef, int]:
    """A function's syntax tree, and the line before its first."""
    lines, first = inspect.getsourcelines(source.function)
    tree = module(textwrap.dedent("".join(lines))).body[0]
    assert isinstance(tree, ast.FunctionDef)
    return tree, first - 1


@cache
def makes_arrays(source: Source) -> bool:
    """Whether a function, or one that it calls, may make an array."""
    for node in ast.walk(tree_of(source)[0]):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute) and node.func.attr in _MAKERS:
                return True
            called = source_of(source.outer(node.func.id)) if isinstance(node.func, ast.Name) else None
            if called and makes_arrays(called):
                return True
    return False


@cache
def digest_of(source: Source) -> str:
    """A digest of a function, of all functions that it calls, of their options, and of this compiler."""
    digest, waiting, seen = hashlib.sha256(sources("foreplan.jit").encode()), [source], {source}
    while waiting:
        text, called = _described(waiting.pop())
        digest.update(text.encode())
        waiting += (each for each in called if each not in seen)
        seen.update(called)
    return digest.hexdigest()


@cache
def _described(source: Source) -> tuple[str, tuple[Source, ...]]:
    """A function as text, and the compiled functions that it calls."""
    code = source.function.__code__
    names = sorted({*_names(code), *code.co_freevars})
    found = [(name, value) for name in names if (value := source.outer(name)) is not MISSING]
    about = (_name(source.function), source.fastmath, source.inline, source.vectorize, sys.implementation.cache_tag)
    called = tuple(each for _, value in found if (each := source_of(value)))
    return repr((about, _code(code), [(name, _outside(value)) for name, value in found])), called


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _names(each)


def _code(code: CodeType) -> Any:
    """Instructions with their names and constants, without their line numbers."""
    constants = [_code(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    return code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants


def _name(function: Any) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def _outside(value: Any) -> str:
    """A value that machine code may depend on, as text that is the same in every process."""
    if isinstance(value, Emitted):  # what it writes depends on more than itself
        return f"{_name(value.emit)} {sources(_part(value.emit.__module__))}"
    if isinstance(value, ModuleType):
        return value.__name__
    if isinstance(value, bool | int | float | tuple | np.generic):
        return repr(value)
    return _name(value) if hasattr(value, "__qualname__") else type(value).__name__


def _part(module: str) -> str:
    """The part of the package that a module is in: `foreplan.runtime` of `foreplan.runtime.cpu.gemm.tiles`."""
    return ".".join(module.split(".")[:2])

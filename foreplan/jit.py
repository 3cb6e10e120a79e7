"""Compiling with Numba: machine code is kept on disk, and used again if it is complete and up to date.

    @compiled
    def total(x): ...

Numba's own cache does not check that files are complete, needs a folder that can be written, and does not notice a
change in a function that another one calls.
"""

from __future__ import annotations

import hashlib
import pickle
import sys
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import llvmlite
import numba
import numpy as np
from numba.core import config
from numba.core.caching import NullCache
from numba.core.compiler import CompileResult
from numba.core.dispatcher import Dispatcher
from numba.core.serialize import dumps

from foreplan.disk_cache import claim, keep, kept, release

_PACKAGE = __name__.partition(".")[0]


def compiled(function: Any = None, **options: Any) -> Any:
    """A function that Numba compiles when it is first called with arguments of new types.

    Args:
        function: in Python; None: the result is a decorator.
        options: of `numba.njit`, without `cache`.
    """
    if function is None:
        return partial(compiled, **options)
    made: Any = numba.njit(**options)(function)
    if made is not function:  # NUMBA_DISABLE_JIT leaves functions as they are
        made._cache = _Kept(made)
    return made


class _Kept(NullCache):
    """The cache of a dispatcher: it asks here for machine code before it compiles, and stores it here afterwards."""

    def __init__(self, dispatcher: Any) -> None:
        self._dispatcher = dispatcher

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The result of compiling for these types, or None: then this process compiles, and others wait for it."""
        target_context.refresh()
        name = self._name(sig, target_context.codegen())
        if (content := kept(name)) is None:
            claim(name)
            if (content := kept(name)) is not None:
                release(name)
        return None if content is None else CompileResult._rebuild(target_context, *pickle.loads(content))

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep the result of compiling for these types, unless it holds addresses of this process."""
        name = self._name(sig, data.codegen)
        if not (data.library.has_dynamic_globals or data.lifted):
            keep(name, dumps(data._reduce()))
        release(name)

    def _name(self, sig: Any, codegen: Any) -> str:
        """A name that depends on everything that the machine code depends on."""
        versions = numba.__version__, llvmlite.__version__, sys.implementation.cache_tag
        flags = [getattr(config, name) for name in ("OPT", "BOUNDSCHECK", "DEBUGINFO_DEFAULT")]
        about = repr((versions, flags, codegen.magic_tuple(), str(sig), _source(self._dispatcher)))
        return f"{self._dispatcher.__name__}-{hashlib.sha256(about.encode()).hexdigest()}.numba"


@cache
def _source(dispatcher: Any) -> str:
    """A digest of the function, of all functions that it calls, and of their options."""
    digest, waiting, seen = hashlib.sha256(), [dispatcher], {dispatcher}
    while waiting:
        text, called = _written(waiting.pop())
        digest.update(text.encode())
        waiting += (each for each in called if each not in seen)
        seen.update(called)
    return digest.hexdigest()


@cache
def _written(dispatcher: Any) -> tuple[str, tuple[Any, ...]]:
    """A function as text, and the compiled functions that it calls."""
    function: FunctionType = dispatcher.py_func
    options = sorted((key, sorted(v) if isinstance(v, set) else v) for key, v in dispatcher.targetoptions.items())
    found = {name: function.__globals__[name] for name in _names(function.__code__) if name in function.__globals__}
    found |= {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ())}
    about = [f"{function.__module__}.{function.__qualname__}", options, function.__defaults__]
    values = [(name, _described(value)) for name, value in sorted(found.items())]
    called = tuple(value for _, value in sorted(found.items()) if isinstance(value, Dispatcher))
    return repr((about, _code(function.__code__), values)), called


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _names(each)


def _code(code: CodeType) -> Any:
    """Instructions with their names and constants, without their line numbers."""
    constants = [_code(c) if isinstance(c, CodeType) else _described(c) for c in code.co_consts]
    return code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants


def _described(value: Any) -> str:
    """A value that machine code may hold, as text that is the same in every process."""
    if isinstance(value, frozenset):
        return repr(sorted(map(repr, value)))
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}"
    if isinstance(value, Dispatcher):
        return f"{value.py_func.__module__}.{value.py_func.__qualname__}"
    module = value if isinstance(value, ModuleType) else sys.modules.get(_home(value))
    if module is None:
        return repr(value)
    name = f"{module.__name__}.{getattr(value, '__qualname__', '')}"
    own = module.__name__.partition(".")[0] == _PACKAGE
    return f"{name} {_sources(_part(module.__name__))}" if own else name


def _part(module: str) -> str:
    """The part of the package that a module is in: `foreplan.runtime` of `foreplan.runtime.cpu.gemm.tiles`."""
    return ".".join(module.split(".")[:2])


def _home(value: Any) -> str:
    """The module that a function, a class or an intrinsic of Numba is from; empty for any other value."""
    value = getattr(value, "_defn", value)
    return value.__module__ if isinstance(value, FunctionType | type) else ""


@cache
def _sources(part: str) -> str:
    """A digest of all files of a part, for Python code that tells Numba what to compile."""
    path = Path(str(sys.modules[part].__file__))
    files = sorted(path.parent.rglob("*.py")) if path.name == "__init__.py" else [path]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()

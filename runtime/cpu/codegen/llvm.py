"""Functions of LLVM's intermediate representation, compiled for this processor."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import llvmlite.ir as ir

from foreplan.base.disk_cache import sources
from foreplan.jit import machine
from foreplan.jit.builder import Builder
from foreplan.runtime.cpu.instructions import lacked

NAME = "kernel"  # of the function in its module that is called; see `KERNEL`
_CALL = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_char_p)


def new_function(type: ir.FunctionType) -> tuple[ir.Function, Builder]:
    """A function in a module of its own, and where its instructions go."""
    module = ir.Module()
    function = ir.Function(module, type, NAME)
    function.attributes.add("nounwind")
    return function, Builder(function.append_basic_block())


def compiled(function: ir.Function) -> Callable[[int, int, Any], None]:
    """A function of (start, stop, table) as a call that releases the interpreter's lock."""
    return _CALL(address_of(function))


def compiled_as(
    key: object, write: Callable[[], ir.Function], passes: machine.Passes = "usual"
) -> Callable[[int, int, Any], None]:
    """As `compiled`, but the function is written only if its machine code is not on disk.

    Args:
        key: all that the function is made from, as its `repr`; except the source files that write functions.
        passes: how much LLVM does before it makes machine code.
    """
    written_by = [sources(package) for package in ("foreplan.jit", "foreplan.runtime.cpu", "foreplan.ops")]
    return _CALL(_loaded(f"{written_by} {key!r}", lambda: str(write().module), passes))


def address_of(function: ir.Function) -> int:
    """Where a function's machine code lies."""
    text = str(function.module)
    return _loaded(text, lambda: text)


def _loaded(key: str, text: Callable[[], str], passes: machine.Passes = "usual") -> int:
    return machine.loaded(machine.Module(NAME, key, lambda: (text(), ""), passes=passes, without=lacked()))[0]

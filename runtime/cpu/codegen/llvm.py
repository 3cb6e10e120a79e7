"""Functions of LLVM's intermediate representation, compiled for this processor."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import llvmlite.ir as ir

import foreplan.ops
import foreplan.runtime.cpu
from foreplan.jit import machine

INT64, POINTER = ir.IntType(64), ir.PointerType()
NAME = "kernel"  # of the function in its module that is called
# kernel(start, stop, table) works on [start, stop) of what the table describes.
KERNEL = ir.FunctionType(ir.VoidType(), [INT64, INT64, POINTER])
STATUS = ir.FunctionType(ir.IntType(32), [INT64, INT64, POINTER])  # likewise; returns 0 or an error's number
_CALL = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_char_p)


def new_function(type: ir.FunctionType) -> tuple[ir.Function, ir.IRBuilder]:
    """A function in a module of its own, and where its instructions go."""
    module = ir.Module()
    machine.prepare(module)
    function = ir.Function(module, type, NAME)
    function.attributes.add("nounwind")
    return function, ir.IRBuilder(function.append_basic_block())


def compiled(function: ir.Function) -> Callable[[int, int, Any], None]:
    """A function of (start, stop, table) as a call that releases the interpreter's lock."""
    return _CALL(address_of(function))


def compiled_as(key: object, write: Callable[[], ir.Function]) -> Callable[[int, int, Any], None]:
    """As `compiled`, but the function is written only if its machine code is not on disk.

    Args:
        key: all that the function is made from, as its `repr`; except the source files that write functions.
    """
    return _CALL(_loaded(f"{_sources()} {key!r}", lambda: str(write().module)))


def address_of(function: ir.Function) -> int:
    """Where a function's machine code lies."""
    text = str(function.module)
    return _loaded(text, lambda: text)


def _loaded(key: str, text: Callable[[], str]) -> int:
    return machine.loaded(machine.Module(NAME, key, lambda: (text(), "")))[0]


def source_files() -> list[Path]:
    """The files that write functions: all of this engine, and the ops with their expressions."""
    folders = [Path(str(package.__file__)).parent for package in (foreplan.runtime.cpu, foreplan.ops)]
    return [file for folder in folders for file in sorted(folder.rglob("*.py"))]


@lru_cache(maxsize=1)
def _sources() -> str:
    """A digest of these files."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in source_files())).hexdigest()

"""The function of a table that Python and other machine code call, in a module with all that it calls."""

from __future__ import annotations

import ctypes
from typing import Any

import llvmlite.ir as ir
import numpy as np

from foreplan.jit import machine
from foreplan.jit.builder import I32, I64, STATUS, Builder
from foreplan.jit.expressions import Expressions
from foreplan.jit.source import Source, digest_of
from foreplan.jit.translation import Module
from foreplan.jit.types import TupleType, Type, python_value, word_count
from foreplan.jit.values import Number, Tuple, Untranslatable, Value, put_together, taken_apart

_CALL = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)


class Entry:
    """A function for arguments of some types, as machine code.

    Attributes:
        address: of its machine code, a function of (0, 0, table) that returns a status, 0 if all is well. The table
            begins with the arguments, and the results follow them.
        call: of this machine code; it releases the interpreter's lock.
    """

    def __init__(self, address: int, types: tuple[Type, ...], results: str) -> None:
        self.address, self.call = address, _CALL(address)
        self._is_tuple = results.startswith("(")
        self._results = [np.dtype(name) for name in results.strip("()").split(",") if name]
        self._at = sum(map(word_count, types))

    def table(self, words: list[int]) -> np.ndarray:
        """The table of a call with these arguments."""
        return np.array(words + [0] * len(self._results), np.int64)

    def results(self, table: np.ndarray) -> Any:
        """What a call has returned."""
        found = [python_value(bits, dtype) for bits, dtype in zip(table[self._at :].tolist(), self._results)]
        return tuple(found) if self._is_tuple else found[0] if found else None


def make_entry(source: Source, types: tuple[Type, ...], *, checked: bool) -> Entry:
    """The machine code of a function for arguments of some types.

    Args:
        checked: it ends with an error where an index is not within its axis; such code is not kept on disk.
    """
    key = repr((source.name, types, digest_of(source)))
    passes: machine.Passes = "loops" if source.vectorize else "few"
    what = "the planner" if source.function.__module__.startswith("foreplan.planner.") else "loops"
    name = source.name.strip("_")
    module = machine.Module(name, key, lambda: written_module(source, types, checked=checked), what, passes)
    address, results = machine.loaded(module, store=not checked)
    return Entry(address, types, results)


def written_module(source: Source, types: tuple[Type, ...], *, checked: bool = False) -> tuple[str, str]:
    """The module of a function as text, and the types of its results."""
    name, module = source.name.strip("_"), Module(checked)
    entry = ir.Function(module.module, STATUS, name)
    made = module.function(source, types)
    b = Builder(entry.append_basic_block())
    reader, table, at = Expressions(b), entry.args[2], 0
    parts: list[ir.Value] = []
    for type in types:
        parts += taken_apart(reader.read(type, table, at))
        at += word_count(type)
    whole = b.call(made.function, parts)
    several = isinstance(whole.type, ir.LiteralStructType)
    found = [b.extract_value(whole, i) for i in range(len(whole.type.elements))] if several else [whole]
    status = found.pop(0) if made.may_fail else ir.Constant(I32, 0)
    if made.result is not None:
        for number in _numbers(put_together(made.result, found)):
            b.store(reader.to_word(number), b.gep(table, [at], source_etype=I64))
            at += 1
    b.ret(status)
    if isinstance(made.result, TupleType):
        return str(module.module), "(" + ",".join(map(str, made.result.items)) + ")"
    return str(module.module), "" if made.result is None else str(made.result)


def _numbers(value: Value) -> list[Number]:
    if isinstance(value, Number):
        return [value]
    if isinstance(value, Tuple) and all(isinstance(item, Number) for item in value.items):
        return [item for item in value.items if isinstance(item, Number)]
    raise Untranslatable("only numbers, and tuples of them, are returned to Python")

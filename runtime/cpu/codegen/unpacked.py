"""Calls of functions that Numba compiled, without its Python wrapper: machine code, and the numbers that it takes.

Numba's code takes an array as successive numbers (no owner, no object, elements, bytes of one, address, extents,
strides), after the addresses for a result and an exception. A small function here reads them from a table and makes the
call.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import llvmlite.ir as ir
import numba
import numpy as np
from numba.core.dispatcher import Dispatcher

from foreplan.runtime.cpu.codegen.lanes import DOUBLE, FLOAT, INT32, INT64
from foreplan.runtime.cpu.codegen.llvm import POINTER, STATUS, address_of
from foreplan.runtime.cpu.codegen.loops import Writer

FINE = (0, -2)  # status of Numba's functions that return a value or None
RAISED = 5  # oneDNN's status for a runtime error


def is_numbas(function: object) -> bool:
    """Whether Numba compiles a function."""
    return isinstance(function, Dispatcher)


def unpacked(run: partial[Any]) -> tuple[int, np.ndarray]:
    """The address of a function of (0, 0, table) that gives a status, and the table, for a call of a function that
    Numba compiles. Arrays must be kept alive by the caller.
    """
    function: Any = run.func
    types = tuple(numba.typeof(argument) for argument in run.args)
    function.compile(types)
    made = function.overloads[types]
    wanted = function.targetctx.call_conv.get_function_type(made.signature.return_type, made.signature.args)
    numbers = [made.library.get_pointer_to_function(made.fndesc.llvm_func_name)]
    for argument in run.args:
        numbers += _numbers(argument)
    kinds = tuple(map(str, wanted.args[2:]))
    assert len(kinds) == len(numbers) - 1, f"{function} takes {len(kinds)} numbers, and {len(numbers) - 1} are there"
    return _caller(tuple("ptr" if "*" in kind else kind for kind in kinds)), np.array(numbers, np.int64)


def _numbers(argument: Any) -> list[int]:
    """An argument as the bits of numbers."""
    if isinstance(argument, np.ndarray):
        return [0, 0, argument.size, argument.itemsize, argument.ctypes.data, *argument.shape, *argument.strides]
    if isinstance(argument, tuple):
        return [number for each in argument for number in _numbers(each)]
    if isinstance(argument, np.float32):
        return [int(argument.view(np.int32))]
    if isinstance(argument, float):  # and NumPy's own of eight bytes
        return [int(np.float64(argument).view(np.int64))]
    return [int(argument)]


@cache
def _caller(kinds: tuple[str, ...]) -> int:
    """The address of a function of (0, 0, table) that calls another, and gives 0 unless that raises; the table is
    int64: that one's address, and the bits of what it takes, of these kinds.
    """
    return address_of(_Unpacker(kinds).written())


class _Unpacker(Writer):
    """Writes such a function."""

    def __init__(self, kinds: tuple[str, ...]) -> None:
        super().__init__(STATUS)
        self.kinds = kinds

    def write(self) -> None:
        b = self.b
        result, raised = self.local(INT64), self.local(INT64)
        values = [self.value(kind, self.entry(1 + i)) for i, kind in enumerate(self.kinds)]
        type = ir.FunctionType(INT32, [POINTER, POINTER, *(value.type for value in values)])
        status = b.call(b.inttoptr(self.entry(0), type.as_pointer()), [result, raised, *values])
        fine = [b.icmp_signed("==", status, ir.Constant(INT32, code)) for code in FINE]
        b.ret(b.select(b.or_(*fine), ir.Constant(INT32, 0), ir.Constant(INT32, RAISED)))

    def value(self, kind: str, bits: ir.Value) -> ir.Value:
        """A number of a kind, from its bits."""
        b = self.b
        if kind == "ptr":
            return b.inttoptr(bits, POINTER)
        if kind == "double":
            return b.bitcast(bits, DOUBLE)
        if kind == "float":
            return b.bitcast(b.trunc(bits, INT32), FLOAT)
        return bits if kind == "i64" else b.trunc(bits, ir.IntType(int(kind[1:])))

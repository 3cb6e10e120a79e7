"""Calls of compiled functions one after the other, with no interpreter between them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from itertools import groupby

import llvmlite.ir as ir
import numpy as np

from foreplan.cpu.kernel import Run, Several
from foreplan.cpu.lanes import INT32, INT64
from foreplan.cpu.library import library, raise_for
from foreplan.cpu.llvm import compiled
from foreplan.cpu.loops import Writer

Function = ctypes.CFUNCTYPE(None).__mro__[1]  # of which both library functions and machine code made here are
ARGUMENTS = 4  # of a function, at most
RECORD = 2 + ARGUMENTS  # its address, whether it gives a status, and what it is called with


def joined(runs: Iterable[Run]) -> list[Run]:
    """The same calls in the same order, those of compiled functions that follow one another as one."""
    groups = groupby(_each(runs), lambda run: _record(run) is not None)
    return [call for native, group in groups for call in ([_Joined(group)] if native else group)]


def _each(runs: Iterable[Run]) -> Iterator[Run]:
    for run in runs:
        yield from _each(run.runs) if isinstance(run, Several) else (run,)


class _Joined:
    """One call for several, which it keeps alive."""

    def __init__(self, runs: Iterable[Run]) -> None:
        self.runs = tuple(runs)
        records = [record for record in map(_record, self.runs) if record is not None]
        self.table = np.array([0, *(number for record in records for number in record)], np.int64)
        self.status = ctypes.c_int64.from_address(self.table.ctypes.data)
        self.call = partial(_compiled(), 0, len(records), self.table.ctypes.data_as(ctypes.c_char_p))

    def __call__(self) -> None:
        self.call()
        if self.status.value:
            status, self.status.value = self.status.value, 0
            raise_for(status)


def _record(run: Run) -> list[int] | None:
    """A call of a compiled function as numbers; None for any other."""
    if not isinstance(run, partial) or not isinstance(run.func, Function) or run.keywords:
        return None
    numbers = [_number(argument) for argument in run.args]
    address = ctypes.cast(run.func, ctypes.c_void_p).value  # type: ignore[arg-type]
    checked = run.func == library().functions.dnnl_primitive_execute
    return [address or 0, int(checked), *numbers, *[0] * (ARGUMENTS - len(numbers))]


def _number(argument: object) -> int:
    if isinstance(argument, int):
        return argument
    if isinstance(argument, ctypes.Array):
        return ctypes.addressof(argument)
    value = ctypes.cast(argument, ctypes.c_void_p).value  # type: ignore[arg-type]
    return value or 0


@cache
def _compiled() -> Callable[[int, int, ctypes.c_char_p], None]:
    """A call of (start, stop, table) for records [start, stop), until one gives a status, which goes to the table.

    The table is int64: the status, then the records.
    """
    writer = _Caller()
    writer.write()
    return compiled(writer.function)


class _Caller(Writer):
    """Writes the function that calls the others. A function takes no notice of more numbers than it has arguments."""

    def write(self) -> None:
        b, type = self.b, ir.FunctionType(INT32, [INT64] * ARGUMENTS)
        with self.counted(self.start, self.stop, 1) as at:
            first = b.add(b.mul(at, self.number(RECORD)), self.number(1))
            address, checked, *numbers = (self.load(b.add(first, self.number(i))) for i in range(RECORD))
            status = b.call(b.inttoptr(address, type.as_pointer()), numbers)
            counts = b.icmp_signed("!=", checked, self.number(0))
            with b.if_then(b.and_(counts, b.icmp_signed("!=", status, ir.Constant(INT32, 0)))):
                b.store(b.sext(status, INT64), self.table)
                b.ret_void()
        b.ret_void()

    def load(self, index: ir.Value) -> ir.Value:
        """A number of the table."""
        return self.b.load(self.b.gep(self.table, [index], source_etype=INT64), typ=INT64)

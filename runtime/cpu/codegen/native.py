"""Calls of compiled functions one after the other, or on several threads, without the interpreter in between."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from itertools import groupby
from typing import Any

import llvmlite.ir as ir
import numpy as np

from foreplan.jit import Compiled
from foreplan.jit.builder import I32, I64, KERNEL, STATUS
from foreplan.runtime.cpu.codegen.llvm import address_of, compiled
from foreplan.runtime.cpu.codegen.loops import Writer
from foreplan.runtime.cpu.onednn.library import library, raise_for
from foreplan.runtime.kernel import Run, Several

Function = ctypes.CFUNCTYPE(None).__mro__[1]  # of which both library functions and machine code made here are
ARGUMENTS = 4  # of a function, at most
_IS_X86 = platform.machine() in ("x86_64", "AMD64")
_RESULTS, _OPERANDS = 0x8000, 0x0040  # what the register MXCSR says: such numbers are zero where they are denormal
RECORD = 3 + ARGUMENTS  # its address, whether it gives a status, its arithmetic, and what it is called with


def joined(runs: Iterable[Run]) -> list[Run]:
    """The same calls in the same order; successive calls of compiled functions are joined into one."""
    groups = groupby(_each(runs), is_native)
    return [call for native, group in groups for call in ([Joined(group)] if native else group)]


def _each(runs: Iterable[Run]) -> Iterator[Run]:
    for run in runs:
        yield from _each(run.runs) if isinstance(run, Several) else (run,)


class _Table:
    """Calls as records for the function that makes them, and the calls themselves, which own their memory."""

    def __init__(self, runs: Iterable[Run]) -> None:
        self.runs = tuple(_each(runs))
        self.kept: list[np.ndarray] = []
        records = [self.record(run) for run in self.runs]
        self.numbers = np.array([0, *(number for record in records for number in record)], np.int64)
        self.address, self.count = self.numbers.ctypes.data, len(records)

    def record(self, run: Run) -> list[int]:
        """A call of a compiled function as numbers."""
        assert isinstance(run, partial)
        if isinstance(run.func, Compiled):
            entry, table = run.func.prepared(run.args)
            self.kept.append(table)
            return [entry.address, 1, _RESULTS | _OPERANDS, 0, 0, table.ctypes.data, 0]
        numbers = [_number(argument) for argument in run.args]
        checked = run.func in (library().functions.dnnl_primitive_execute, _checker())
        control = _RESULTS if getattr(run.func, "reads_denormals", False) else _RESULTS | _OPERANDS
        return [_address(run.func), int(checked), control, *numbers, *[0] * (ARGUMENTS - len(numbers))]

    def check(self) -> None:
        """Raise for the status of a call that has failed."""
        if status := int(self.numbers[0]):
            self.numbers[0] = 0
            raise_for(status)


class Joined:
    """One call for several."""

    def __init__(self, runs: Iterable[Run]) -> None:
        self.table = _Table(runs)
        self.status = ctypes.c_int64.from_address(self.table.address)
        self.call = partial(_caller(), 0, self.table.count, ctypes.c_char_p(self.table.address))

    def __call__(self) -> None:
        """Make them."""
        self.call()
        if self.status.value:
            self.table.check()


def together(parts: Sequence[Run]) -> Run:
    """A call that makes each of several, all of compiled functions, on a thread of OpenMP's own.

    oneDNN uses the same threads, so no others compete for a core.
    """
    if len(parts) == 1:
        return parts[0]
    tables = [_Table([part]) for part in parts]
    openmp = library().openmp
    own = [_address(openmp.omp_get_thread_num), _address(openmp.omp_get_num_threads), _address(_caller())]
    data = np.array([*own, len(tables), *(number for t in tables for number in (t.count, t.address))], np.int64)
    fork = partial(openmp.GOMP_parallel, ctypes.c_void_p(_member()), ctypes.c_void_p(data.ctypes.data), len(parts), 0)
    statuses = np.array([len(tables), *(t.address for t in tables)], np.int64)
    check = partial(_checker(), statuses.ctypes.data, 0, None)
    return Several((_keeping(fork, data, tables), _keeping(check, statuses)))


def _keeping(call: partial[Any], *needed: object) -> Run:
    """A call that keeps alive what it needs."""
    call.needed = needed  # type: ignore[attr-defined]
    return call


def _address(function: object) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0  # type: ignore[arg-type]


def is_native(run: object) -> bool:
    """Whether a call is of a compiled function."""
    if not isinstance(run, partial) or run.keywords:
        return False
    return isinstance(run.func, Function | Compiled)


def _number(argument: object) -> int:
    if isinstance(argument, int):
        return argument
    if isinstance(argument, ctypes.Array):
        return ctypes.addressof(argument)
    return 0 if argument is None else _address(argument)


@cache
def _caller() -> Callable[[int, int, ctypes.c_char_p], None]:
    """A call of (start, stop, table) for records [start, stop), until one gives a status, which goes to the table.

    The table is int64: the status, then the records.
    """
    return compiled(_Caller().written())


@cache
def _member() -> int:
    """The address of what each thread of a team runs, given the team's data: every n-th of the tables, of n threads.

    The data is int64: the addresses of omp_get_thread_num, omp_get_num_threads and the caller; how many tables; and of
    each, how many records it has, and its address.
    """
    return address_of(_Member().written())


@cache
def _checker() -> Callable[[int, int, object], int]:
    """A call of (data, 0, None) that gives the first status that is not 0; the data is int64: how many tables, and the
    address of each.
    """
    type = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
    call = type(address_of(_Checker(STATUS).written()))
    call.errcheck = lambda status, *_: raise_for(status)  # type: ignore[assignment]
    return call


class _Caller(Writer):
    """Writes the function that calls the others. A function ignores numbers beyond its arguments.

    Meanwhile results below 1.2e-38 are zero. The momentum of a parameter without gradients would fade to the least
    number and, rounded, stay there; processors take a hundred times as long for such numbers. Operands below 1.2e-38
    count as zero, too, but in maps: there the logarithm of such a number, or its sign, is another than that of zero.
    """

    def write(self) -> None:
        b, type = self.b, ir.FunctionType(I32, [I64] * ARGUMENTS)
        self.word = b.local(I32)
        before = self._control()
        with b.counted(self.start, self.stop) as at:
            first = b.add(b.mul(at, RECORD), 1)
            places = [b.add(first, i) for i in range(RECORD)]
            address, checked, control, *numbers = (b.word(self.table, place) for place in places)
            wanted = b.or_(before, b.trunc(control, I32))
            with b.if_then(b.icmp_signed("!=", wanted, b.load(self.word, typ=I32))):  # to set it takes 20 cycles
                self._set_control(wanted)
            status = b.call(b.inttoptr(address, type.as_pointer()), numbers)
            counts = b.icmp_signed("!=", checked, 0)
            with b.if_then(b.and_(counts, b.icmp_signed("!=", status, 0))):
                b.store(b.sext(status, I64), self.table)
                self._set_control(before)
                b.ret_void()
        self._set_control(before)
        b.ret_void()

    def _control(self) -> ir.Value:
        """The thread's mode of floating-point arithmetic, the register MXCSR; 0 without one."""
        if not _IS_X86:
            return ir.Constant(I32, 0)
        self.b.named("llvm.x86.sse.stmxcsr", ir.VoidType(), self.word)
        return self.b.load(self.word, typ=I32)

    def _set_control(self, control: ir.Value) -> None:
        if _IS_X86:
            self.b.store(control, self.word)
            self.b.named("llvm.x86.sse.ldmxcsr", ir.VoidType(), self.word)


class _Member(Writer):
    """Writes the function that a thread of a team runs; its data comes as the argument `start`."""

    def write(self) -> None:
        b, data = self.b, self.b.pointer(self.start)
        number, size, caller, count = (b.word(data, i) for i in range(4))
        asked = ir.FunctionType(I32, []).as_pointer()
        own, team = (b.sext(b.call(b.inttoptr(each, asked), []), I64) for each in (number, size))
        rounds = b.blocks(count, team)
        with b.counted(0, rounds) as turn:
            table = b.add(b.mul(turn, team), own)
            with b.if_then(b.icmp_signed("<", table, count)):
                first = b.add(b.mul(table, 2), 4)
                records, address = (b.word(data, b.add(first, i)) for i in range(2))
                numbers = [b.index(0), records, b.pointer(address)]
                b.call(b.inttoptr(caller, KERNEL.as_pointer()), numbers)
        b.ret_void()


class _Checker(Writer):
    """Writes the function that checks and clears the status of several tables."""

    def write(self) -> None:
        b, data = self.b, self.b.pointer(self.start)
        with b.counted(0, b.word(data, 0)) as at:
            table = b.pointer(b.word(data, b.add(at, 1)))
            status = b.word(table, 0)
            with b.if_then(b.icmp_signed("!=", status, 0)):
                b.store(b.index(0), table)
                b.ret(b.trunc(status, I32))
        b.ret(ir.Constant(I32, 0))

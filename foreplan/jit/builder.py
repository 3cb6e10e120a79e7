"""Instructions of LLVM's intermediate representation, for both compilers: that of functions in Python, and that of
kernels (`foreplan.runtime.cpu.codegen`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import llvmlite.ir as ir
import numpy as np

BIT, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
HALF, FLOAT, DOUBLE, POINTER = ir.HalfType(), ir.FloatType(), ir.DoubleType(), ir.PointerType()
# What is called from outside: a function of (start, stop, table) that works on [start, stop) of what the table, of
# int64, describes; and one that returns 0 or an error's number.
KERNEL = ir.FunctionType(ir.VoidType(), [I64, I64, POINTER])
STATUS = ir.FunctionType(I32, [I64, I64, POINTER])
_SUFFIXES = {HALF: "f16", FLOAT: "f32", DOUBLE: "f64"}
# Instructions that take numbers, by the place of the first one among their arguments.
_ARITHMETIC = ("add", "sub", "mul", "sdiv", "udiv", "srem", "urem", "and_", "or_", "xor", "shl", "lshr", "ashr")
_TAKING = dict.fromkeys((*_ARITHMETIC, "fadd", "fsub", "fmul", "fdiv"), 0)
_TAKING |= dict.fromkeys(("icmp_signed", "icmp_unsigned", "fcmp_ordered", "fcmp_unordered", "select"), 1)


def constant(type: ir.Type, number: float) -> ir.Constant:
    """A number as one of a type, rounded to it; in every lane of a vector."""
    if isinstance(type, ir.VectorType):
        return ir.Constant(type, [constant(type.element, number)] * type.count)
    if type == FLOAT:
        with np.errstate(over="ignore"):
            number = float(np.float32(number))
    return ir.Constant(type, number)


def _taking_numbers(name: str, first: int) -> Callable[..., ir.Value]:
    """An instruction of llvmlite's builder of which one operand, from an argument on, may be a number of Python."""
    write = getattr(ir.IRBuilder, name)

    def written(self: Builder, *arguments: Any, **named: Any) -> ir.Value:
        one, other = arguments[first : first + 2]
        if isinstance(one, int | float):
            one = constant(other.type, one)
        elif isinstance(other, int | float):
            other = constant(one.type, other)
        return write(self, *arguments[:first], one, other, *arguments[first + 2 :], **named)

    return written


class Builder(ir.IRBuilder):
    """Where instructions go. In arithmetic, comparisons and choices, a number of Python stands for a constant of the
    type of the other operand. Indices, extents and table entries are int64.
    """

    def gep(self, address: ir.Value, indices: Iterable[ir.Value | int], **named: Any) -> ir.Value:
        """The address of an element."""
        return super().gep(address, [self.index(x) for x in indices], **named)

    def index(self, value: ir.Value | int) -> ir.Value:
        """An index that is known when the code is made, or is one already."""
        return ir.Constant(I64, value) if isinstance(value, int) else value

    def least(self, x: ir.Value, y: ir.Value | int) -> ir.Value:
        """The smaller of two numbers with a sign."""
        return self.select(self.icmp_signed("<", x, y), x, y)

    def blocks(self, extent: ir.Value, each: ir.Value | int) -> ir.Value:
        """How many blocks there are, the last perhaps smaller."""
        return self.sdiv(self.add(extent, each - 1 if isinstance(each, int) else self.sub(each, 1)), each)

    def pointer(self, address: ir.Value) -> ir.Value:
        """A number as an address."""
        return self.inttoptr(address, POINTER)

    def behind(self, address: ir.Value, nbytes: ir.Value | int, *, inbounds: bool = False) -> ir.Value:
        """An address some bytes further; `inbounds`: within the same memory."""
        return self.gep(address, [nbytes], inbounds=inbounds, source_etype=I8)

    def word(self, table: ir.Value, at: ir.Value | int) -> ir.Value:
        """A number of a table."""
        return self.load(self.gep(table, [at], source_etype=I64), typ=I64)

    def local(self, type: ir.Type) -> ir.Value:
        """Memory of the function; llvmlite's pointers to it are typed, unlike others."""
        return self.pointer(self.ptrtoint(self.alloca(type), I64))

    def named(self, name: str, result: ir.Type, *values: ir.Value) -> ir.Value:
        """A call of a function by its name: of LLVM, of the C library, or of this module."""
        found = self.module.globals.get(name)
        if found is None:
            found = ir.Function(self.module, ir.FunctionType(result, [value.type for value in values]), name)
        return self.call(found, values)

    def intrinsic(self, name: str, *values: ir.Value) -> ir.Value:
        """An LLVM intrinsic that is overloaded on the type of its first argument, and gives that type."""
        type = values[0].type
        element = type.element if isinstance(type, ir.VectorType) else type
        suffix = _SUFFIXES.get(element) or f"i{element.width}"
        lanes = f"v{type.count}" if isinstance(type, ir.VectorType) else ""
        return self.named(f"llvm.{name}.{lanes}{suffix}", type, *values)

    def prefetch(self, address: ir.Value, *, write: bool = False) -> None:
        """Let a line of memory come to the first cache, to be read or written soon."""
        hints = (ir.Constant(I32, hint) for hint in (int(write), 3, 1))  # to the nearest cache, as data
        self.named("llvm.prefetch.p0", ir.VoidType(), address, *hints)

    @contextmanager
    def counted(self, start: ir.Value | int, stop: ir.Value, step: int = 1) -> Iterator[ir.Value]:
        """A loop over start, start + step, … while a whole step is left before `stop`."""
        before = self.block
        check, body, after = (self.function.append_basic_block() for _ in range(3))
        self.branch(check)
        self.position_at_end(check)
        index = self.phi(I64)
        index.add_incoming(self.index(start), before)
        following = self.add(index, step, flags=["nsw"])
        self.cbranch(self.icmp_signed("<=", following, stop), body, after)
        self.position_at_end(body)
        yield index
        index.add_incoming(following, self.block)
        self.branch(check)
        self.position_at_end(after)


for _name, _first in _TAKING.items():
    setattr(Builder, _name, _taking_numbers(_name, _first))

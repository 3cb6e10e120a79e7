"""Calls in compiled functions: of one another, and what they have of Python, NumPy and the C library."""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import llvmlite.ir as ir
import numpy as np

from foreplan.jit import library
from foreplan.jit.builder import I32, I64, POINTER, Builder
from foreplan.jit.expressions import Expressions
from foreplan.jit.source import Emitted, Source, source_of
from foreplan.jit.types import FLOAT64, INT64, ArrayType, TupleType, Type
from foreplan.jit.values import (
    Array,
    Fixed,
    Number,
    Tuple,
    Untranslatable,
    Value,
    as_index,
    dtype_of,
    parts_of,
    put_together,
    register,
    taken_apart,
    type_of_value,
)

NO_MEMORY, NO_INDEX = 1, 2  # what a function's status says; 0: all is well
_MODULES = (builtins, np, math)  # whose functions are known by their names
_FLOAT64 = Fixed(FLOAT64)


@dataclass
class Made:
    """A function as translated.

    Attributes:
        result: the type of what it returns; None: nothing.
        may_fail: its first result is a status.
    """

    function: ir.Function
    result: Type | None
    may_fail: bool


class Calls(Expressions):
    """Translates calls.

    Attributes:
        entry: where the memory of variables is made.
        end: the block that ends the function.
        status: where the function's status lies.
        arrays: where the addresses of the arrays that it makes lie.
        line: of the statement at hand.
        checked: end the function with an error where an index is not within its axis.
    """

    entry: Builder
    end: ir.Block
    status: ir.Value
    arrays: list[ir.Value]
    line: int
    checked: bool

    def translated(self, source: Source, types: tuple[Type, ...]) -> Made:
        """Another function, for arguments of some types."""
        raise NotImplementedError

    def as_type(self, value: Value, type: Type, what: str) -> list[ir.Value]:
        """A value as one of a type, taken apart.

        Raises:
            Untranslatable: it may lose something by that.
        """
        if isinstance(type, np.dtype):
            if np.promote_types(dtype_of(value), type) != type and not isinstance(value, Fixed):
                raise Untranslatable(f"{what} has the type {type}, and is given {dtype_of(value)}")
            return [self.number(value, type).value]
        if isinstance(value, Fixed) and isinstance(value.value, tuple):
            value = Tuple(tuple(Fixed(item) for item in value.value))
        if isinstance(value, Tuple) and isinstance(type, TupleType) and len(value.items) == len(type.items):
            return [part for item, kind in zip(value.items, type.items) for part in self.as_type(item, kind, what)]
        if type_of_value(value) != type:
            raise Untranslatable(f"{what} has the type {type}, and is given {type_of_value(value)}")
        return taken_apart(value)

    def called(self, function: Any, arguments: Sequence[Value], named: dict[str, Value]) -> Value:
        """The result of a call of a function, or of a method by its name."""
        if (source := source_of(function)) and not named:
            return self.call(source, *arguments)
        if isinstance(function, Emitted) and not named:
            made: Value = function.emit(self, *arguments)
            return made
        if isinstance(function, type) and issubclass(function, np.generic | int | float):
            if isinstance(arguments[0], Fixed):
                return Fixed(function(arguments[0].value))
            number = self.number(arguments[0], dtype_of(arguments[0]))
            return self.cast(number, INT64 if function is int else np.dtype(function))
        name = function if isinstance(function, str) else getattr(function, "__name__", "")
        known = isinstance(function, str) or any(getattr(each, name, None) is function for each in _MODULES)
        make: Callable[..., Value] | None = getattr(self, f"call_{name}", None)
        if not known or make is None:
            raise Untranslatable(f"a call of {name or function}")
        return make(*arguments, **named)

    def call(self, source: Source, *arguments: Value) -> Value:
        """The result of a call of a compiled function."""
        types = tuple(map(type_of_value, arguments))
        made = self.translated(source, types)
        parts = [part for value, kind in zip(arguments, types) for part in self.as_type(value, kind, "an argument")]
        whole = self.b.call(made.function, parts)
        kinds = ([I32] if made.may_fail else []) + ([] if made.result is None else parts_of(made.result))
        found = [whole] if len(kinds) == 1 else [self.b.extract_value(whole, i) for i in range(len(kinds))]
        if made.may_fail:
            self.fail_if(self.b.icmp_signed("!=", found[0], 0), found[0])
            found = found[1:]
        return Fixed(None) if made.result is None else put_together(made.result, found)

    def fail_if(self, condition: ir.Value, status: ir.Value) -> None:
        """End the function with a status if a condition holds."""
        failed, goes_on = (self.b.function.append_basic_block() for _ in range(2))
        self.b.cbranch(condition, failed, goes_on).set_weights([1, 1 << 20])
        self.b.position_at_end(failed)
        self.b.store(status, self.status)
        self.b.branch(self.end)
        self.b.position_at_end(goes_on)

    def check(self, at: ir.Value, extent: ir.Value) -> None:
        """End the function with an error if an index is not within an axis; only where indices are checked."""
        if self.checked:
            self.fail_if(self.b.icmp_unsigned(">=", at, extent), ir.Constant(I32, NO_INDEX + self.line))

    def new_array(self, dtype: np.dtype[Any], shape: Sequence[ir.Value], *, zero: bool) -> Array:
        """An array that ends with the function."""
        cell = self.entry.alloca(POINTER)
        self.entry.store(ir.Constant(POINTER, None), cell)
        self.arrays.append(cell)
        self.b.named("free", ir.VoidType(), self.b.load(cell))
        count = shape[0]
        for extent in shape[1:]:
            count = self.b.mul(count, extent)
        count = self.b.add(count, 1)  # what has no elements has an address too
        if zero:
            data = self.b.named("calloc", POINTER, count, self.b.index(dtype.itemsize))
        else:
            data = self.b.named("malloc", POINTER, self.b.mul(count, dtype.itemsize))
        self.b.store(data, cell)
        none = self.b.icmp_unsigned("==", self.b.ptrtoint(data, I64), 0)
        self.fail_if(none, ir.Constant(I32, NO_MEMORY))
        return Array(ArrayType(dtype, len(shape), True), data, tuple(shape), (), True)

    def _shape(self, shape: Value) -> list[ir.Value]:
        if isinstance(shape, Fixed) and isinstance(shape.value, tuple):
            return [ir.Constant(I64, extent) for extent in shape.value]
        return [as_index(self, item) for item in (shape.items if isinstance(shape, Tuple) else [shape])]

    def fill(self, array: Array, value: Value) -> None:
        """Set all elements of an array."""
        self.call(library.fill, array, self.number(value, array.type.dtype))

    def call_zeros(self, shape: Value, dtype: Fixed = _FLOAT64) -> Value:
        """`numpy.zeros`."""
        return self.new_array(np.dtype(dtype.value), self._shape(shape), zero=True)

    def call_empty(self, shape: Value, dtype: Fixed = _FLOAT64) -> Array:
        """`numpy.empty`."""
        return self.new_array(np.dtype(dtype.value), self._shape(shape), zero=False)

    def call_ones(self, shape: Value, dtype: Fixed = _FLOAT64) -> Value:
        """`numpy.ones`."""
        return self.call_full(shape, Fixed(1), dtype)

    def call_full(self, shape: Value, value: Value, dtype: Fixed | None = None) -> Value:
        """`numpy.full`."""
        made = self.call_empty(shape, dtype or Fixed(dtype_of(value)))
        self.fill(made, value)
        return made

    def call_copy(self, array: Array) -> Value:
        """A method of arrays."""
        made = self.new_array(array.type.dtype, array.shape, zero=False)
        self.call(library.copy, array, made)
        return made

    def call_argsort(self, keys: Array, kind: Value) -> Value:
        """`numpy.argsort`, the stable one."""
        if kind != Fixed("stable"):
            raise Untranslatable("argsort, but the stable one")
        order, spare = (self.new_array(INT64, keys.shape, zero=False) for _ in range(2))
        self.call(library.argsort, keys, order, spare)
        return order

    def call_argmax(self, array: Value) -> Value:
        """`numpy.argmax`."""
        return self.call(library.argmax, array)

    def call_len(self, value: Value) -> Value:
        """The builtin."""
        if isinstance(value, Array):
            return Number(INT64, value.shape[0])
        if isinstance(value, Tuple):
            return Fixed(len(value.items))
        raise Untranslatable("the length of what has none")

    def call_abs(self, value: Value) -> Value:
        """The builtin."""
        dtype = dtype_of(value)
        if dtype.kind == "f":
            return self._of_float("fabs", value)
        return self.extreme(">", [value, self.negated(value)])

    def call_min(self, *values: Value) -> Value:
        """The builtin, and a method of arrays."""
        return self.extreme("<", values) if len(values) > 1 else self.call(library.smallest, *values)

    def call_max(self, *values: Value) -> Value:
        """The builtin, and a method of arrays."""
        return self.extreme(">", values) if len(values) > 1 else self.call(library.largest, *values)

    def call_view(self, number: Value, dtype: Fixed) -> Value:
        """A method of NumPy's scalars: the same bits as another type."""
        given, wanted = self.number(number, dtype_of(number)), np.dtype(dtype.value)
        return Number(wanted, self.b.bitcast(given.value, register(wanted)))

    def call_sqrt(self, value: Value) -> Value:
        """`numpy.sqrt` and `math.sqrt`."""
        return self._of_float("sqrt", value)

    def call_exp(self, value: Value) -> Value:
        """`numpy.exp` and `math.exp`."""
        return self._of_float("exp", value)

    def call_log(self, value: Value) -> Value:
        """`numpy.log` and `math.log`."""
        return self._of_float("log", value)

    def _of_float(self, name: str, value: Value) -> Value:
        dtype = dtype_of(value) if dtype_of(value).kind == "f" else FLOAT64
        x = self.number(value, dtype).value
        return Number(dtype, self.b.intrinsic(name, x))

    def call_erf(self, value: Value) -> Value:
        """`math.erf`, by the C library."""
        dtype = dtype_of(value)
        name = "erf" if dtype == FLOAT64 else "erff"
        return Number(dtype, self.b.named(name, register(dtype), self.number(value, dtype).value))

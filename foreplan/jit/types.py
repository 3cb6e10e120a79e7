"""The types of compiled functions: numbers, arrays, tuples, records, and None.

A number's type is its NumPy dtype. A record is a named tuple. What a function is called with decides its types, and is
handed over in a table: one int64 for each number, and for an array its address, its shape and, unless it is dense, its
strides in bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

BOOL, INT64, UINT64, FLOAT32, FLOAT64 = (np.dtype(x) for x in (np.bool_, np.int64, np.uint64, np.float32, np.float64))


@dataclass(frozen=True)
class ArrayType:
    """Of an array.

    Attributes:
        dtype: of its elements.
        ndim: how many axes it has, at least one.
        dense: in C order, without gaps.
    """

    dtype: np.dtype[Any]
    ndim: int
    dense: bool


@dataclass(frozen=True)
class TupleType:
    """Of a tuple; `names` are those of a record's fields, else empty."""

    items: tuple[Type, ...]
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class NoneType:
    """Of None: a branch that asks for it is decided when a function is compiled."""


Type = np.dtype[Any] | ArrayType | TupleType | NoneType


def type_of(value: Any) -> Type:
    """The type of a Python value.

    Raises:
        TypeError: compiled functions take no such value.
    """
    kind: Any = type(value)
    return _taken(kind)[0](value)


def written(value: Any, words: list[int]) -> None:
    """Append a Python value to a table.

    Raises:
        OverflowError: an integer is too large for int64.
    """
    kind: Any = type(value)
    _taken(kind)[1](value, words)


def word_count(type: Type) -> int:
    """How many numbers of a table a value takes."""
    if isinstance(type, ArrayType):
        return 1 + type.ndim * (1 if type.dense else 2)
    return sum(map(word_count, type.items)) if isinstance(type, TupleType) else int(isinstance(type, np.dtype))


@cache
def _taken(kind: Any) -> tuple[Callable[[Any], Type], Callable[[Any, list[int]], None]]:
    """How values of a Python type are typed, and how they are written."""
    if issubclass(kind, np.ndarray):
        return _type_of_array, _write_array
    if issubclass(kind, tuple):
        return _type_of_tuple, _write_tuple
    if kind is type(None):
        return lambda _: NoneType(), lambda _value, _words: None
    if issubclass(kind, bool | int | float | np.generic):
        dtype = np.dtype(INT64 if issubclass(kind, int) and kind is not bool else kind)
        if dtype.kind in "biuf":
            return lambda _: dtype, (_write_integer if dtype.kind in "bi" else _write_bits)
    raise TypeError(f"compiled functions take no {kind.__name__}")


def _type_of_array(array: np.ndarray) -> Type:
    return ArrayType(array.dtype, array.ndim, array.flags.c_contiguous)


def _type_of_tuple(values: tuple[Any, ...]) -> Type:
    return TupleType(tuple(map(type_of, values)), getattr(values, "_fields", ()))


def _write_array(array: np.ndarray, words: list[int]) -> None:
    words.append(array.__array_interface__["data"][0])
    words.extend(array.shape)
    if not array.flags.c_contiguous:
        words.extend(array.strides)


def _write_tuple(values: tuple[Any, ...], words: list[int]) -> None:
    for value in values:
        written(value, words)


def _write_integer(value: int, words: list[int]) -> None:
    words.append(int(value))


def _write_bits(value: Any, words: list[int]) -> None:
    wide = np.array(value, f"{np.dtype(type(value)).kind}{np.dtype(type(value)).itemsize}")
    words.append(int(wide.view(f"i{wide.itemsize}")))


def python_value(bits: int, dtype: np.dtype[Any]) -> Any:
    """A number from its bits in a table: Python's own where there is one with this type."""
    if dtype == INT64:
        return bits
    if dtype == BOOL:
        return bool(bits)
    number = np.array(bits, np.int64).view(FLOAT64 if dtype == FLOAT64 else UINT64)
    if dtype in (FLOAT64, UINT64):
        return float(number) if dtype == FLOAT64 else np.uint64(number)
    return np.array(bits, np.int64).astype(f"i{dtype.itemsize}").view(dtype)[()]

"""The types of compiled functions: numbers, arrays, tuples, records, and None.

A number's type is its NumPy dtype. A record is a named tuple. What a function is called with decides its types, and is
handed over in a table: one int64 for each number, and for an array its address, its shape and, unless it is dense, its
strides in bytes.
"""

from __future__ import annotations

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
    if isinstance(value, np.ndarray):
        return ArrayType(value.dtype, value.ndim, value.flags.c_contiguous)
    if isinstance(value, tuple):
        return TupleType(tuple(map(type_of, value)), getattr(value, "_fields", ()))
    if value is None:
        return NoneType()
    kind: Any = type(value)
    return _dtype_of(kind)


def written(value: Any, words: list[int], kinds: list[Any]) -> None:
    """Append a Python value to a table, and what its type follows from to `kinds`; equal kinds are equal types.

    Raises:
        TypeError: compiled functions take no such value.
    """
    kind: Any = type(value)
    kinds.append(kind)
    if kind is np.ndarray or isinstance(value, np.ndarray):
        told = value.__array_interface__
        shape, strides = told["shape"], told["strides"]
        words.append(told["data"][0])
        words.extend(shape)
        if strides is not None:
            words.extend(strides)
        kinds.append((told["typestr"], len(shape), strides is None))
    elif isinstance(value, tuple):
        kinds.append(len(value))
        for item in value:
            written(item, words, kinds)
    elif kind is int or kind is bool:
        words.append(int(value))
    elif value is not None:
        words.append(_bits(value, _dtype_of(kind)))


def word_count(type: Type) -> int:
    """How many numbers of a table a value takes."""
    if isinstance(type, ArrayType):
        return 1 + type.ndim * (1 if type.dense else 2)
    return sum(map(word_count, type.items)) if isinstance(type, TupleType) else int(isinstance(type, np.dtype))


@cache
def _dtype_of(kind: Any) -> np.dtype[Any]:
    """The type of numbers of a Python type."""
    if issubclass(kind, bool | int | float | np.generic):
        dtype = np.dtype(INT64 if issubclass(kind, int) and kind is not bool else kind)
        if dtype.kind in "biuf":
            return dtype
    raise TypeError(f"compiled functions take no {kind.__name__}")


def _bits(value: Any, dtype: np.dtype[Any]) -> int:
    """A number as a table has it."""
    if dtype.kind in "bi":
        return int(value)
    return int(np.array(value, dtype).view(f"i{dtype.itemsize}"))


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

"""Elements of rows in compiled loops: float32 as it is, bfloat16 as the upper half of a float32's bits.

    out[k] = as_in(out, number(row[k]) * 2)     # each row of either type

NumPy has no bfloat16: loops take arrays of it as integers of sixteen bits (`bits`). They compute in float32.
Results are rounded to nearest, ties to even; NaN stays. For float32, both conversions do nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from foreplan import jit
from foreplan.graph import Window
from foreplan.graph.types import DTYPES, FLOAT32
from foreplan.jit.builder import Builder
from foreplan.jit.values import Array, Instructions, Number, Value
from foreplan.ops.blocks import Piece
from foreplan.runtime.cpu.codegen.conversions import loaded, rounded, stored
from foreplan.runtime.cpu.codegen.jit import inlined, looped
from foreplan.runtime.cpu.codegen.lanes import Lanes
from foreplan.runtime.kernel import Refused

BFLOAT16 = DTYPES["bfloat16"]
NAMES = ("float32", BFLOAT16.name)
_FLOAT, _BITS = np.dtype(np.float32), np.dtype(np.uint16)


def bits(array: np.ndarray) -> np.ndarray:
    """An array of bfloat16 as integers, which NumPy can move and compiled loops can take; others as they are."""
    return array.view(np.uint16) if array.dtype.name == BFLOAT16.name else array


def check_elements(*windows: Window) -> None:
    """Raise unless loops compute with such elements.

    Raises:
        Refused: there is another type among them.
    """
    for window in windows:
        if window.type.dtype.name not in NAMES:
            raise Refused(f"elements of {window.type}")


def check_float(*windows: Window) -> None:
    """Raise unless all are float32, like statistics, parameters and sums beside narrow images.

    Raises:
        Refused: there is another type among them.
    """
    for window in windows:
        if window.type.dtype != FLOAT32:
            raise Refused(f"{window.type} where only float32 is taken")


def _with_wide_vectors(b: Builder) -> Lanes:
    """Instructions in a function that LLVM shall vectorise with 512 bits, if there are such registers. On some
    processors LLVM prefers 256 bits, which makes conversions slow. llvmlite knows no attributes with values.
    """
    set.add(b.function.attributes, '"prefer-vector-width"="512"')
    return Lanes(b)


@jit.Emitted
def _number(e: Instructions, x: Value) -> Value:
    """An element as float32."""
    if isinstance(x, Number) and x.dtype == _BITS:
        return Number(_FLOAT, loaded(_with_wide_vectors(e.b), x.value, BFLOAT16))
    return e.number(x, _FLOAT)


@jit.Emitted
def _as_in(e: Instructions, row: Value, x: Value) -> Value:
    """A float32 value as an element of a row."""
    assert isinstance(row, Array)
    value = e.number(x, _FLOAT)
    if row.type.dtype != _BITS:
        return value
    wide = _with_wide_vectors(e.b)
    return Number(_BITS, stored(wide, rounded(wide, value.value, BFLOAT16), BFLOAT16))


number: Any = _number
as_in: Any = _as_in


@inlined
def room(row, line):  # type: ignore[no-untyped-def]
    """The place for a row's float32 values: the row itself if it is of float32, else scratch memory."""
    if row.dtype == np.uint16:
        return line[: len(row)]
    return row


@inlined
def settled(row, made):  # type: ignore[no-untyped-def]
    """Write float32 values to a row; a row of float32 has them already."""
    if row.dtype == np.uint16:
        written(made, row)


def lines(window: Window, width: int, threads: int) -> Piece:
    """Scratch memory for `room`: a line a thread, empty if none is needed."""
    return (threads, 0 if window.type.dtype == FLOAT32 else width), np.dtype(np.float32)


@looped
def written(line, row):  # type: ignore[no-untyped-def]
    """Float32 values as the elements of a row."""
    for k in range(len(row)):
        row[k] = as_in(row, line[k])

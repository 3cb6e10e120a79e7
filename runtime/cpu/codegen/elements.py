"""Elements of rows in loops that Numba compiles: float32 as it is, bfloat16 as the upper half of a float32's bits.

    out[k] = as_in(out, number(row[k]) * 2)     # each row of either type

Numba and NumPy have no bfloat16: loops take arrays of it as integers of sixteen bits (`bits`). They compute in float32.
Results are rounded to nearest, ties to even; NaN stays. For float32, both conversions do nothing.
"""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir
import numpy as np
from numba import float32, types
from numba.extending import intrinsic, overload

from foreplan import jit
from foreplan.graph import Window
from foreplan.graph.types import DTYPES, FLOAT32
from foreplan.ops.blocks import Piece
from foreplan.runtime.cpu.codegen.conversions import loaded, rounded, stored
from foreplan.runtime.cpu.codegen.lanes import Lanes
from foreplan.runtime.kernel import Refused

BFLOAT16 = DTYPES["bfloat16"]
NAMES = ("float32", BFLOAT16.name)


def bits(array: np.ndarray) -> np.ndarray:
    """An array of bfloat16 as integers, which NumPy can move and Numba can take; others as they are."""
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


def _with_wide_vectors(b: ir.IRBuilder) -> Lanes:
    """Instructions in a function that LLVM shall vectorise with 512 bits, if there are such registers. On some
    processors LLVM prefers 256 bits, which makes conversions slow. llvmlite knows no attributes with values.
    """
    set.add(b.function.attributes, '"prefer-vector-width"="512"')
    return Lanes(b)


@intrinsic
def _number(typing_context, x):  # type: ignore[no-untyped-def]
    """An element as float32."""
    if x == types.uint16:
        return float32(x), lambda context, b, signature, args: loaded(_with_wide_vectors(b), args[0], BFLOAT16)
    return float32(float32), lambda context, b, signature, args: args[0]


@intrinsic
def _as_in(typing_context, row, x):  # type: ignore[no-untyped-def]
    """A float32 value as an element of a row."""
    if row.dtype != types.uint16:
        return float32(row, float32), lambda context, b, signature, args: args[1]

    def nearest(context, b, signature, args):  # type: ignore[no-untyped-def]
        e = _with_wide_vectors(b)
        return stored(e, rounded(e, args[1], BFLOAT16), BFLOAT16)

    return types.uint16(row, float32), nearest


number: Any = _number
as_in: Any = _as_in


def room(row: np.ndarray, line: np.ndarray) -> np.ndarray:
    """The place for a row's float32 values: the row itself if it is of float32, else scratch memory."""
    raise NotImplementedError("compiled loops alone call it")


def settled(row: np.ndarray, made: np.ndarray) -> None:
    """Write float32 values to a row; a row of float32 has them already."""
    raise NotImplementedError("compiled loops alone call it")


@overload(room)
def _room(row, line):  # type: ignore[no-untyped-def]
    if row.dtype == types.uint16:
        return lambda row, line: line[: len(row)]
    return lambda row, line: row


@overload(settled)
def _settled(row, made):  # type: ignore[no-untyped-def]
    if row.dtype == types.uint16:
        return lambda row, made: written(made, row)
    return lambda row, made: None


def lines(window: Window, width: int, threads: int) -> Piece:
    """Scratch memory for `room`: a line a thread, empty if none is needed."""
    return (threads, 0 if window.type.dtype == FLOAT32 else width), np.dtype(np.float32)


@jit.compiled(nogil=True)
def written(line, row):  # type: ignore[no-untyped-def]
    """Float32 values as the elements of a row."""
    for k in range(len(row)):
        row[k] = as_in(row, line[k])

"""Elements that are only stored: float8, float4, and integers of four and two bits, from numbers and back.

A tensor of such a type holds codes, one in a byte. `decoded` gives their numbers, and `encoded` the codes of numbers,
by ops that every engine has. `unpacked` takes codes apart that lie together in a byte, as files have them.

Sources: P. Micikevicius et al., "FP8 Formats for Deep Learning", 2022; the OCP Microscaling Formats specification,
2023; ONNX's pages "Float stored in 8 bits" and "4 bit integer types", for saturation and rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np

from foreplan.base.errors import ShapeError
from foreplan.graph import Array, Builder, DType, TensorType, Value, View, register
from foreplan.graph.op import Arrays, Types, coerce_dtype
from foreplan.graph.types import DTYPES, FLOAT32, FLOAT64, INT32, INT64, Shape
from foreplan.graph.value import Kind
from foreplan.ops.expr import Arg, Expr, call, cast, where
from foreplan.ops.index import gather
from foreplan.ops.join import concat
from foreplan.ops.map import convert, elementwise, elementwise_many
from foreplan.ops.shape import ViewOp, reshape, slice_axis

BYTE, INT8 = DTYPES["uint8"], DTYPES["int8"]
# From which fraction on, in units of float32's last place, a power of two is the next one: of any, and of the least.
ROUNDINGS = {"up": (1, (1 << 22) + 1), "down": (1 << 23, 1 << 23), "nearest": (1 << 22, 3 << 21)}
BITS = {"float4_e2m1fn": 4, "int4": 4, "uint4": 4, "int2": 2, "uint2": 2}  # of the types of which a byte holds several


@register
@dataclass(frozen=True)
class Bitcast(ViewOp):
    """The same bytes read as another element type of the same size.

    Attributes:
        dtype: the new element type.
    """

    name: ClassVar[str] = "bitcast"
    keeps_precision: ClassVar[bool] = False
    dtype: DType

    def __post_init__(self) -> None:
        coerce_dtype(self, "dtype")

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """The same shape."""
        self.check_count(inputs, 1)
        new = self.dtype
        if not alike(inputs[0].dtype, new):
            raise ShapeError(f"the bytes of {inputs[0]} are not those of {new} elements")
        return (inputs[0].with_dtype(new),)

    def view(self, input: TensorType, strides: tuple[int, ...]) -> View:
        """The same window."""
        return View(0, strides)

    def compute(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray) -> None:
        """Copy."""
        np.copyto(outputs[0], inputs[0].view(outputs[0].dtype))


def alike(old: DType, new: DType) -> bool:
    """Whether the bytes of an element of one type are those of one of another type, whatever they are."""
    return old == new or (old.itemsize == new.itemsize and "bool" not in (old.name, new.name))


def bitcast(b: Builder, x: Value, dtype: DType) -> Value:
    """The same bytes as another element type of the same size; `x` itself if it has that type."""
    return x if x.dtype == dtype else b.apply(Bitcast(dtype), x)


def packed_extent(dtype: DType, size: int) -> int:
    """Bytes of that many codes where a byte holds as many as it can."""
    return -(-size * BITS.get(dtype.name, 8) // 8)


def decoded(b: Builder, x: Value) -> Value:
    """The numbers of stored elements: float32 for float8 and float4, int8 or uint8 for integers; others as they are."""
    if not x.dtype.is_storage:
        return x
    codes = bitcast(b, x, BYTE)
    if x.dtype.name in _INTEGERS:
        low, high = _INTEGERS[x.dtype.name]
        count = high - low + 1
        number: Expr = call("bitand", Arg(0), count - 1)
        if low < 0:
            number = cast(number, INT8)
            number = where(number > high, number - count, number)
        return elementwise(b, number, codes)
    table = _table(x.dtype)
    numbers = b.store(f"{x.dtype}.numbers", TensorType(FLOAT32, table.shape), Kind.CONSTANT, Array(table))
    index = elementwise(b, call("bitand", cast(Arg(0), INT32), table.size - 1), codes)
    return gather(b, numbers, index, 0)


def encoded(b: Builder, x: Value, dtype: DType, saturate: bool = True, rounding: str = "up") -> Value:
    """Numbers as stored elements: floats rounded to the nearest, ties to even.

    Args:
        b: where nodes are added.
        x: numbers, or stored elements of another type.
        dtype: a storage type. Integers keep the lowest bits of numbers beyond their range.
        saturate: whether floats beyond the largest number become it, as against infinity or NaN.
        rounding: of float8_e8m0fnu, which holds powers of two and no sign: `up`, `down` or `nearest`.
    """
    if x.dtype == dtype:
        return x
    x = decoded(b, x)
    if dtype.name in _INTEGERS:
        low, high = _INTEGERS[dtype.name]
        codes = elementwise(b, call("bitand", cast(Arg(0), INT32), high - low), x, dtype=BYTE)
    else:
        is_power = dtype.name == "float8_e8m0fnu"
        wide = convert(b, x, FLOAT64 if x.dtype == FLOAT64 and not is_power else FLOAT32)
        codes = _power(b, wide, saturate, rounding) if is_power else _code(b, wide, dtype, saturate)
    return bitcast(b, codes, dtype)


def unpacked(b: Builder, packed: Value, dtype: DType, shape: Shape) -> Value:
    """Stored elements from bytes that hold several codes each, the first in the lowest bits."""
    bits = BITS[dtype.name]
    size = int(np.prod(shape, dtype=np.int64))
    parts = [call("bitand", call("shiftright", Arg(0), at), (1 << bits) - 1) for at in range(0, 8, bits)]
    columns = [reshape(b, part, (*part.shape, 1)) for part in elementwise_many(b, parts, packed)]
    codes = reshape(b, concat(b, columns, 1), (packed.type.size * len(parts),))
    codes = codes if codes.type.size == size else slice_axis(b, codes, 0, 0, size)
    return bitcast(b, reshape(b, codes, shape), dtype)


_INTEGERS = {"int4": (-8, 7), "uint4": (0, 15), "int2": (-2, 1), "uint2": (0, 3)}


@lru_cache
def _table(dtype: DType) -> np.ndarray:
    """The number of each code."""
    codes = np.arange(1 << BITS.get(dtype.name, 8), dtype=np.uint8)
    return codes.view(dtype.numpy).astype(np.float32)


def limits(dtype: DType) -> tuple[float, float]:
    """The least and the largest number of a storage type."""
    if dtype.name in _INTEGERS:
        return _INTEGERS[dtype.name]
    finite = _table(dtype)[np.isfinite(_table(dtype))]
    return float(finite.min()), float(finite.max())


def _code(b: Builder, x: Value, dtype: DType, saturate: bool) -> Value:
    """The codes of float32 or float64 numbers, uint8.

    Codes of positive numbers are in order: a number's exponent, which is read from its bits, says how far apart its
    neighbours are, and the number of such steps is rounded.
    """
    import ml_dtypes

    table, format = _table(dtype), ml_dtypes.finfo(dtype.numpy)
    top = int(np.nanargmax(np.where(np.isfinite(table), table, np.nan)))
    sign, fraction = table.size // 2, int(format.nmant)
    width, bias, integer = (23, 127, INT32) if x.dtype == FLOAT32 else (52, 1023, INT64)
    least, most = bias + int(format.minexp), bias + int(format.maxexp) + 1
    bits = bitcast(b, x, integer)
    power = call("min", call("max", call("bitand", call("shiftright", Arg(0), width), 2 * bias + 1), least), most)
    scale = bitcast(b, elementwise(b, call("shiftleft", 2 * bias + fraction - power, width), bits), x.dtype)
    code = cast(power - least, x.dtype) * float(1 << fraction) + call("round", call("abs", Arg(1)) * Arg(2))
    nan = float(np.flatnonzero(np.isnan(table))[0]) if np.isnan(table).any() else float(sign)  # -0, as in ml_dtypes
    if saturate or not np.isnan(table).any():
        code = call("min", code, float(top))
    elif table[sign] == 0:
        code = call("min", code, float(top + 1))  # infinity, or NaN where there is none
    else:
        code = where(code > float(top), nan, code)
    marked = code + where(Arg(0) < 0, float(sign), 0.0)
    if table[sign] != 0:  # there is no negative zero, but one NaN in its place
        marked = where(call("or", call("eq", code, 0.0), call("eq", code, nan)), code, marked)
    return elementwise(b, where(call("isnan", Arg(1)), nan, marked), bits, x, scale, dtype=BYTE)


def _power(b: Builder, x: Value, saturate: bool, rounding: str) -> Value:
    """The codes of powers of two near the sizes of float32 numbers, uint8: a code is the exponent's bits."""
    normal, small = ROUNDINGS[rounding]
    exponent = call("bitand", call("shiftright", Arg(0), 23), 255)
    rest = call("bitand", Arg(0), (1 << 23) - 1)
    up = where(call("eq", exponent, 0), rest >= small, rest >= normal)
    code = exponent + where(up, 1, 0)
    code = where(call("eq", exponent, 255), 255, call("min", code, 254) if saturate else code)
    return elementwise(b, code, bitcast(b, x, INT32), dtype=BYTE)

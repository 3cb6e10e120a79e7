"""ONNX's quantisation: to and from integers and float8, and products of quantised tensors.

A product of integers is computed exactly: in float32 where its sums have 24 bits at most, else in float64.
"""

from __future__ import annotations

import math

import numpy as np

from foreplan.frontend.onnx.node import OnnxNode, Operand, translates
from foreplan.frontend.onnx.ops.nn import convolution, product
from foreplan.frontend.onnx.tensors import Constant, dtype_of
from foreplan.graph import DType, Value, as_dtype
from foreplan.graph.types import FLOAT32, FLOAT64, INT32, Shape
from foreplan.ops.expr import Expr, call, cast, clip
from foreplan.ops.fake_quantised import within
from foreplan.ops.map import convert, elementwise
from foreplan.ops.marks import Quantised, StraightThrough
from foreplan.ops.shape import broadcast_to, reshape
from foreplan.ops.storage import decoded, encoded, limits

_LARGEST = 255 * 255  # of a product of two differences of bytes


@translates("DequantizeLinear")
def _dequantize(n: OnnxNode) -> Operand:
    dtype = n.type(1).dtype
    if n.integer("output_dtype", 0):
        dtype = as_dtype(dtype_of(n.integer("output_dtype"), n.where))
    beside = [_beside(n, i) for i in (1, 2) if n.has(i)]
    values = [decoded(n.b, n.value(0)), *beside]

    def restore(x: Expr, scale: Expr, *zero: Expr) -> Expr:
        number = cast(x, "float32") - cast(zero[0], "float32") if zero else cast(x, "float32")
        return number * cast(scale, "float32")

    restored = elementwise(n.b, restore, *values, dtype=dtype)
    codes, exact = n.operand(0), n.floats.get(n.input_names[0]) if n.input_names else None
    if isinstance(codes, Constant) and codes.trained:
        return n.b.apply(Quantised(), restored, *values)
    if exact is None or exact.type != restored.type:
        return restored
    passes = elementwise(n.b, within(n.type(0).dtype), exact, *beside)
    return n.b.apply(StraightThrough(), restored, passes)


@translates("QuantizeLinear")
def _quantize(n: OnnxNode) -> Operand:
    if n.has(2):
        dtype = n.type(2).dtype
    else:
        dtype = as_dtype(dtype_of(n.integer("output_dtype", 0) or 2, n.where))
    zero = _beside(n, 2) if n.has(2) else None
    n.floats[n.output_names[0]] = n.value(0)
    number = elementwise(n.b, lambda x, scale: cast(x, "float32") / cast(scale, "float32"), n.value(0), _beside(n, 1))
    return _quantised(n, number, zero, dtype)


def _beside(n: OnnxNode, index: int) -> Value:
    """A scale or zero point that broadcasts to input 0: one number, or one for each entry or block of an axis."""
    shape = n.shape(0)
    found = decoded(n.b, n.value(index))
    if found.type.size == 1:
        return reshape(n.b, found, ())
    axis, block = n.axis(n.integer("axis", 1), len(shape)), n.integer("block_size", 0)
    if len(found.shape) == 1:
        return reshape(n.b, found, [-1 if i == axis else 1 for i in range(len(shape))])
    if not block or len(found.shape) != len(shape) or found.shape[axis] * block != shape[axis]:
        raise n.misshapen(f"scales {n.type(index)} in blocks of {block} do not fit {n.type(0)}")
    apart: Shape = (*found.shape[: axis + 1], 1, *found.shape[axis + 1 :])
    spread: Shape = (*found.shape[: axis + 1], block, *found.shape[axis + 1 :])
    return reshape(n.b, broadcast_to(n.b, reshape(n.b, found, apart), spread), shape)


def _quantised(n: OnnxNode, number: Value, zero: Value | None, dtype: DType) -> Value:
    """A tensor that is divided by its scale, rounded to an integer, or to the nearest float8, around a zero point."""
    given = [number] if zero is None else [number, zero]
    if dtype.name.startswith(("float8", "float4")):
        moved = elementwise(n.b, lambda x, *zero: x + cast(zero[0], "float32") if zero else x, *given)
        return encoded(n.b, moved, dtype, bool(n.integer("saturate", 1)))
    if dtype.is_float:
        raise n.fail(f"its zero point is {dtype}, and must be an integer or float8")
    info = np.iinfo(dtype.numpy) if not dtype.is_storage else None
    low, high = limits(dtype) if info is None else (float(info.min), float(info.max))

    def rounded(x: Expr, *zero: Expr) -> Expr:
        whole = call("round", x)
        return clip(whole + cast(zero[0], "float32") if zero else whole, low, high)

    whole = elementwise(n.b, rounded, *given, dtype=INT32 if dtype.is_storage else dtype)
    return encoded(n.b, whole, dtype) if dtype.is_storage else whole


# Products of quantised tensors. Of a product's two operands, `rows` and `columns` are what a scale or zero point with
# one number for each entry of an axis broadcasts along.


def _centred(n: OnnxNode, index: int, zero: int, dtype: DType, shape: Shape) -> Value:
    """An operand without its zero point, as floats; where this has several numbers, they take the given shape."""
    x = decoded(n.b, n.value(index))
    if not n.has(zero):
        return convert(n.b, x, dtype)
    point = _numbers(n, zero, shape)
    return elementwise(n.b, lambda x, z: cast(x, dtype) - cast(z, dtype), x, point)


def _numbers(n: OnnxNode, index: int, shape: Shape) -> Value:
    """A scale or zero point: one number, or a vector in the given shape, or as it is."""
    found = decoded(n.b, n.value(index))
    if found.type.size == 1:
        return reshape(n.b, found, ())
    return reshape(n.b, found, shape) if len(found.shape) == 1 else found


def exact(terms: int) -> DType:
    """The type in which sums of that many products are exact."""
    return FLOAT32 if terms * _LARGEST <= 1 << 24 else FLOAT64


def _rows(n: OnnxNode, index: int) -> Shape:
    """The shape of one number for each row of an operand of a matrix product."""
    return (-1, 1) if len(n.shape(index)) > 1 else (-1,)


@translates("MatMulInteger")
def _matmul_integer(n: OnnxNode) -> Operand:
    dtype = exact(n.shape(0)[-1])
    a, b = _centred(n, 0, 2, dtype, _rows(n, 0)), _centred(n, 1, 3, dtype, (-1,))
    return convert(n.b, product(n, a, b), INT32)


@translates("QLinearMatMul")
def _qlinear_matmul(n: OnnxNode) -> Operand:
    dtype = exact(n.shape(0)[-1])
    a, b = _centred(n, 0, 2, dtype, _rows(n, 0)), _centred(n, 3, 5, dtype, (-1,))
    scales = [_numbers(n, 1, _rows(n, 0)), _numbers(n, 4, (-1,)), _numbers(n, 6, _rows(n, 0))]
    number = elementwise(n.b, _rescaled, product(n, a, b), *scales)
    return _quantised(n, number, _numbers(n, 7, _rows(n, 0)), n.type(7).dtype)


def _rescaled(y: Expr, a: Expr, b: Expr, scale: Expr) -> Expr:
    y, a, b, scale = (cast(each, "float32") for each in (y, a, b, scale))
    return y * (a * b / scale)


@translates("ConvInteger")
def _conv_integer(n: OnnxNode) -> Operand:
    dtype = exact(math.prod(n.shape(1)[1:]))
    each = (-1, *(1,) * (len(n.shape(1)) - 1))
    x, w = _centred(n, 0, 2, dtype, ()), _centred(n, 1, 3, dtype, each)
    return convert(n.b, convolution(n, x, w), INT32)


@translates("QLinearConv")
def _qlinear_conv(n: OnnxNode) -> Operand:
    dtype, rank = exact(math.prod(n.shape(3)[1:])), len(n.shape(0))
    x, w = _centred(n, 0, 2, dtype, ()), _centred(n, 3, 5, dtype, (-1, *(1,) * (rank - 1)))
    y = convolution(n, x, w)
    channels = (-1, *(1,) * (rank - 2))
    if n.has(8):
        y = elementwise(n.b, lambda y, bias: y + cast(bias, dtype), y, reshape(n.b, n.value(8), channels))
    number = elementwise(n.b, _rescaled, y, _numbers(n, 1, ()), _numbers(n, 4, channels), _numbers(n, 6, ()))
    return _quantised(n, number, _numbers(n, 7, ()), n.type(7).dtype)

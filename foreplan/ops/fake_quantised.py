"""Fake quantisation: what integers give, with the gradient of the number that was rounded.

Jacob and others, "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference", 2018,
arXiv:1712.05877. A number whose integer would lie outside of the type's range has no gradient, as in PyTorch's
`fake_quantize_per_channel_affine`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from foreplan.graph import Builder, DType, Value
from foreplan.ops.expr import Expr, call, cast, clip, where
from foreplan.ops.map import elementwise
from foreplan.ops.marks import StraightThrough
from foreplan.ops.storage import limits


def range_of(dtype: DType) -> tuple[float, float]:
    """The least and the largest number of a type that tensors are quantised to."""
    if dtype.is_float or dtype.is_storage:
        return limits(dtype)
    info = np.iinfo(dtype.numpy)
    return float(info.min), float(info.max)


def within(dtype: DType) -> Callable[..., Expr]:
    """Of x, its scale and perhaps its zero point: x where its integer lies in the type's range, else 0."""
    low, high = range_of(dtype)

    def passed(x: Expr, scale: Expr, *zero: Expr) -> Expr:
        whole = _whole(x, scale, *zero)
        return where(call("and", whole >= low, whole <= high), x, 0.0)

    return passed


def fake_quantised(b: Builder, x: Value, scale: Value, zero: Value | None, codes: DType) -> Value:
    """x, rounded to what the integers of a type give."""
    low, high = range_of(codes)
    beside = (scale,) if zero is None else (scale, zero)

    def rounded(x: Expr, scale: Expr, *zero: Expr) -> Expr:
        whole = clip(_whole(x, scale, *zero), low, high)
        return (whole - cast(zero[0], "float32") if zero else whole) * cast(scale, "float32")

    result = elementwise(b, rounded, x, *beside, dtype=x.dtype)
    return b.apply(StraightThrough(), result, elementwise(b, within(codes), x, *beside))


def _whole(x: Expr, scale: Expr, *zero: Expr) -> Expr:
    whole = call("round", cast(x, "float32") / cast(scale, "float32"))
    return whole + cast(zero[0], "float32") if zero else whole

"""NumPy's functions that leave NaN out, or ask about elements that are no ordinary numbers, on traced tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from numbers import Real
from typing import Any

import numpy as np

from foreplan.frontend.tracing.dispatch import traced
from foreplan.frontend.tracing.elementwise import apply, convert, select
from foreplan.frontend.tracing.tensor import Axes, Tensor, as_tensor, common_float
from foreplan.frontend.tracing.tracer import fail
from foreplan.ops import expr as ex
from foreplan.ops.expr import Expr, call

_numpy: Any = np  # whose stubs know arrays only


def _without(x: Tensor, instead: float) -> Any:
    """The tensor with another number for each NaN."""
    return select(_numpy.isnan(x), instead, x) if x.value.dtype.is_float else x


def _count(x: Tensor, axis: Axes, keepdims: bool) -> Any:
    """How many elements along axes are not NaN, in the tensor's own type."""
    return _numpy.sum(convert(~_numpy.isnan(x), x.value.dtype), axis=axis, keepdims=keepdims)


@traced(np.nansum)
def _nansum(a: Any, axis: Axes = None, dtype: Any = None, keepdims: bool = False) -> Any:
    return _numpy.sum(_without(as_tensor(a), 0.0), axis=axis, dtype=dtype, keepdims=keepdims)


@traced(np.nanprod)
def _nanprod(a: Any, axis: Axes = None, keepdims: bool = False) -> Any:
    return _numpy.prod(_without(as_tensor(a), 1.0), axis=axis, keepdims=keepdims)


@traced(np.nancumsum)
def _nancumsum(a: Any, axis: int | None = None) -> Any:
    return _numpy.cumsum(_without(as_tensor(a), 0.0), axis=axis)


@traced(np.nancumprod)
def _nancumprod(a: Any, axis: int | None = None) -> Any:
    return _numpy.cumprod(_without(as_tensor(a), 1.0), axis=axis)


@traced(np.nanmean)
def _nanmean(a: Any, axis: Axes = None, keepdims: bool = False) -> Any:
    x = as_tensor(a)
    if not x.value.dtype.is_float:
        return _numpy.mean(x, axis=axis, keepdims=keepdims)
    return _nansum(x, axis, keepdims=keepdims) / _count(x, axis, keepdims)


@traced(np.nanvar)
def _nanvar(a: Any, axis: Axes = None, ddof: float = 0, keepdims: bool = False) -> Any:
    x = as_tensor(a)
    if not x.value.dtype.is_float:
        return _numpy.var(x, axis=axis, ddof=ddof, keepdims=keepdims)
    # NumPy's rule: NaN as 0, and 0 again behind the subtraction of the mean.
    apart = select(_numpy.isnan(x), 0.0, _without(x, 0.0) - _nanmean(x, axis, keepdims=True))
    return _numpy.sum(np.square(apart), axis=axis, keepdims=keepdims) / (_count(x, axis, keepdims) - ddof)


@traced(np.nanstd)
def _nanstd(a: Any, axis: Axes = None, ddof: float = 0, keepdims: bool = False) -> Any:
    return np.sqrt(_nanvar(a, axis, ddof, keepdims))


def _nanextreme(how: Callable[..., Any], worst: float, a: Any, axis: Axes = None, keepdims: bool = False) -> Any:
    x = as_tensor(a)
    if not x.value.dtype.is_float:
        return how(x, axis=axis, keepdims=keepdims)
    found = how(_without(x, worst), axis=axis, keepdims=keepdims)
    return select(_count(x, axis, keepdims) > 0, found, float("nan"))


traced(np.nanmax)(partial(_nanextreme, _numpy.max, -np.inf))
traced(np.nanmin)(partial(_nanextreme, _numpy.min, np.inf))


def _nanarg(how: Callable[..., Any], worst: float, a: Any, axis: int | None = None, *, keepdims: bool = False) -> Any:
    return how(_without(as_tensor(a), worst), axis=axis, keepdims=keepdims)


traced(np.nanargmax)(partial(_nanarg, _numpy.argmax, -np.inf))
traced(np.nanargmin)(partial(_nanarg, _numpy.argmin, np.inf))


@traced(np.nan_to_num)
def _nan_to_num(
    x: Any, copy: bool = True, nan: float = 0.0, posinf: float | None = None, neginf: float | None = None
) -> Any:
    tensor = as_tensor(x)
    if not all(each is None or isinstance(each, Real) for each in (nan, posinf, neginf)):
        raise fail("np.nan_to_num puts numbers in the place of others: nan, posinf and neginf cannot be tensors")
    if not tensor.value.dtype.is_float:
        return tensor
    most = float(np.finfo(np.float32 if tensor.value.dtype.name == "bfloat16" else tensor.dtype).max)
    high, low = most if posinf is None else posinf, -most if neginf is None else neginf

    def ordinary(x: Expr) -> Expr:
        ends = ex.where(x > 0.0, high, low)
        return ex.where(call("isnan", x), nan, ex.where(call("isinf", x), ends, x))

    return apply("nan_to_num", ordinary, tensor)


@traced(np.isposinf)
def _isposinf(x: Any) -> Any:
    return _numpy.isinf(x) & (as_tensor(x) > 0)


@traced(np.isneginf)
def _isneginf(x: Any) -> Any:
    return _numpy.isinf(x) & (as_tensor(x) < 0)


# Comparisons of whole tensors


@traced(np.isclose)
def _isclose(a: Any, b: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> Any:
    like = common_float(a, b)
    x, y = as_tensor(a, like), as_tensor(b, like)
    near = _numpy.isfinite(y) & (np.abs(x - y) <= atol + rtol * np.abs(y))
    found = near | _numpy.equal(x, y)
    return found | (_numpy.isnan(x) & _numpy.isnan(y)) if equal_nan else found


@traced(np.allclose)
def _allclose(a: Any, b: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> Any:
    return _numpy.all(_isclose(a, b, rtol, atol, equal_nan))


@traced(np.array_equal)
def _array_equal(a1: Any, a2: Any, equal_nan: bool = False) -> Any:
    return _array_equiv(a1, a2, equal_nan) if np.shape(a1) == np.shape(a2) else False


@traced(np.array_equiv)
def _array_equiv(a1: Any, a2: Any, equal_nan: bool = False) -> Any:
    like = common_float(a1, a2)
    x, y = as_tensor(a1, like), as_tensor(a2, like)
    try:
        np.broadcast_shapes(x.shape, y.shape)
    except ValueError:
        return False
    same = _numpy.equal(x, y)
    return _numpy.all(same | (_numpy.isnan(x) & _numpy.isnan(y)) if equal_nan else same)


# Complex numbers, of which every traced tensor is a real one


@traced(np.real, np.real_if_close)
def _real(val: Any) -> Tensor:
    return as_tensor(val)


@traced(np.imag)
def _imag(val: Any) -> Any:
    return _numpy.zeros_like(val)


@traced(np.isreal)
def _isreal(x: Any) -> Any:
    return _numpy.ones_like(x, dtype=bool)


@traced(np.iscomplex)
def _iscomplex(x: Any) -> Any:
    return _numpy.zeros_like(x, dtype=bool)


@traced(np.isrealobj)
def _isrealobj(x: Any) -> bool:
    return True


@traced(np.iscomplexobj)
def _iscomplexobj(x: Any) -> bool:
    return False


@traced(np.angle)
def _angle(z: Any, deg: bool = False) -> Any:
    x = as_tensor(z)
    x = x if x.value.dtype.is_float else convert(x, "float32")
    half = 180.0 if deg else float(np.pi)
    return apply("angle", lambda x: ex.where(call("isnan", x), x, ex.where(x < 0.0, half, 0.0)), x)

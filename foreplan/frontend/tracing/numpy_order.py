"""NumPy's functions that need elements in order, and running sums and products, on traced tensors."""

from __future__ import annotations

from typing import Any

import numpy as np

from foreplan.base.errors import ShapeError
from foreplan.frontend.tracing.dispatch import as_axes, as_axis, traced
from foreplan.frontend.tracing.elementwise import convert, select
from foreplan.frontend.tracing.tensor import Axes, Tensor, as_tensor, common_float, wrap
from foreplan.frontend.tracing.tracer import current, fail
from foreplan.graph import Value
from foreplan.ops.scan import CumSum, cumprod
from foreplan.ops.sort import TopK

_numpy: Any = np  # whose stubs know arrays only


def along(a: Any, axis: int | None) -> tuple[Tensor, int]:
    """A tensor and the axis to run along, which is the only one if none is named."""
    x = as_tensor(a)
    return (x.reshape(-1), 0) if axis is None else (x, as_axis(axis, x.ndim))


def _countable(x: Tensor, dtype: Any) -> Tensor:
    """Elements as NumPy adds them up or multiplies them: small integers and booleans as int64."""
    if dtype is None and not x.value.dtype.is_float and x.value.dtype.itemsize < 8:
        dtype = "uint64" if x.value.dtype.category == "uint" else "int64"
    return x if dtype is None else convert(x, dtype)


@traced(np.cumsum)
def _cumsum(a: Any, axis: int | None = None, dtype: Any = None) -> Tensor:
    x, axis = along(a, axis)
    b = current().at()
    return wrap(b.apply(CumSum(axis, False, False), _countable(x, dtype).value))


@traced(np.cumprod)
def _cumprod(a: Any, axis: int | None = None, dtype: Any = None) -> Tensor:
    x, axis = along(a, axis)
    return wrap(cumprod(current().at(), _countable(x, dtype).value, axis))


def _cumulative(how: Any, first: int, x: Any, axis: int | None, dtype: Any, include_initial: bool) -> Any:
    if axis is None and np.ndim(x) != 1:
        raise fail("a cumulative sum or product of several axes needs axis=")
    found = how(x, axis, dtype)
    if not include_initial:
        return found
    at = 0 if axis is None else as_axis(axis, found.ndim)
    one = _numpy.full_like(found[(slice(None),) * at + (slice(0, 1),)], first)
    return _numpy.concatenate([one, found], at)


@traced(np.cumulative_sum)
def _cumulative_sum(x: Any, *, axis: int | None = None, dtype: Any = None, include_initial: bool = False) -> Any:
    return _cumulative(_cumsum, 0, x, axis, dtype, include_initial)


@traced(np.cumulative_prod)
def _cumulative_prod(x: Any, *, axis: int | None = None, dtype: Any = None, include_initial: bool = False) -> Any:
    return _cumulative(_cumprod, 1, x, axis, dtype, include_initial)


@traced(np.trapezoid)
def _trapezoid(y: Any, x: Any = None, dx: float = 1.0, axis: int = -1) -> Any:
    like = common_float(y, x)
    heights = as_tensor(y, like)
    at = as_axis(axis, heights.ndim)
    widths: Any = dx
    if x is not None:
        widths = _numpy.diff(as_tensor(x, like), axis=axis if np.ndim(x) > 1 else 0)
        widths = widths if widths.ndim > 1 else widths.reshape(-1, *(1,) * (heights.ndim - 1 - at))
    before = (slice(None),) * at
    sums = heights[(*before, slice(1, None))] + heights[(*before, slice(None, -1))]
    sums = sums if sums.value.dtype.is_float else convert(sums, "float32")
    return (sums * widths * 0.5).sum(at)


# Order


def _sorted(a: Any, axis: int | None) -> tuple[Value, ...]:
    x, axis = along(a, axis)
    return current().at().node(TopK(x.shape[axis], axis, False), x.value, name="sort")


@traced(np.sort)
def _sort(a: Any, axis: int | None = -1, kind: Any = None, *, stable: Any = None) -> Tensor:
    return wrap(_sorted(a, axis)[0])


@traced(np.argsort)
def _argsort(a: Any, axis: int | None = -1, kind: Any = None, *, stable: Any = None) -> Tensor:
    return wrap(_sorted(a, axis)[1])


@traced(np.quantile)
def _quantile(a: Any, q: Any, axis: Axes = None, method: str = "linear", keepdims: bool = False) -> Any:
    if isinstance(q, Tensor):
        raise fail("the quantile q decides what is read, and must be a number; it is traced")
    if method != "linear":
        raise fail(f"np.quantile(method={method!r}) cannot be traced; use 'linear', or np.sort and an index")
    x = as_tensor(a)
    x = x if x.value.dtype.is_float else convert(x, "float32")
    axes = as_axes(axis, x.ndim)
    kept = [i for i in range(x.ndim) if i not in axes]
    rows = x.transpose([*kept, *axes]).reshape(*(x.shape[i] for i in kept), -1)
    count = rows.shape[-1]
    if not count:
        raise ShapeError(f"{x.value!r} has no elements along the axes {axes}, and so no quantiles")
    ordered = _numpy.sort(rows)
    shares = np.ravel(q).tolist()
    if not all(0.0 <= share <= 1.0 for share in shares):
        raise fail(f"quantiles must be in [0, 1] (percentiles in [0, 100]), and they are {shares}")
    found = [_between(ordered, share * (count - 1)) for share in shares]
    bad = _numpy.any(_numpy.isnan(rows), -1)
    found = [select(bad, float("nan"), each) for each in found]
    if keepdims:
        shape = tuple(1 if i in axes else n for i, n in enumerate(x.shape))
        found = [each.reshape(shape) for each in found]
    return _numpy.stack(found).reshape(*np.shape(q), *found[0].shape)


def _between(ordered: Any, place: float) -> Any:
    """The element at a place along the last axis, between its neighbours."""
    low = min(int(place), ordered.shape[-1] - 1)
    share = place - low
    below = ordered[..., low]
    return below if not share else below + (ordered[..., min(low + 1, ordered.shape[-1] - 1)] - below) * share


@traced(np.percentile)
def _percentile(a: Any, q: Any, axis: Axes = None, method: str = "linear", keepdims: bool = False) -> Any:
    return _quantile(a, q if isinstance(q, Tensor) else np.asarray(q) / 100.0, axis, method, keepdims)


@traced(np.median)
def _median(a: Any, axis: Axes = None, keepdims: bool = False) -> Any:
    return _quantile(a, 0.5, axis, keepdims=keepdims)


@traced(np.ptp)
def _ptp(a: Any, axis: Axes = None, keepdims: bool = False) -> Any:
    return _numpy.max(a, axis, keepdims=keepdims) - _numpy.min(a, axis, keepdims=keepdims)


# Weighted sums


@traced(np.average)
def _average(a: Any, axis: Axes = None, weights: Any = None, *, keepdims: bool = False) -> Any:
    if weights is None:
        return _numpy.mean(a, axis, keepdims=keepdims)
    like = common_float(a, weights)
    x, w = as_tensor(a, like), as_tensor(weights, like)
    if w.shape != x.shape:
        (at,) = as_axes(axis, x.ndim) if axis is not None else (-1,)
        if at < 0 or w.shape != (x.shape[at],):
            raise ShapeError(f"weights {w.value!r} fit neither {x.value!r} nor one of its axes; name it with axis=")
        w = w.reshape(-1, *(1,) * (x.ndim - 1 - at))
    total = _numpy.sum(_numpy.broadcast_to(w, x.shape), axis=axis, keepdims=keepdims)
    return _numpy.sum(x * w, axis=axis, keepdims=keepdims) / total


@traced(np.cov)
def _cov(m: Any, y: Any = None, rowvar: bool = True, bias: bool = False, ddof: int | None = None) -> Any:
    parts = []
    for each in (m, y):
        if each is None:
            continue
        x = as_tensor(each, common_float(m, y))
        if x.ndim > 2:
            raise ShapeError(f"np.cov needs one axis or two, and got {x.value!r}")
        parts.append(x.reshape(1, -1) if x.ndim < 2 else x if rowvar else x.T)
    x = parts[0] if len(parts) == 1 else _numpy.concatenate(parts, 0)
    less = (0 if bias else 1) if ddof is None else ddof
    apart = x - _numpy.mean(x, 1, keepdims=True)
    return (apart @ apart.T * (1.0 / (x.shape[1] - less))).squeeze()


@traced(np.corrcoef)
def _corrcoef(x: Any, y: Any = None, rowvar: bool = True) -> Any:
    found = _cov(x, y, rowvar)
    if not found.ndim:
        return found / found
    spread = np.sqrt(_numpy.diagonal(found))
    return found / spread[:, None] / spread[None, :]

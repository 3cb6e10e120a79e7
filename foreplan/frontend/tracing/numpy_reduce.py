"""NumPy's reductions, choices and products on traced tensors."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from foreplan.frontend.tracing import contraction, indexing
from foreplan.frontend.tracing.dispatch import as_axes, as_axis, traced, wrap
from foreplan.frontend.tracing.elementwise import apply, as_bool, convert, select
from foreplan.frontend.tracing.tensor import Axes, Tensor, as_tensor, common_float
from foreplan.frontend.tracing.tracer import current, fail
from foreplan.graph import Value
from foreplan.graph.types import FLOAT32, broadcast_shapes
from foreplan.ops.expr import call
from foreplan.ops.index_elements import gather_elements
from foreplan.ops.reduce import reduce
from foreplan.ops.scan import CumSum
from foreplan.ops.shape import broadcast_to
from foreplan.ops.sort import ArgReduce, TopK


def _reduce(how: str, a: Any, axis: Axes = None, keepdims: bool = False) -> Tensor:
    x = as_tensor(a)
    return wrap(reduce(current().at(), how, x.value, as_axes(axis, x.ndim), bool(keepdims)))


traced(np.prod)(partial(_reduce, "prod"))
traced(np.max)(partial(_reduce, "max"))
traced(np.min)(partial(_reduce, "min"))


@traced(np.sum)
def _sum(a: Any, axis: Axes = None, dtype: Any = None, keepdims: bool = False) -> Tensor:
    x = as_tensor(a)
    if dtype is None and x.value.dtype.category != "float" and x.value.dtype.itemsize < 8:
        dtype = "uint64" if x.value.dtype.category == "uint" else "int64"
    return _reduce("sum", x if dtype is None else convert(x, dtype), axis, keepdims)


@traced(np.mean)
def _mean(a: Any, axis: Axes = None, dtype: Any = None, keepdims: bool = False) -> Tensor:
    x = as_tensor(a)
    if dtype is None and not x.value.dtype.is_float:
        dtype = FLOAT32
    return _reduce("mean", x if dtype is None else convert(x, dtype), axis, keepdims)


@traced(np.any)
def _any(a: Any, axis: Axes = None, keepdims: bool = False) -> Tensor:
    return _reduce("max", as_bool(as_tensor(a)), axis, keepdims)


@traced(np.all)
def _all(a: Any, axis: Axes = None, keepdims: bool = False) -> Tensor:
    return _reduce("min", as_bool(as_tensor(a)), axis, keepdims)


@traced(np.count_nonzero)
def _count_nonzero(a: Any, axis: Axes = None, keepdims: bool = False) -> Tensor:
    return _sum(as_bool(as_tensor(a)), axis, keepdims=keepdims)


@traced(np.var)
def _var(a: Any, axis: Axes = None, ddof: float = 0, keepdims: bool = False) -> Tensor:
    x = as_tensor(a)
    axes = as_axes(axis, x.ndim)
    count = int(np.prod([x.shape[i] for i in axes]))
    squares = np.square(x - _mean(x, axes, keepdims=True))
    if not ddof:
        return _mean(squares, axes, keepdims=keepdims)
    return _sum(squares, axes, keepdims=keepdims) * (1.0 / (count - ddof))


@traced(np.std)
def _std(a: Any, axis: Axes = None, ddof: float = 0, keepdims: bool = False) -> Any:
    return np.sqrt(_var(a, axis, ddof, keepdims))


@traced(np.linalg.norm)
def _norm(x: Any, axis: Axes = None, keepdims: bool = False) -> Any:
    return np.sqrt(_sum(np.square(as_tensor(x)), axis, keepdims=keepdims))


def _arg_reduce(how: str, a: Any, axis: int | None = None, *, keepdims: bool = False) -> Tensor:
    x = as_tensor(a)
    if axis is None:
        if keepdims:
            raise fail(f"np.arg{how} with keepdims=True is traced with an axis")
        x, axis = x.reshape(-1), 0
    b = current().at()
    return wrap(b.apply(ArgReduce(how, as_axis(axis, x.ndim), bool(keepdims), False), x.value))


traced(np.argmax)(partial(_arg_reduce, "max"))
traced(np.argmin)(partial(_arg_reduce, "min"))


@traced(np.cumsum)
def _cumsum(a: Any, axis: int | None = None) -> Tensor:
    x = as_tensor(a)
    x, axis = (x.reshape(-1), 0) if axis is None else (x, as_axis(axis, x.ndim))
    x = convert(x, "int64") if x.value.dtype.category == "bool" else x
    b = current().at()
    return wrap(b.apply(CumSum(axis, False, False), x.value))


def _sorted(a: Any, axis: int | None) -> tuple[Value, ...]:
    x = as_tensor(a)
    x, axis = (x.reshape(-1), 0) if axis is None else (x, as_axis(axis, x.ndim))
    b = current().at()
    return b.node(TopK(x.shape[axis], axis, False), x.value, name="sort")


@traced(np.sort)
def _sort(a: Any, axis: int | None = -1) -> Tensor:
    return wrap(_sorted(a, axis)[0])


@traced(np.argsort)
def _argsort(a: Any, axis: int | None = -1) -> Tensor:
    return wrap(_sorted(a, axis)[1])


# Choosing and limiting


@traced(np.where)
def _where(condition: Any, *choices: Any) -> Tensor:
    if len(choices) != 2:
        raise fail("np.where(mask) gives a shape that depends on data; use np.where(mask, a, b)")
    return select(condition, *choices)


@traced(np.clip)
def _clip(a: Any, a_min: Any = None, a_max: Any = None, min: Any = None, max: Any = None) -> Any:
    low, high = (a_min if min is None else min), (a_max if max is None else max)
    if low is not None and high is not None:
        return apply("clip", lambda x, lo, hi: call("clip", x, lo, hi), a, low, high)
    if low is not None:
        return np.maximum(a, low)
    return as_tensor(a) if high is None else np.minimum(a, high)


@traced(np.round)
def _round(a: Any, decimals: int = 0) -> Any:
    if not decimals:
        return np.rint(a)
    return np.rint(a * 10.0**decimals) * 10.0**-decimals


@traced(np.tril)
def _tril(m: Any, k: int = 0) -> Tensor:
    return select(np.tri(m.shape[-2], m.shape[-1], k, dtype=bool), m, 0)


@traced(np.triu)
def _triu(m: Any, k: int = 0) -> Tensor:
    return select(np.tri(m.shape[-2], m.shape[-1], k - 1, dtype=bool), 0, m)


traced(np.take)(indexing.take)


@traced(np.take_along_axis)
def _take_along_axis(arr: Any, indices: Any, axis: int = -1) -> Tensor:
    x, at = as_tensor(arr), as_tensor(indices)
    axis = as_axis(axis, x.ndim)
    rest = broadcast_shapes(*((*t.shape[:axis], 1, *t.shape[axis + 1 :]) for t in (x, at)))
    x, at = (_spread(t, (*rest[:axis], t.shape[axis], *rest[axis + 1 :])) for t in (x, at))
    return wrap(gather_elements(current().at(), x.value, at.value, axis))


def _spread(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    return wrap(broadcast_to(current().at(), x.value, shape))


# Products

traced(np.dot)(contraction.dot)
traced(np.tensordot)(contraction.tensordot)
traced(np.einsum)(contraction.einsum)


@traced(np.outer)
def _outer(a: Any, b: Any) -> Tensor:
    like = common_float(a, b)
    return as_tensor(a, like).reshape(-1, 1) * as_tensor(b, like).reshape(1, -1)


@traced(np.inner)
def _inner(a: Any, b: Any) -> Any:
    return contraction.tensordot(a, b, ([np.ndim(a) - 1], [np.ndim(b) - 1]))

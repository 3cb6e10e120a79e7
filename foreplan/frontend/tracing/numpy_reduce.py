"""NumPy's reductions and choices on traced tensors."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

from foreplan.base.errors import ShapeError
from foreplan.frontend.tracing import indexing
from foreplan.frontend.tracing.dispatch import as_axes, as_axis, traced
from foreplan.frontend.tracing.elementwise import apply, as_bool, convert, select, zero_of
from foreplan.frontend.tracing.tensor import Axes, Tensor, as_tensor, wrap
from foreplan.frontend.tracing.tracer import current, fail
from foreplan.graph.types import FLOAT32, broadcast_shapes
from foreplan.ops.expr import Expr, call, where
from foreplan.ops.index_elements import gather_elements
from foreplan.ops.reduce import reduce
from foreplan.ops.shape import broadcast_to
from foreplan.ops.sort import ArgReduce


def _reduce(how: str, a: Any, axis: Axes = None, keepdims: bool = False) -> Tensor:
    x = as_tensor(a)
    return wrap(reduce(current().at(), how, x.value, as_axes(axis, x.ndim), bool(keepdims)))


traced(np.max, np.amax)(partial(_reduce, "max"))
traced(np.min, np.amin)(partial(_reduce, "min"))


def _total(how: str, a: Any, axis: Axes = None, dtype: Any = None, *, keepdims: bool = False) -> Tensor:
    """Of integers and booleans, in 64 bits unless another type is asked for."""
    x = as_tensor(a)
    if dtype is None and x.value.dtype.category != "float" and x.value.dtype.itemsize < 8:
        dtype = "uint64" if x.value.dtype.category == "uint" else "int64"
    return _reduce(how, x if dtype is None else convert(x, dtype), axis, keepdims)


_sum = partial(_total, "sum")
traced(np.sum)(_sum)
traced(np.prod)(partial(_total, "prod"))


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


@traced(np.round, np.around)
def _round(a: Any, decimals: int = 0) -> Any:
    x = as_tensor(a)
    if not decimals and x.value.dtype.category in ("int", "uint"):
        return x
    if not decimals:
        return np.rint(a)
    return np.rint(a * 10.0**decimals) * 10.0**-decimals


def _below(m: Any, k: int) -> np.ndarray:
    """Whether each element of the last two axes lies on the diagonal k or below it."""
    return np.tri(m.shape[-2:][0], m.shape[-1], k, dtype=bool)


@traced(np.tril)
def _tril(m: Any, k: int = 0) -> Tensor:
    return select(_below(m, k), m, zero_of(m))


@traced(np.triu)
def _triu(m: Any, k: int = 0) -> Tensor:
    return select(_below(m, k - 1), zero_of(m), m)


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


@traced(np.select)
def _select(condlist: Any, choicelist: Any, default: Any = 0) -> Any:
    if len(condlist) != len(choicelist) or not len(condlist):
        raise ShapeError(f"np.select of {len(condlist)} conditions and {len(choicelist)} choices: they must be as many")
    found = default
    for condition, choice in zip(reversed(condlist), reversed(choicelist)):
        found = select(condition, choice, found)
    return found


@traced(np.choose)
def _choose(a: Any, choices: Any, mode: str = "raise") -> Any:
    places, count = as_tensor(a), len(choices)
    if mode == "wrap":
        places = places % count
    elif mode != "clip":
        raise fail("np.choose is traced with mode='clip' or 'wrap': whether an index is outside depends on data")
    found = choices[-1]
    for i in reversed(range(count - 1)):
        found = select(places <= i, choices[i], found)
    return found if count > 1 else np.broadcast_arrays(places, choices[0])[1]


@traced(np.fix)
def _fix(x: Any) -> Any:
    return np.trunc(x)


@traced(np.sinc)
def _sinc(x: Any) -> Any:
    tensor = as_tensor(x)

    def sinc(x: Expr) -> Expr:
        turned = where(call("eq", x, 0.0), 1.0, x * math.pi)
        return where(call("eq", x, 0.0), 1.0, call("sin", turned) / turned)

    return apply("sinc", sinc, tensor if tensor.value.dtype.is_float else convert(tensor, FLOAT32))


@traced(np.unwrap)
def _unwrap(p: Any, discont: float | None = None, axis: int = -1, *, period: float = 2 * math.pi) -> Any:
    x: Any = as_tensor(p)
    axis = as_axis(axis, x.ndim)
    jump, least = np.diff(x, axis=axis), max(period / 2, discont or 0.0)

    def whole_turns(d: Expr) -> Expr:
        moved = call("mod", d + period / 2, period) - period / 2
        moved = where(call("and", call("eq", moved, -period / 2), d > 0.0), period / 2, moved)
        return where(call("abs", d) < least, 0.0, moved - d)

    turns: Any = np.cumsum(apply("whole_turns", whole_turns, jump), axis=axis)
    first = x[(slice(None),) * axis + (slice(0, 1),)]
    return x + np.concatenate([np.zeros_like(first), turns], axis)

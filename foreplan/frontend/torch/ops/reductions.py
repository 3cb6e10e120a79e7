"""ATen ops that make fewer elements of many: sums, extremes, statistics, sorts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from foreplan.base.errors import UnsupportedError
from foreplan.frontend import nn
from foreplan.frontend.torch.call import Call, dtype_of
from foreplan.frontend.torch.table import aten
from foreplan.frontend.tracing.elementwise import apply, as_bool, convert
from foreplan.frontend.tracing.tensor import Tensor, as_tensor
from foreplan.graph.types import INT64
from foreplan.ops import scan, sort
from foreplan.ops.expr import Expr, call, exp, log, where
from foreplan.ops.reduce import reduce

_HOW = {"sum": "sum", "mean": "mean", "amax": "max", "amin": "min", "prod": "prod", "nansum": "sum"}


def axes_of(dim: Any, rank: int) -> list[int]:
    """Axes as PyTorch gives them: none, and an empty list, are all."""
    if dim is None or dim == []:
        return list(range(rank))
    return [each % max(rank, 1) for each in ([dim] if isinstance(dim, int) else dim)][: max(rank, 0)]


def reduced(c: Call, how: str, x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    """A reduction along axes."""
    return c.wrap(reduce(c.b, how, x.value, axes_of(dim, x.ndim), keepdim)) if x.ndim else x


@aten("sum", "mean", "amax", "amin", "prod", "nansum")
def _reduce(c: Call, x: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    tensor = convert(c.tensor(x), c.dtype)
    if c.name == "nansum":
        tensor = apply("nansum", lambda x: call("where", call("isnan", x), x * 0.0, x), tensor)
    return reduced(c, _HOW[c.name], tensor, dim, keepdim)


@aten("all", "any")
def _all(c: Call, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    tensor = as_bool(c.tensor(x))
    axes = tuple(axes_of(dim, tensor.ndim))
    return (np.all if c.name == "all" else np.any)(tensor, axis=axes, keepdims=keepdim)


@aten("max", "min")
def _extreme(c: Call, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    tensor = c.tensor(x)
    if isinstance(dim, Tensor | np.ndarray):
        return apply(c.name, lambda a, b: call(c.name, a, b), convert(tensor, c.dtype), convert(c.tensor(dim), c.dtype))
    if dim is None:
        return reduced(c, c.name, tensor)
    if not tensor.ndim:
        return [tensor, np.zeros((), np.int64)]
    places = c.wrap(sort.arg_reduce(c.b, c.name, tensor.value, dim % tensor.ndim, True))
    return [_at(tensor, places, dim, keepdim), places if keepdim else places.squeeze(dim)]


def _at(x: Tensor, places: Any, dim: int, keepdim: bool) -> Any:
    """The elements at these places of an axis, to which alone the gradient goes, as PyTorch has it."""
    found: Any = np.take_along_axis(x, places, dim)
    return found if keepdim else found.squeeze(dim)


@aten("argmax", "argmin", along=True)
def _arg(c: Call, x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    tensor = c.tensor(x)
    if dim is None:
        return c.wrap(sort.arg_reduce(c.b, c.name[3:], tensor.reshape(-1).value, 0)).reshape(c.shape)
    return c.wrap(sort.arg_reduce(c.b, c.name[3:], tensor.value, dim % tensor.ndim, keepdim))


@aten("var", "std", "var_mean", "std_mean")
def _var(c: Call, x: Any, dim: Any = None, unbiased: Any = None, keepdim: bool = False, correction: Any = None) -> Any:
    tensor = c.tensor(x)
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    axes = axes_of(dim, tensor.ndim)
    mean = reduced(c, "mean", tensor, axes, True)
    squares = apply("square", lambda x, m: (x - m) * (x - m), tensor, mean)
    less = correction if correction is not None else 0 if unbiased is False else 1
    count = math.prod(tensor.shape[axis] for axis in axes) - less
    found: Any = reduced(c, "sum", squares, axes, keepdim) / float(count)
    if c.name.startswith("std"):
        found = np.sqrt(found)
    return [found, mean if keepdim else mean.squeeze(tuple(axes))] if c.name.endswith("_mean") else found


def root(total: Tensor, order: float) -> Tensor:
    """The root of sums of powers; of the gradient of a sum of zeros, PyTorch says zero."""

    def fn(s: Any) -> Any:
        inside = call("where", s > 0.0, s, 1.0)
        return call("where", s > 0.0, call("sqrt", inside) if order == 2 else inside ** (1.0 / order), s * 0.0)

    return apply("root", fn, total) if order > 0 else apply("root", lambda s: s ** (1.0 / order), total)


@aten("linalg_vector_norm", "norm", "frobenius_norm")
def _norm(c: Call, x: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    tensor, order = convert(c.tensor(x), c.dtype), 2 if ord in (None, "fro") else ord
    if order == 2:
        return root(reduced(c, "sum", apply("square", lambda x: x * x, tensor), dim, keepdim), 2)
    size = apply("abs", lambda x: call("abs", x), tensor)
    if order in (math.inf, -math.inf):
        return reduced(c, "max" if order > 0 else "min", size, dim, keepdim)
    if order == 0:
        return reduced(c, "sum", convert(apply("ne", lambda x: call("ne", x, 0.0), tensor), c.dtype), dim, keepdim)
    if order == 1:
        return reduced(c, "sum", size, dim, keepdim)
    nothing = math.inf if order < 0 else 0.0  # of which the gradient is zero, as PyTorch has it

    def power(x: Expr) -> Expr:
        is_zero = call("eq", x, 0.0)
        return where(is_zero, nothing, where(is_zero, 1.0, x) ** float(order))

    return root(reduced(c, "sum", apply("pow", power, size), dim, keepdim), order)


@aten("logsumexp")
def _logsumexp(c: Call, x: Any, dim: Any, keepdim: bool = False) -> Any:
    tensor = c.tensor(x)
    high = nn.stop_gradient(reduced(c, "max", tensor, dim, True))
    high = apply("high", lambda m: call("where", call("isinf", m), 0.0, m), high)
    total = reduced(c, "sum", apply("exp", lambda x, m: exp(x - m), tensor, high), dim, True)
    return apply("logsumexp", lambda s, m: log(s) + m, total, high).reshape(c.shape)


@aten("cumsum", "cumprod", along=True)
def _running(c: Call, x: Any, dim: int, dtype: Any = None) -> Tensor:
    tensor = convert(c.tensor(x), c.dtype)
    return c.wrap(getattr(scan, c.name)(c.b, tensor.value, dim % tensor.ndim)) if tensor.ndim else tensor


@aten("logcumsumexp", along=True)
def _logcumsumexp(c: Call, x: Any, dim: int) -> Any:
    """Of pairs, fours and so on, as sums of exponentials of which the larger is 1: none is lost beside a later one."""
    found: Any = convert(c.tensor(x), c.dtype.wide)
    axis, step = dim % found.ndim, 1
    before = (slice(None),) * axis
    while step < found.shape[axis]:
        one, other = found[(*before, slice(step, None))], found[(*before, slice(None, -step))]
        high: Any = nn.stop_gradient(np.maximum(one, other))
        high = np.where(np.isinf(high), 0.0, high)
        joined = np.log(np.exp(one - high) + np.exp(other - high)) + high
        found = np.concatenate([found[(*before, slice(None, step))], joined], axis)
        step *= 2
    return convert(found, c.dtype)


@aten("cummax", "cummin", along=True)
def _running_extreme(c: Call, x: Any, dim: int) -> list[Any]:
    """The largest number up to each place, and where the last such one stands: of pairs, fours and so on (Hillis and
    Steele 1986, "Data parallel algorithms").
    """
    tensor = c.tensor(x)
    axis = dim % tensor.ndim
    n, lead = tensor.shape[axis], [(0, 0)] * axis
    at: Any = as_tensor(np.broadcast_to(np.arange(n).reshape(-1, *[1] * (tensor.ndim - axis - 1)), tensor.shape), INT64)
    high: Any = tensor
    reach = 1
    while reach < n:
        rest = [(0, 0)] * (tensor.ndim - axis - 1)
        body = (*[slice(None)] * axis, slice(0, n - reach))
        before: Any = np.pad(high[body], [*lead, (reach, 0), *rest], mode="edge")
        place: Any = np.pad(at[body], [*lead, (reach, 0), *rest])
        wins = before > high if c.name == "cummax" else before < high
        wins = wins & (np.arange(n).reshape(-1, *[1] * len(rest)) >= reach)
        high, at, reach = np.where(wins, before, high), np.where(wins, place, at), 2 * reach
    return [np.take_along_axis(tensor, at, axis=axis), at]


@aten("topk", along=True)
def _topk(c: Call, x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> list[Tensor]:
    tensor = c.tensor(x)
    return [c.wrap(value) for value in sort.top_k(c.b, tensor.value, k, dim % tensor.ndim, largest)]


@aten("sort", along=True)
def _sort(c: Call, x: Any, *args: Any, dim: int = -1, descending: bool = False, stable: Any = None) -> list[Tensor]:
    tensor = c.tensor(x)
    given = [each for each in args if not (isinstance(each, bool) and len(args) == 3 and each is args[0])]
    dim, descending = (given[0] if given else dim), (given[1] if len(given) > 1 else descending)
    return [c.wrap(v) for v in sort.top_k(c.b, tensor.value, tensor.shape[dim], dim % tensor.ndim, descending)]


@aten("argsort", "msort", along=True)
def _argsort(c: Call, x: Any, *args: Any, dim: int = -1, descending: bool = False, stable: bool = False) -> Tensor:
    values, places = _sort(c, x, *args, dim=0 if c.name == "msort" else dim, descending=descending)
    return values if c.name == "msort" else places


@aten("kthvalue", "median", along=True)
def _kth(c: Call, x: Any, *args: Any, keepdim: bool = False) -> Any:
    tensor = c.tensor(x)
    if c.name == "median" and not args:
        flat = tensor.reshape(-1)
        return c.wrap(sort.top_k(c.b, flat.value, (flat.size + 1) // 2, 0, False)[0])[-1]
    k, rest = (args[0], args[1:]) if c.name == "kthvalue" else (None, args)
    dim = rest[0] if rest else -1
    dim %= tensor.ndim
    keep = rest[1] if len(rest) > 1 else keepdim
    extent = tensor.shape[dim]
    axis = dim % tensor.ndim
    found = sort.top_k(c.b, tensor.value, k or (extent + 1) // 2, axis, False)
    key = (*[slice(None)] * axis, slice(-1, None))
    return [each if keep else each.squeeze(axis) for each in (c.wrap(value)[key] for value in found)]


@aten("softmax", "_softmax", "special_softmax", along=True)
def _softmax(c: Call, x: Any, dim: int, dtype: Any = None) -> Tensor:
    return nn.softmax(convert(c.tensor(x), c.dtype), dim)


@aten("_safe_softmax", along=True)
def _safe_softmax(c: Call, x: Any, dim: int, dtype: Any = None) -> Any:
    """Softmax, and zeros where nothing is allowed."""
    tensor = convert(c.tensor(x), c.dtype)
    none = reduced(c, "max", tensor, dim, True) == -np.inf
    return np.where(none, 0.0, nn.softmax(as_tensor(np.where(none, 0.0, tensor)), dim))


@aten("log_softmax", "_log_softmax", along=True)
def _log_softmax(c: Call, x: Any, dim: int, dtype: Any = None) -> Tensor:
    return nn.log_softmax(convert(c.tensor(x), c.dtype), dim)


@aten("count_nonzero")
def _count(c: Call, x: Any, dim: Any = None) -> Any:
    return reduced(c, "sum", convert(as_bool(c.tensor(x)), c.dtype), dim)


@aten("histc")
def _histc(c: Call, x: Any, bins: int = 100, min: float = 0, max: float = 0) -> Any:
    """How many elements are in each of some bins of one width; `min` = `max` stands for the extremes of the data."""
    flat = c.tensor(x).reshape(-1)
    flat = flat if flat.value.dtype.is_float else convert(flat, "float32")
    low, high = (c.tensor(float(each), flat.value.dtype) for each in (min, max))
    if min == max:
        low, high = reduced(c, "min", flat), reduced(c, "max", flat)
        empty = convert(low == high, low.dtype)
        low, high = low - empty, high + empty

    def place(x: Any, low: Any, high: Any) -> Any:
        at = call("min", call("floor", (x - low) / (high - low) * float(bins)), float(bins - 1))
        return call("where", call("and", call("ge", x, low), call("le", x, high)), at, -1.0)

    places = convert(apply("bin", place, flat, low, high), "int64")
    return convert(places[:, None] == np.arange(bins), c.dtype).sum(0)


@aten("bincount", "unique", "_unique2", "nonzero", "masked_select")
def _of_data(c: Call, *_: Any, **__: Any) -> Any:
    raise UnsupportedError("its shape depends on data, and shapes are fixed when a step is compiled")


def mean_of(c: Call, terms: Tensor, reduction: int) -> Tensor:
    """Losses as PyTorch reduces them: 0 keeps each, 1 takes the mean, 2 the sum."""
    return terms if reduction == 0 else reduced(c, "mean" if reduction == 1 else "sum", terms)


def dtype_of_first(c: Call) -> Any:
    """The element type of the first of several results."""
    return dtype_of(c.result[0].dtype)


def listed(sizes: int | Sequence[int], count: int) -> tuple[int, ...]:
    """One number for each of some axes."""
    given = [sizes] if isinstance(sizes, int) else list(sizes)
    return tuple(given) * count if len(given) == 1 else tuple(given)

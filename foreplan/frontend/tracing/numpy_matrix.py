"""NumPy's functions of matrices and vectors on traced tensors: diagonals, products, filters, polynomials, grids."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce as fold
from typing import Any

import numpy as np

from foreplan.base.arguments import whole
from foreplan.base.errors import ShapeError
from foreplan.frontend.tracing import contraction
from foreplan.frontend.tracing.dispatch import as_axis, traced
from foreplan.frontend.tracing.elementwise import convert, select, zero_of
from foreplan.frontend.tracing.tensor import Axes, Tensor, as_tensor, common_float, wrap
from foreplan.frontend.tracing.tracer import current, fail
from foreplan.ops.conv.ops import conv

_numpy: Any = np  # whose stubs know arrays only


@traced(np.diagonal)
def _diagonal(a: Any, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Any:
    x = as_tensor(a)
    if x.ndim < 2:
        raise ShapeError(f"the diagonal of {x.value!r}: it needs two axes")
    x = _numpy.moveaxis(x, (axis1, axis2), (-2, -1))
    rows, columns = x.shape[-2:]
    first = offset if offset >= 0 else -offset * columns
    count = max(0, min(rows, columns - offset) if offset >= 0 else min(rows + offset, columns))
    flat = x.reshape(*x.shape[:-2], rows * columns)
    return flat[..., first : first + max(0, count - 1) * (columns + 1) + (count > 0) : columns + 1]


@traced(np.linalg.diagonal)
def _last_diagonal(x: Any, *, offset: int = 0) -> Any:
    return _diagonal(x, offset, -2, -1)


@traced(np.trace)
def _trace(a: Any, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Any:
    return _diagonal(a, offset, axis1, axis2).sum(-1)


@traced(np.linalg.trace)
def _last_trace(x: Any, *, offset: int = 0) -> Any:
    return _diagonal(x, offset, -2, -1).sum(-1)


@traced(np.diagflat)
def _diagflat(v: Any, k: int = 0) -> Tensor:
    x = as_tensor(v).reshape(-1)
    size = x.shape[0] + abs(k)
    column = _numpy.pad(x, (max(-k, 0), max(k, 0))).reshape(size, 1)
    return select(np.eye(size, k=k, dtype=bool), column, zero_of(x))


@traced(np.diag)
def _diag(v: Any, k: int = 0) -> Any:
    x = as_tensor(v)
    if x.ndim not in (1, 2):
        raise ShapeError(f"np.diag needs one axis or two, and got {x.value!r}; use np.diagonal")
    return _diagflat(x, k) if x.ndim == 1 else _diagonal(x, k)


@traced(np.tril_indices_from)
def _tril_indices_from(arr: Any, k: int = 0) -> tuple[np.ndarray, ...]:
    return np.tril_indices(arr.shape[-2], k, arr.shape[-1])


@traced(np.triu_indices_from)
def _triu_indices_from(arr: Any, k: int = 0) -> tuple[np.ndarray, ...]:
    return np.triu_indices(arr.shape[-2], k, arr.shape[-1])


@traced(np.diag_indices_from)
def _diag_indices_from(arr: Any) -> tuple[np.ndarray, ...]:
    if arr.ndim < 2 or len(set(arr.shape)) > 1:
        raise ShapeError(f"np.diag_indices_from needs two or more axes of one extent, and got {arr.value!r}")
    return np.diag_indices(arr.shape[0], arr.ndim)


# Products


@traced(np.outer, np.linalg.outer)
def _outer(a: Any, b: Any) -> Tensor:
    like = common_float(a, b)
    return as_tensor(a, like).reshape(-1, 1) * as_tensor(b, like).reshape(1, -1)


@traced(np.inner)
def _inner(a: Any, b: Any) -> Any:
    if not np.ndim(a) or not np.ndim(b):
        return np.multiply(a, b)
    return contraction.tensordot(a, b, ([np.ndim(a) - 1], [np.ndim(b) - 1]))


@traced(np.vdot)
def _vdot(a: Any, b: Any) -> Any:
    like = common_float(a, b)
    return contraction.dot(as_tensor(a, like).reshape(-1), as_tensor(b, like).reshape(-1))


@traced(np.linalg.vecdot)
def _vecdot(x1: Any, x2: Any, *, axis: int = -1) -> Any:
    return (as_tensor(x1, common_float(x1, x2)) * x2).sum(axis)


@traced(np.kron)
def _kron(a: Any, b: Any) -> Tensor:
    like = common_float(a, b)
    x, y = as_tensor(a, like), as_tensor(b, like)
    rank = max(x.ndim, y.ndim)
    first, second = ((1,) * (rank - z.ndim) + z.shape for z in (x, y))
    x = x.reshape([n for extent in first for n in (extent, 1)])
    y = y.reshape([n for extent in second for n in (1, extent)])
    return (x * y).reshape([n * m for n, m in zip(first, second)])


@traced(np.cross)
def _cross(a: Any, b: Any, axisa: int = -1, axisb: int = -1, axisc: int = -1, axis: int | None = None) -> Any:
    first, second, last = (axisa, axisb, axisc) if axis is None else (axis, axis, axis)
    like = common_float(a, b)
    x = _numpy.moveaxis(as_tensor(a, like), first, -1)
    y = _numpy.moveaxis(as_tensor(b, like), second, -1)
    if x.shape[-1] != 3 or y.shape[-1] != 3:
        raise ShapeError(f"np.cross needs vectors of three elements, and got {x.value!r} and {y.value!r}")
    turned = [(x[..., i] * y[..., j] - x[..., j] * y[..., i]) for i, j in ((1, 2), (2, 0), (0, 1))]
    return _numpy.stack(turned, last)


@traced(np.linalg.cross)
def _last_cross(x1: Any, x2: Any, *, axis: int = -1) -> Any:
    return _cross(x1, x2, axis=axis)


@traced(np.linalg.matrix_power)
def _matrix_power(a: Any, n: int) -> Any:
    x, n = as_tensor(a), whole("the power of a matrix", n, 0)
    if x.ndim < 2 or x.shape[-1] != x.shape[-2]:
        raise ShapeError(f"a power needs square matrices, and got {x.value!r}")
    if n == 0:
        return _numpy.broadcast_to(as_tensor(np.eye(x.shape[-1]), x.value.dtype), x.shape)
    half = x if n == 1 else _matrix_power(x, n // 2)
    if n == 1:
        return x
    return half @ half @ x if n % 2 else half @ half


@traced(np.linalg.multi_dot)
def _multi_dot(arrays: Sequence[Any]) -> Any:
    return fold(contraction.dot, arrays)


@traced(np.linalg.norm)
def _norm(x: Any, ord: Any = None, axis: Axes = None, keepdims: bool = False) -> Any:
    rank = np.ndim(x)
    if ord is None:
        return np.sqrt(_numpy.sum(np.square(as_tensor(x)), axis=axis, keepdims=keepdims))
    axes = tuple(range(rank)) if axis is None else tuple(int(each) for each in np.atleast_1d(axis))
    if len(axes) == 1:
        return _vector_norm(x, axis=axes, keepdims=keepdims, ord=ord)
    if len(axes) == 2:
        moved = _numpy.moveaxis(as_tensor(x), axes, (-2, -1))
        found = _matrix_norm(moved, ord=ord)
        return _numpy.expand_dims(found, tuple(as_axis(each, rank) for each in axes)) if keepdims else found
    raise fail(f"np.linalg.norm(ord={ord!r}) needs one axis or two; say which with axis=")


@traced(np.linalg.vector_norm)
def _vector_norm(x: Any, *, axis: Axes = None, keepdims: bool = False, ord: Any = 2) -> Any:
    size = np.abs(as_tensor(x))
    if ord in (np.inf, -np.inf):
        return _numpy.max(size, axis, keepdims=keepdims) if ord > 0 else _numpy.min(size, axis, keepdims=keepdims)
    if ord == 0:
        return convert(_numpy.count_nonzero(size, axis, keepdims=keepdims), size.dtype)
    if ord == 2:
        return np.sqrt(_numpy.sum(np.square(size), axis, keepdims=keepdims))
    return _numpy.sum(size**ord, axis, keepdims=keepdims) ** (1.0 / ord)


@traced(np.linalg.matrix_norm)
def _matrix_norm(x: Any, *, keepdims: bool = False, ord: Any = "fro") -> Any:
    size = np.abs(as_tensor(x))
    if ord in ("fro", None):
        return np.sqrt(_numpy.sum(np.square(size), (-2, -1), keepdims=keepdims))
    if ord in (1, -1, np.inf, -np.inf):
        inner, outer = (-2, -1) if abs(ord) == 1 else (-1, -2)
        sums = _numpy.sum(size, inner, keepdims=True)
        found = _numpy.max(sums, outer, keepdims=True) if ord > 0 else _numpy.min(sums, outer, keepdims=True)
        return found if keepdims else _numpy.squeeze(found, (-2, -1))
    raise fail(f"the norm {ord!r} of matrices needs singular values, which are not traced; use 'fro', 1 or inf")


traced(np.linalg.matmul)(contraction.matmul)
traced(np.dot)(contraction.dot)
traced(np.tensordot, np.linalg.tensordot)(contraction.tensordot)
traced(np.einsum)(contraction.einsum)


# Filters and polynomials


@traced(np.correlate)
def _correlate(a: Any, v: Any, mode: str = "valid") -> Any:
    like = common_float(a, v)
    x, taps = as_tensor(a, like), as_tensor(v, like)
    if x.ndim != 1 or taps.ndim != 1 or not x.size or not taps.size:
        raise ShapeError(f"a correlation needs two vectors with elements, and got {x.value!r} and {taps.value!r}")
    if not x.value.dtype.is_float:
        raise fail("a correlation is traced with floating-point numbers; convert them with astype first")
    if x.size < taps.size:
        return _numpy.flip(_correlate(taps, x, mode))
    n = taps.size
    margins = {"valid": (0, 0), "same": (n // 2, (n - 1) // 2), "full": (n - 1, n - 1)}
    if mode not in margins:
        raise fail(f"the mode {mode!r} is not known; use {', '.join(margins)}")
    images, weights = (convert(each, x.dtype).reshape(1, 1, -1).value for each in (x, taps))
    return wrap(conv(current().at(), images, weights, pads=[margins[mode]])).reshape(-1)


@traced(np.convolve)
def _convolve(a: Any, v: Any, mode: str = "full") -> Any:
    like = common_float(a, v)
    x, taps = as_tensor(a, like), as_tensor(v, like)
    if x.size < taps.size:
        x, taps = taps, x
    return _correlate(x, _numpy.flip(taps), mode)


@traced(np.polyval)
def _polyval(p: Any, x: Any) -> Any:
    like = common_float(p, x)
    factors, at = as_tensor(p, like), as_tensor(x, like)
    found: Any = np.zeros_like(at)
    for i in range(factors.shape[0]):
        found = found * at + factors[i]
    return found


@traced(np.vander)
def _vander(x: Any, N: int | None = None, increasing: bool = False) -> Any:
    column = as_tensor(x)
    if column.ndim != 1:
        raise ShapeError(f"np.vander needs a vector, and got {column.value!r}")
    count = column.size if N is None else whole("the columns of np.vander", N, 0)
    powers = [column**n for n in range(count)]
    return _numpy.stack(powers if increasing else powers[::-1], 1)


@traced(np.meshgrid)
def _meshgrid(*xi: Any, copy: bool = True, sparse: bool = False, indexing: str = "xy") -> tuple[Any, ...]:
    if indexing not in ("xy", "ij"):
        raise fail(f"np.meshgrid(indexing={indexing!r}): use 'xy' or 'ij'")
    like, rank = common_float(*xi), len(xi)
    places = list(range(rank))
    if indexing == "xy" and rank > 1:
        places[:2] = [1, 0]
    grids = [as_tensor(x, like).reshape([-1 if i == at else 1 for i in range(rank)]) for x, at in zip(xi, places)]
    return tuple(grids) if sparse else _numpy.broadcast_arrays(*grids)

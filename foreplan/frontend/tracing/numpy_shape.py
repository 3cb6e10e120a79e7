"""NumPy's functions of shapes and axes, on traced tensors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from foreplan.base.errors import ShapeError
from foreplan.frontend.tracing.dispatch import as_axes, as_axis, traced
from foreplan.frontend.tracing.elementwise import convert
from foreplan.frontend.tracing.tensor import Axes, Tensor, as_tensor, common_float, wrap
from foreplan.frontend.tracing.tracer import current
from foreplan.graph.types import broadcast_shapes
from foreplan.ops import shape as shapes


@traced(np.shape)
def _shape(a: Tensor) -> tuple[int, ...]:
    return a.shape


@traced(np.ndim)
def _ndim(a: Tensor) -> int:
    return a.ndim


@traced(np.size)
def _size(a: Tensor, axis: int | None = None) -> int:
    return a.size if axis is None else a.shape[axis]


@traced(np.copy)
def _copy(a: Any) -> Tensor:
    return as_tensor(a)


traced(np.astype)(convert)


@traced(np.reshape)
def _reshape(a: Any, shape: int | Sequence[int]) -> Tensor:
    x = as_tensor(a)
    wanted = tuple(int(extent) for extent in np.atleast_1d(shape)) if not isinstance(shape, tuple) else shape
    known = int(np.prod([extent for extent in wanted if extent != -1], dtype=np.int64))
    fits = x.size == known if -1 not in wanted else known and x.size % known == 0
    if not fits or list(wanted).count(-1) > 1 or any(extent < -1 for extent in wanted):
        raise ShapeError(f"reshape of {x.value!r}: its {x.size} elements do not fit the shape {list(wanted)}")
    return wrap(shapes.reshape(current().at(), x.value, wanted))


@traced(np.ravel)
def _ravel(a: Any) -> Tensor:
    return _reshape(a, (-1,))


@traced(np.transpose)
def _transpose(a: Any, axes: Sequence[int] | None = None) -> Tensor:
    x = as_tensor(a)
    perm = tuple(range(x.ndim))[::-1] if axes is None else tuple(as_axis(axis, x.ndim) for axis in axes)
    tracer = current()
    value = shapes.transpose(tracer.at(), x.value, perm)
    if x.ndim >= 2 and perm == (*range(x.ndim - 2), x.ndim - 1, x.ndim - 2):
        tracer.swapped[value] = x.value
    return wrap(value)


@traced(np.swapaxes)
def _swapaxes(a: Any, axis1: int, axis2: int) -> Tensor:
    perm = list(range(np.ndim(a)))
    first, second = as_axis(axis1, len(perm)), as_axis(axis2, len(perm))
    perm[first], perm[second] = perm[second], perm[first]
    return _transpose(a, perm)


@traced(np.matrix_transpose)
def _matrix_transpose(x: Any) -> Tensor:
    return _swapaxes(x, -1, -2)


@traced(np.moveaxis)
def _moveaxis(a: Any, source: int | Sequence[int], destination: int | Sequence[int]) -> Tensor:
    rank = np.ndim(a)
    moved = {
        as_axis(int(d), rank): as_axis(int(s), rank) for s, d in zip(np.atleast_1d(source), np.atleast_1d(destination))
    }
    rest = iter([i for i in range(rank) if i not in moved.values()])
    return _transpose(a, [moved[i] if i in moved else next(rest) for i in range(rank)])


@traced(np.expand_dims)
def _expand_dims(a: Any, axis: int | Sequence[int]) -> Tensor:
    x = as_tensor(a)
    rank = x.ndim + len(np.atleast_1d(axis))
    new, extents = as_axes(axis, rank), iter(x.shape)
    return _reshape(x, tuple(1 if i in new else next(extents) for i in range(rank)))


@traced(np.squeeze)
def _squeeze(a: Any, axis: Axes = None) -> Tensor:
    x = as_tensor(a)
    gone = [i for i, n in enumerate(x.shape) if n == 1] if axis is None else as_axes(axis, x.ndim)
    if any(x.shape[i] != 1 for i in gone):
        raise ShapeError(f"squeeze of {x.value!r} along {axis}: only axes of extent 1 can go")
    return _reshape(x, tuple(n for i, n in enumerate(x.shape) if i not in gone))


@traced(np.broadcast_to)
def _broadcast_to(array: Any, shape: int | Sequence[int]) -> Tensor:
    x = as_tensor(array)
    return wrap(shapes.broadcast_to(current().at(), x.value, tuple(int(n) for n in np.atleast_1d(shape))))


@traced(np.broadcast_arrays)
def _broadcast_arrays(*args: Any) -> tuple[Tensor, ...]:
    tensors = [as_tensor(arg, common_float(*args)) for arg in args]
    common = broadcast_shapes(*(tensor.shape for tensor in tensors))
    return tuple(_broadcast_to(tensor, common) for tensor in tensors)


@traced(np.full_like)
def _full_like(a: Any, fill_value: Any, dtype: Any = None) -> Tensor:
    one = convert(as_tensor(np.asarray(fill_value)), as_tensor(a).value.dtype if dtype is None else dtype)
    return _broadcast_to(one, as_tensor(a).shape)


@traced(np.zeros_like)
def _zeros_like(a: Any, dtype: Any = None) -> Tensor:
    return _full_like(a, 0, dtype)


@traced(np.ones_like)
def _ones_like(a: Any, dtype: Any = None) -> Tensor:
    return _full_like(a, 1, dtype)


@traced(np.empty_like)
def _empty_like(prototype: Any, dtype: Any = None) -> Tensor:
    return _full_like(prototype, 0, dtype)


def _at_least(rank: int, *arys: Any) -> Any:
    found = [_grown(as_tensor(x), rank) for x in arys]
    return found[0] if len(found) == 1 else tuple(found)


def _grown(x: Tensor, rank: int) -> Tensor:
    """A tensor with at least so many axes, placed as NumPy does it: [n] → [1, n] → [1, n, 1], [n, m] → [n, m, 1]."""
    if x.ndim >= rank:
        return x
    shape = {1: (1, *x.shape, 1), 2: (*x.shape, 1)}.get(x.ndim, (1,) * rank) if rank == 3 else (1,) * rank
    return _reshape(x, (1, *x.shape) if rank == 2 and x.ndim == 1 else shape)


traced(np.atleast_1d)(partial(_at_least, 1))
traced(np.atleast_2d)(partial(_at_least, 2))
traced(np.atleast_3d)(partial(_at_least, 3))


@traced(np.rollaxis)
def _rollaxis(a: Any, axis: int, start: int = 0) -> Tensor:
    rank = np.ndim(a)
    axis = as_axis(axis, rank)
    start = start + rank if start < 0 else start
    return _moveaxis(a, axis, start - 1 if axis < start else start)


@traced(np.rot90)
def _rot90(m: Any, k: int = 1, axes: Sequence[int] = (0, 1)) -> Any:
    x = as_tensor(m)
    first, second = (as_axis(axis, x.ndim) for axis in axes)
    if first == second:
        raise ShapeError(f"np.rot90 of {x.value!r} needs two different axes, and got {tuple(axes)}")
    if k % 4 == 2:
        return np.flip(x, (first, second))
    if k % 4 == 1:
        return _swapaxes(np.flip(x, second), first, second)
    return np.flip(_swapaxes(x, first, second), second) if k % 4 else x


@traced(np.result_type)
def _result_type(*arrays_and_dtypes: Any) -> np.dtype:
    return np.result_type(*(x.dtype if isinstance(x, Tensor) else x for x in arrays_and_dtypes))

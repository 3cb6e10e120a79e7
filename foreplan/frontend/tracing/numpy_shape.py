"""NumPy's functions that arrange elements, on traced tensors: shapes, joins, cuts and repeats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from foreplan.errors import ShapeError
from foreplan.frontend.tracing.dispatch import as_axes, as_axis, traced, wrap
from foreplan.frontend.tracing.elementwise import convert
from foreplan.frontend.tracing.tensor import Axes, Tensor, as_tensor, common_float
from foreplan.frontend.tracing.tracer import current, fail
from foreplan.graph.types import broadcast_shapes
from foreplan.ops import join
from foreplan.ops import shape as shapes
from foreplan.ops.expr import promote


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


# Joining, cutting and repeating


@traced(np.concatenate)
def _concatenate(arrays: Sequence[Any], axis: int | None = 0) -> Tensor:
    like = common_float(*arrays)
    tensors = [as_tensor(array, like) for array in arrays]
    if axis is None:
        tensors, axis = [tensor.reshape(-1) for tensor in tensors], 0
    dtype = tensors[0].value.dtype
    for tensor in tensors[1:]:
        dtype = promote(dtype, tensor.value.dtype)
    values = [convert(tensor, dtype).value for tensor in tensors]
    at = as_axis(axis, tensors[0].ndim)
    return wrap(join.concat(current().at(), values, at) if len(values) > 1 else values[0])


@traced(np.stack)
def _stack(arrays: Sequence[Any], axis: int = 0) -> Tensor:
    like = common_float(*arrays)
    axis = as_axis(axis, np.ndim(arrays[0]) + 1)
    return _concatenate([_expand_dims(as_tensor(array, like), axis) for array in arrays], axis)


@traced(np.vstack)
def _vstack(tup: Sequence[Any]) -> Tensor:
    return _concatenate([as_tensor(x) if np.ndim(x) > 1 else _reshape(x, (1, -1)) for x in tup], 0)


@traced(np.hstack)
def _hstack(tup: Sequence[Any]) -> Tensor:
    return _concatenate(tup, 0 if np.ndim(tup[0]) == 1 else 1)


@traced(np.split)
def _split(ary: Any, indices_or_sections: int | Sequence[int], axis: int = 0) -> list[Tensor]:
    x = as_tensor(ary)
    axis = as_axis(axis, x.ndim)
    extent = x.shape[axis]
    if isinstance(indices_or_sections, int):
        if indices_or_sections < 1 or extent % indices_or_sections:
            raise ShapeError(
                f"split of {x.value!r}: axis {axis} has {extent} elements, not {indices_or_sections} equal parts"
            )
        size = extent // indices_or_sections
        cuts = list(range(size, extent, size))
    else:
        cuts = [int(cut) for cut in indices_or_sections]
    before = (slice(None),) * axis
    return [x[(*before, slice(low, high))] for low, high in zip([0, *cuts], [*cuts, extent])]


@traced(np.pad)
def _pad(array: Any, pad_width: Any, mode: str = "constant", constant_values: float = 0) -> Tensor:
    x = as_tensor(array)
    if mode not in join.MODES:
        raise fail(f"np.pad(mode={mode!r}) cannot be traced; use {', '.join(join.MODES)}")
    pads = tuple((int(low), int(high)) for low, high in np.broadcast_to(pad_width, (x.ndim, 2)))
    return wrap(join.pad(current().at(), x.value, pads, constant_values, mode))


@traced(np.tile)
def _tile(A: Any, reps: int | Sequence[int]) -> Tensor:
    x = as_tensor(A)
    times = [int(n) for n in np.atleast_1d(reps)]
    times = [1] * (x.ndim - len(times)) + times
    extents = [1] * (len(times) - x.ndim) + list(x.shape)
    split = _reshape(x, tuple(n for extent in extents for n in (1, extent)))
    repeated = _broadcast_to(split, [n for pair in zip(times, extents) for n in pair])
    return _reshape(repeated, tuple(n * extent for n, extent in zip(times, extents)))


@traced(np.repeat)
def _repeat(a: Any, repeats: int, axis: int | None = None) -> Tensor:
    x = as_tensor(a)
    if not isinstance(repeats, int):
        raise fail("np.repeat is traced with one number of repeats; use np.take with a list of indices for others")
    x, axis = (x.reshape(-1), 0) if axis is None else (x, as_axis(axis, x.ndim))
    before, after = x.shape[: axis + 1], x.shape[axis + 1 :]
    repeated = _broadcast_to(_reshape(x, (*before, 1, *after)), (*before, repeats, *after))
    return _reshape(repeated, (*before[:-1], before[-1] * repeats, *after))


@traced(np.flip)
def _flip(m: Any, axis: Axes = None) -> Tensor:
    x = as_tensor(m)
    axes = as_axes(axis, x.ndim)
    return x[tuple(slice(None, None, -1) if i in axes else slice(None) for i in range(x.ndim))]


@traced(np.roll)
def _roll(a: Any, shift: int, axis: int | None = None) -> Tensor:
    x = as_tensor(a)
    if axis is None:
        return _reshape(_roll(x.reshape(-1), shift, 0), x.shape)
    axis = as_axis(axis, x.ndim)
    cut = -shift % max(x.shape[axis], 1)
    first, second = _split(x, [cut], axis)
    return x if cut == 0 else _concatenate([second, first], axis)


@traced(np.diff)
def _diff(a: Any, n: int = 1, axis: int = -1) -> Any:
    x = as_tensor(a)
    before = (slice(None),) * as_axis(axis, x.ndim)
    for _ in range(n):
        x = x[(*before, slice(1, None))] - x[(*before, slice(None, -1))]
    return x

"""NumPy's functions that join, cut and repeat tensors, on traced tensors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from foreplan.base.arguments import whole
from foreplan.base.errors import ShapeError
from foreplan.frontend.tracing.dispatch import as_axes, as_axis, traced
from foreplan.frontend.tracing.elementwise import convert
from foreplan.frontend.tracing.numpy_order import along
from foreplan.frontend.tracing.tensor import Axes, Tensor, as_tensor, common_float, wrap
from foreplan.frontend.tracing.tracer import current, fail
from foreplan.ops import join
from foreplan.ops.expr import promote

_numpy: Any = np  # whose stubs know arrays only


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
    return _concatenate([_numpy.expand_dims(as_tensor(array, like), axis) for array in arrays], axis)


@traced(np.vstack)
def _vstack(tup: Sequence[Any]) -> Tensor:
    return _concatenate([as_tensor(x) if np.ndim(x) > 1 else _numpy.reshape(x, (1, -1)) for x in tup], 0)


@traced(np.hstack)
def _hstack(tup: Sequence[Any]) -> Tensor:
    return _concatenate(tup, 0 if np.ndim(tup[0]) == 1 else 1)


@traced(np.dstack)
def _dstack(tup: Sequence[Any]) -> Tensor:
    return _concatenate([_numpy.atleast_3d(as_tensor(x)) for x in tup], 2)


@traced(np.column_stack)
def _column_stack(tup: Sequence[Any]) -> Tensor:
    return _concatenate([as_tensor(x) if np.ndim(x) > 1 else _numpy.reshape(as_tensor(x), (-1, 1)) for x in tup], 1)


@traced(np.append)
def _append(arr: Any, values: Any, axis: int | None = None) -> Tensor:
    return _concatenate([arr, values], axis)


@traced(np.block)
def _block(arrays: Any) -> Any:
    def depth(part: Any) -> int:
        return 1 + max(map(depth, part)) if isinstance(part, list) else 0

    def joined(part: Any, axis: int) -> Any:
        if not isinstance(part, list):
            found = as_tensor(part)
            return found.reshape((1,) * (rank - found.ndim) + found.shape)
        return _concatenate([joined(each, axis + 1) for each in part], axis)

    def ranks(part: Any) -> int:
        return max(map(ranks, part)) if isinstance(part, list) else int(np.ndim(part))

    levels = depth(arrays)
    rank = max(levels, ranks(arrays))
    return joined(arrays, rank - levels)


@traced(np.unstack)
def _unstack(x: Any, /, *, axis: int = 0) -> tuple[Any, ...]:
    tensor = as_tensor(x)
    before = (slice(None),) * as_axis(axis, tensor.ndim)
    return tuple(tensor[(*before, i)] for i in range(tensor.shape[len(before)]))


@traced(np.split)
def _split(ary: Any, indices_or_sections: int | Sequence[int], axis: int = 0) -> list[Tensor]:
    x = as_tensor(ary)
    axis = as_axis(axis, x.ndim)
    if np.ndim(indices_or_sections) == 0:
        parts = whole("the number of parts", indices_or_sections, 1)
        if x.shape[axis] % parts:
            raise ShapeError(f"split of {x.value!r}: axis {axis} has {x.shape[axis]} elements, not {parts} equal parts")
    return _array_split(x, indices_or_sections, axis)


@traced(np.array_split)
def _array_split(ary: Any, indices_or_sections: int | Sequence[int], axis: int = 0) -> list[Tensor]:
    x = as_tensor(ary)
    axis = as_axis(axis, x.ndim)
    extent = x.shape[axis]
    if np.ndim(indices_or_sections) == 0:
        parts = whole("the number of parts", indices_or_sections, 1)
        size, more = divmod(extent, parts)
        cuts = [i * size + min(i, more) for i in range(1, parts)]
    else:
        cuts = [whole("a place to split at", cut, -(1 << 62)) for cut in list(indices_or_sections)]  # type: ignore[arg-type]
    before = (slice(None),) * axis
    return [x[(*before, slice(low, high))] for low, high in zip([0, *cuts], [*cuts, extent])]


@traced(np.hsplit)
def _hsplit(ary: Any, indices_or_sections: Any) -> list[Tensor]:
    return _split(ary, indices_or_sections, 0 if np.ndim(ary) == 1 else 1)


@traced(np.vsplit)
def _vsplit(ary: Any, indices_or_sections: Any) -> list[Tensor]:
    return _split(ary, indices_or_sections, 0)


@traced(np.dsplit)
def _dsplit(ary: Any, indices_or_sections: Any) -> list[Tensor]:
    return _split(ary, indices_or_sections, 2)


@traced(np.delete)
def _delete(arr: Any, obj: Any, axis: int | None = None) -> Tensor:
    if isinstance(obj, Tensor):
        raise fail("np.delete with traced indices gives a shape that depends on data; use np.where with a mask")
    x, axis = along(arr, axis)
    kept = np.delete(np.arange(x.shape[axis]), obj)
    return x[(*(slice(None),) * axis, kept)]


@traced(np.insert)
def _insert(arr: Any, obj: Any, values: Any, axis: int | None = None) -> Tensor:
    if np.ndim(obj) or isinstance(obj, Tensor | slice):
        raise fail("np.insert is traced with one index, a number; use np.concatenate for others")
    x, axis = along(arr, axis)
    at = whole("the index of np.insert", obj, -x.shape[axis], x.shape[axis]) % (x.shape[axis] + (obj >= 0))
    new = convert(as_tensor(values, x.value.dtype), x.value.dtype)
    new = _numpy.moveaxis(new.reshape((1,) * (x.ndim - new.ndim) + new.shape), 0, axis)
    new = _numpy.broadcast_to(new, (*x.shape[:axis], new.shape[axis], *x.shape[axis + 1 :]))
    before = (slice(None),) * axis
    return _concatenate([x[(*before, slice(0, at))], new, x[(*before, slice(at, None))]], axis)


@traced(np.resize)
def _resize(a: Any, new_shape: int | Sequence[int]) -> Any:
    x = as_tensor(a).reshape(-1)
    shape = tuple(int(n) for n in np.atleast_1d(new_shape))
    return x[np.arange(int(np.prod(shape))) % max(x.shape[0], 1)].reshape(shape)


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
    split = _numpy.reshape(x, tuple(n for extent in extents for n in (1, extent)))
    repeated = _numpy.broadcast_to(split, [n for pair in zip(times, extents) for n in pair])
    return _numpy.reshape(repeated, tuple(n * extent for n, extent in zip(times, extents)))


@traced(np.repeat)
def _repeat(a: Any, repeats: int, axis: int | None = None) -> Tensor:
    if not isinstance(repeats, int):
        raise fail("np.repeat is traced with one number of repeats; use np.take with a list of indices for others")
    x, axis = along(a, axis)
    before, after = x.shape[: axis + 1], x.shape[axis + 1 :]
    repeated = _numpy.broadcast_to(_numpy.reshape(x, (*before, 1, *after)), (*before, repeats, *after))
    return _numpy.reshape(repeated, (*before[:-1], before[-1] * repeats, *after))


@traced(np.flip)
def _flip(m: Any, axis: Axes = None) -> Tensor:
    x = as_tensor(m)
    axes = as_axes(axis, x.ndim)
    return x[tuple(slice(None, None, -1) if i in axes else slice(None) for i in range(x.ndim))]


@traced(np.fliplr)
def _fliplr(m: Any) -> Tensor:
    return _flip(m, 1)


@traced(np.flipud)
def _flipud(m: Any) -> Tensor:
    return _flip(m, 0)


@traced(np.roll)
def _roll(a: Any, shift: int | Sequence[int], axis: Axes = None) -> Tensor:
    x = as_tensor(a)
    if axis is None:
        return _numpy.reshape(_roll(x.reshape(-1), shift, 0), x.shape)
    moves, axes = np.broadcast_arrays(shift, axis)
    for move, each in zip(moves.ravel().tolist(), axes.ravel().tolist()):
        x = _rolled(x, whole("a shift", move, -(1 << 62)), as_axis(each, x.ndim))
    return x


def _rolled(x: Tensor, shift: int, axis: int) -> Tensor:
    cut = -shift % max(x.shape[axis], 1)
    first, second = _array_split(x, [cut], axis)
    return x if cut == 0 else _concatenate([second, first], axis)


def _shifted(sign: int, x: Any, axes: Axes = None) -> Tensor:
    tensor = as_tensor(x)
    found = as_axes(axes, tensor.ndim)
    halves = [tensor.shape[axis] // 2 if sign > 0 else -(tensor.shape[axis] // 2) for axis in found]
    return _roll(tensor, halves, found)


traced(np.fft.fftshift)(partial(_shifted, 1))
traced(np.fft.ifftshift)(partial(_shifted, -1))


@traced(np.diff)
def _diff(a: Any, n: int = 1, axis: int = -1) -> Any:
    x = as_tensor(a)
    before = (slice(None),) * as_axis(axis, x.ndim)
    for _ in range(n):
        x = x[(*before, slice(1, None))] - x[(*before, slice(None, -1))]
    return x


@traced(np.ediff1d)
def _ediff1d(ary: Any, to_end: Any = None, to_begin: Any = None) -> Any:
    x = as_tensor(ary)
    middle = _diff(x.reshape(-1))
    ends = [None if end is None else as_tensor(end, x.value.dtype).reshape(-1) for end in (to_begin, to_end)]
    return _concatenate([part for part in (ends[0], middle, ends[1]) if part is not None])


@traced(np.linspace)
def _linspace(start: Any, stop: Any, num: int = 50, endpoint: bool = True, axis: int = 0) -> Any:
    count = whole("the number of points", num, 0)
    low, high = _numpy.broadcast_arrays(start, stop)
    low, high = (x if x.value.dtype.is_float else convert(x, "float32") for x in (low, high))
    share = np.arange(count) / max(count - 1 if endpoint else count, 1)
    rows = share.astype(low.dtype).reshape(-1, *(1,) * low.ndim)
    return _numpy.moveaxis(low + (high - low) * rows, 0, axis)

"""`x[…]` on traced tensors: integers, slices, None, Ellipsis, and integer tensors or arrays as indices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from foreplan.base.errors import ShapeError
from foreplan.frontend.tracing.dispatch import as_axis
from foreplan.frontend.tracing.elementwise import apply, convert
from foreplan.frontend.tracing.methods import for_tensors
from foreplan.frontend.tracing.tensor import Tensor, as_tensor, wrap
from foreplan.frontend.tracing.tracer import current, fail
from foreplan.graph.types import broadcast_shapes
from foreplan.ops.expr import where
from foreplan.ops.index import gather
from foreplan.ops.shape import Slice, reshape


@for_tensors
def index(x: Tensor, key: Any) -> Tensor:
    """`x[key]` by NumPy's rules, with every shape static.

    Raises:
        TraceError: a key that depends on values, or that combines indices in a way that is not traced.
        ShapeError: an index that is out of range, or too many indices.
    """
    keys = _expand(key if isinstance(key, tuple) else (key,), x.ndim)
    b = current().at()
    starts, extents, steps, shape = [], [], [], []
    chosen: list[tuple[int, Any]] = []  # (axis of the sliced tensor, indices)
    places: list[str] = []  # the kind of each key: advanced keys must stand together
    axis = 0
    for part in keys:
        if part is None:
            shape.append(1)
            places.append("new")
            continue
        start, count, step = _range(part, x.shape[axis], axis)
        starts.append(start)
        extents.append(count)
        steps.append(step)
        axis += 1
        if isinstance(part, int | np.integer):
            places.append("int")
            continue
        if not isinstance(part, slice):
            chosen.append((len(shape), part))
        places.append("slice" if isinstance(part, slice) else "tensor")
        shape.append(count)
    value = as_tensor(x).value
    if tuple(extents) != x.shape or any(step != 1 for step in steps):
        value = b.apply(Slice(tuple(starts), tuple(extents), tuple(steps)), value)
    result = wrap(reshape(b, value, shape))
    if chosen:
        _check_adjacent(places)
        return _gather(result, chosen)
    return result


def _expand(keys: Sequence[Any], rank: int) -> list[Any]:
    """Keys with the ellipsis spelled out, one for each axis (and each None)."""
    found = [_as_key(key) for key in keys]
    dots = [i for i, key in enumerate(found) if key is Ellipsis]
    given = sum(key is not None and key is not Ellipsis for key in found)
    if len(dots) > 1 or given > rank:
        raise ShapeError(f"{given} indices for a tensor with {rank} axes" if given > rank else "two ellipses (...)")
    fill = [slice(None)] * (rank - given)
    at = dots[0] if dots else len(found)
    return [*found[:at], *fill, *found[at + 1 :]]


def _as_key(key: Any) -> Any:
    if key is None or key is Ellipsis:
        return key
    if isinstance(key, slice):
        for bound in (key.start, key.stop, key.step):
            if isinstance(bound, Tensor):
                raise fail(
                    "a slice bound that is traced would make the shape depend on data; index with np.arange(n) + i"
                )
        return key
    if isinstance(key, bool | np.bool_):
        raise fail("indexing with True or False is not traced; use None for a new axis")
    if isinstance(key, int | np.integer):
        return int(key)
    if isinstance(key, list | np.ndarray):
        array = np.asarray(key)
        if array.dtype == bool and array.ndim == 1:
            return np.flatnonzero(array)
        if array.dtype.kind in "iu":
            return array
    if isinstance(key, Tensor):
        if key.value.dtype.category in ("int", "uint"):
            return key
        if key.value.dtype.category == "bool":
            raise fail(
                "indexing with a traced mask gives a shape that depends on data; use np.where(mask, x, 0), "
                "and divide sums by mask.sum()"
            )
    raise fail(f"cannot index with {key!r}; use integers, slices, None, ... or integer tensors")


def _range(key: Any, extent: int, axis: int) -> tuple[int, int, int]:
    """Start, count and step of one axis."""
    if isinstance(key, int):
        if not -extent <= key < extent:
            raise ShapeError(f"the index {key} is outside axis {axis}, which has {extent} elements")
        return key % extent, 1, 1
    if isinstance(key, slice):
        try:
            found = range(*key.indices(extent))
        except (TypeError, ValueError) as error:
            raise fail(f"the slice {key} of axis {axis}: {error}") from None
        return (found.start, len(found), found.step) if len(found) else (0, 0, 1)
    return 0, extent, 1


def _check_adjacent(places: Sequence[str]) -> None:
    """NumPy moves the axes of separated indices to the front; this form is refused."""
    advanced = [i for i, place in enumerate(places) if place in ("tensor", "int")]
    if advanced[-1] - advanced[0] + 1 != len(advanced):
        raise fail("integer and tensor indices with a slice or None between them are not traced; index in two steps")


def _gather(x: Tensor, chosen: list[tuple[int, Any]]) -> Tensor:
    """Elements at one index tensor, or at several that broadcast together and stand at neighbouring axes."""
    tracer, b = current(), current().at()
    if len(chosen) == 1:
        axis, indices = chosen[0]
        return Tensor(tracer, gather(b, x.value, as_tensor(indices).value, axis))
    first, count = chosen[0][0], len(chosen)
    extents = x.shape[first : first + count]
    broadcast_shapes(*(tuple(indices.shape) for _, indices in chosen))
    merged = reshape(b, x.value, (*x.shape[:first], math.prod(extents), *x.shape[first + count :]))
    flat: Any = 0
    for (axis, indices), extent in zip(chosen, extents):
        if isinstance(indices, np.ndarray):
            if indices.size and not (-extent <= indices.min() and indices.max() < extent):
                raise ShapeError(f"an index of axis {axis} is outside its {extent} elements")
            indices = np.where(indices < 0, indices + extent, indices).astype(np.int64)
        else:
            indices = apply("wrap", lambda i, n=extent: where(i < 0, i + n, i), convert(indices, "int64"))
        flat = flat * extent + indices
    if isinstance(flat, np.ndarray):
        flat = as_tensor(flat)
    return Tensor(tracer, gather(b, merged, flat.value, first))


def take(x: Any, indices: Any, axis: int | None = None, mode: str = "raise") -> Tensor:
    """np.take: elements at integer indices of one axis, of the flattened tensor by default."""
    if mode != "raise":
        raise fail(f"np.take(mode={mode!r}) cannot be traced; limit the indices with np.clip")
    tensor = as_tensor(x)
    if axis is None:
        tensor, axis = tensor.reshape(-1), 0
    before = (slice(None),) * as_axis(axis, tensor.ndim)
    return index(tensor, (*before, indices if isinstance(indices, int | Tensor) else np.asarray(indices)))

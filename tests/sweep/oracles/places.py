"""Views, copies, gathers and scatters: element by element, or by NumPy's own function of that name."""

from __future__ import annotations

from typing import Any

import numpy as np

from foreplan.graph import as_dtype
from tests.sweep.oracles.expressions import values_of

Array = np.ndarray
Arrays = list[Array]


def reshape(op: Any, x: Array) -> Arrays:
    return [np.array(x.reshape(-1).tolist(), x.dtype).reshape(op.shape) if x.size < 64 else x.reshape(op.shape)]


def bitcast(op: Any, x: Array) -> Arrays:
    dtype = as_dtype(op.dtype).numpy
    return [np.frombuffer(x.tobytes(), dtype).reshape(x.shape)]


def transpose(op: Any, x: Array) -> Arrays:
    y = np.empty([x.shape[i] for i in op.perm], x.dtype)
    for at in np.ndindex(*x.shape):
        y[tuple(at[i] for i in op.perm)] = x[at]
    return [y]


def _places(count: int, start: int, step: int) -> list[int]:
    return [start + i * step for i in range(count)]


def slice_(op: Any, x: Array) -> Arrays:
    for axis, (start, count, step) in enumerate(zip(op.starts, op.shape, op.steps)):
        x = x.take(np.array(_places(count, start, step), np.int64), axis)
    return [x]


def unslice(op: Any, x: Array) -> Arrays:
    y = np.zeros(op.shape, x.dtype)
    y[np.ix_(*(_places(n, start, step) for n, start, step in zip(x.shape, op.starts, op.steps)))] = x
    return [y]


def broadcast(op: Any, x: Array) -> Arrays:
    return [np.broadcast_to(x, op.shape)]


def concat(op: Any, *xs: Array) -> Arrays:
    return [np.concatenate(xs, op.axis)]


def pad(op: Any, x: Array) -> Arrays:
    more = {"constant_values": op.value} if op.mode == "constant" else {}
    value = np.asarray(op.value).astype(x.dtype) if op.mode == "constant" else None
    return [np.pad(x, op.pads, op.mode, **({"constant_values": value} if more else {}))]


def unstack(op: Any, x: Array) -> Arrays:
    return [x[i] for i in range(len(x))]


def identity(op: Any, x: Array, *others: Array) -> Arrays:
    return [x]


def _index(indices: Array, extent: int) -> Array:
    """Python's remainder: from the end, and round."""
    return np.array([int(i) % extent for i in indices.reshape(-1).tolist()], np.int64).reshape(indices.shape)


def gather(op: Any, data: Array, indices: Array) -> Arrays:
    return [data.take(_index(indices, data.shape[op.axis]), op.axis)]


def scatter_add(op: Any, indices: Array, updates: Array, *base: Array) -> Arrays:
    y = base[0].copy() if base else np.zeros(op.shape, updates.dtype)
    before = (slice(None),) * op.axis
    flat = _index(indices, op.shape[op.axis]).reshape(-1)
    rows = updates.reshape(*op.shape[: op.axis], flat.size, *op.shape[op.axis + 1 :])
    for j, i in enumerate(flat.tolist()):
        y[(*before, i)] += rows[(*before, j)]
    return [y]


def first_equal(op: Any, indices: Array) -> Arrays:
    first: dict[int, int] = {}
    places = _index(indices, op.extent).tolist()
    return [np.array([first.setdefault(place, i) for i, place in enumerate(places)], np.int64)]


def map_scatter_add(op: Any, indices: Array, updates: Array, *read: Array) -> Arrays:
    return scatter_add(op, indices, updates, np.array(np.broadcast_to(values_of(op.expr, read), op.shape)))


def scatter_reduce(op: Any, indices: Array, updates: Array, base: Array) -> Arrays:
    y, before = base.copy(), (slice(None),) * op.axis
    flat = _index(indices, op.shape[op.axis]).reshape(-1)
    rows = updates.reshape(*op.shape[: op.axis], flat.size, *op.shape[op.axis + 1 :])
    combine = {"mul": np.multiply, "min": np.fmin, "max": np.fmax}[op.how]
    for j, i in enumerate(flat.tolist()):
        y[(*before, i)] = combine(y[(*before, i)], rows[(*before, j)])
    return [y]


def gather_elements(op: Any, data: Array, indices: Array) -> Arrays:
    return [np.take_along_axis(data, _index(indices, data.shape[op.axis]), op.axis)]


def scatter_elements_add(op: Any, indices: Array, updates: Array) -> Arrays:
    y, where = np.zeros(op.shape, updates.dtype), _index(indices, op.shape[op.axis])
    for at in np.ndindex(*indices.shape):
        y[(*at[: op.axis], where[at], *at[op.axis + 1 :])] += updates[at]
    return [y]

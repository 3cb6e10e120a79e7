"""ONNX ops that pick and place elements: gather, scatter, one-hot, compress."""

from __future__ import annotations

import math

import numpy as np

from foreplan.frontend.onnx.module.signature import Call
from foreplan.frontend.onnx.node import OnnxNode, Operand, translates
from foreplan.frontend.onnx.tensors import Constant, filled, from_array
from foreplan.graph import TensorType, Value, as_dtype
from foreplan.graph.types import INT64, Shape
from foreplan.ops.expr import Expr, call, cast, where
from foreplan.ops.index import ScatterAdd, check_known, gather, gather_nd, one_hot, positions
from foreplan.ops.index_elements import ScatterElementsAdd, gather_elements
from foreplan.ops.join import concat
from foreplan.ops.map import convert, elementwise
from foreplan.ops.scatter_reduce import ScatterReduce
from foreplan.ops.shape import broadcast_to, reshape, slice_axis, transpose, unslice


@translates("Gather")
def _gather(n: OnnxNode) -> Operand:
    data, shape = n.operand(0), n.shape(0)
    axis = n.axis(n.integer("axis", 0), len(shape))
    if n.batch is not None and n.batch.carries(n, 0, axis) and isinstance(n.operand(1), Constant):
        raise n.batch.fixed(n, "it picks items of the batch")
    indices = n.operand(1)
    if isinstance(indices, Constant) and indices.array is not None and indices.array.size == 1:
        # One slice is a view.
        index = n.axis(int(indices.array.reshape(-1)[0]), shape[axis])
        one = slice_axis(n.b, n.as_value(data), axis, index, 1)
        return reshape(n.b, one, (*shape[:axis], *indices.shape, *shape[axis + 1 :]))
    call = Call.of(n.proto)
    is_table = call is not None and call.op.startswith("torch.ops.aten.embedding.")  # which takes no negative index
    return gather(n.b, n.value(0), n.value(1), axis, from_end=not is_table)


@translates("GatherElements")
def _gather_elements(n: OnnxNode) -> Operand:
    return gather_elements(n.b, n.value(0), n.value(1), n.axis(n.integer("axis", 0), len(n.shape(0))))


@translates("GatherND")
def _gather_nd(n: OnnxNode) -> Operand:
    return gather_nd(n.b, n.value(0), n.value(1), n.integer("batch_dims", 0))


def _merge(n: OnnxNode, data: Value, placed: Value, hits: Value | None) -> Value:
    """The data plus the updates; with `hits`, the updates in the places that they hit, and the data elsewhere."""
    if hits is None:
        return elementwise(n.b, lambda x, u: x + u, data, placed)
    return elementwise(n.b, lambda x, u, h: where(h > 0, u, x), data, placed, hits, dtype=data.dtype)


def _how(n: OnnxNode) -> str:
    """What becomes of an element and an update: none (the update replaces it), add, mul, min or max."""
    how = n.text("reduction", "none")
    if how not in ("none", "add", "mul", "min", "max"):
        raise n.fail(f"reduction {how!r} is not none, add, mul, min or max")
    return how


@translates("ScatterElements", "Scatter")
def _scatter_elements(n: OnnxNode) -> Operand:
    data, indices, updates = n.value(0), n.value(1), n.value(2)
    axis = n.axis(n.integer("axis", 0), len(data.shape))
    if updates.type.size == 0:
        return data
    check_known(indices, data.shape[axis])
    if data.dtype.name == "bool":
        raise n.unsupported("it scatters booleans; convert them to integers first")
    how = _how(n)
    if how not in ("none", "add"):
        at = _flat_places(n, indices, data.shape, axis)
        flat, listed = (reshape(n.b, x, (x.type.size,)) for x in (data, updates))
        return reshape(n.b, n.b.apply(ScatterReduce(0, flat.shape, how), at, listed, flat), data.shape)
    inner = (*indices.shape[:axis], data.shape[axis], *indices.shape[axis + 1 :])

    def place(what: Value) -> Value:
        placed = n.b.apply(ScatterElementsAdd(axis, inner), indices, what)
        return unslice(n.b, placed, data.shape, (0,) * len(inner), (1,) * len(inner))

    hits = place(_ones(n, updates.shape)) if how == "none" else None
    return _merge(n, data, place(updates), hits)


def _flat_places(n: OnnxNode, indices: Value, shape: Shape, axis: int) -> Value:
    """The place of each element of `indices`, which count along an axis, in a tensor of a shape as one vector."""
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    starts = np.zeros([1] * len(shape), np.int64)
    for i, (extent, stride) in enumerate(zip(indices.shape, strides)):
        if i != axis:
            around = [extent if j == i else 1 for j in range(len(shape))]
            starts = starts + positions(extent).reshape(around) * stride
    known = n.as_value(from_array(f"{n.output_names[0]}.places", starts))

    def place(index: Expr, start: Expr) -> Expr:
        index = cast(index, "int64")
        return where(index < 0, index + shape[axis], index) * strides[axis] + start

    return reshape(n.b, elementwise(n.b, place, indices, known), (indices.type.size,))


def _ones(n: OnnxNode, shape: Shape) -> Value:
    """A 1 for each update, to count those that arrive at a place."""
    one = n.as_value(filled(f"{n.output_names[0]}.one", TensorType(as_dtype("float32"), ()), 1.0))
    return broadcast_to(n.b, one, shape)


@translates("ScatterND")
def _scatter_nd(n: OnnxNode) -> Operand:
    data, indices, updates = n.value(0), n.value(1), n.value(2)
    depth = indices.shape[-1]
    indexed, rest = data.shape[:depth], data.shape[depth:]
    if updates.shape != (*indices.shape[:-1], *rest) or depth > len(data.shape):
        raise n.misshapen(f"updates {n.type(2)} at indices {n.type(1)} do not fit {n.type(0)}")
    if updates.type.size == 0:
        return data
    for j, extent in enumerate(indexed):
        check_known(indices, extent, (..., j))
    columns = [slice_axis(n.b, indices, len(indices.shape) - 1, j, 1) for j in range(depth)]

    def flat(*parts: Expr) -> Expr:
        place: Expr | None = None
        for part, extent in zip(parts, indexed):
            index = cast(part, "int64")
            index = where(index < 0, index + extent, index)
            place = index if place is None else place * extent + index
        assert place is not None
        return place

    rows = math.prod(indexed)
    at = reshape(n.b, elementwise(n.b, flat, *columns), (math.prod(indices.shape[:-1]),))
    listed = reshape(n.b, updates, (at.shape[0], *rest))
    how = _how(n)
    if how not in ("none", "add"):
        table = reshape(n.b, data, (rows, *rest))
        return reshape(n.b, n.b.apply(ScatterReduce(0, table.shape, how), at, listed, table), data.shape)
    placed = reshape(n.b, n.b.apply(ScatterAdd(0, (rows, *rest)), at, listed), data.shape)
    hits = None
    if how == "none":
        hits = n.b.apply(ScatterAdd(0, (rows,)), at, _ones(n, at.shape))
        hits = reshape(n.b, hits, (*indexed, *(1,) * len(rest)))
    return _merge(n, data, placed, hits)


@translates("OneHot")
def _one_hot(n: OnnxNode) -> Operand:
    indices, depth = n.value(0), int(n.known_scalar(1))
    if indices.dtype.is_float:
        indices = convert(n.b, indices, INT64)
    hits = one_hot(n.b, indices, depth, n.integer("axis", -1), "bool")
    choice, dtype = n.operand(2), n.type(2).dtype
    if isinstance(choice, Constant) and choice.is_foldable and dtype.is_float:
        assert choice.array is not None
        off, on = choice.array.reshape(-1).tolist()
        return elementwise(n.b, lambda h: where(h, on, off), hits, dtype=dtype)
    values = n.value(2)
    low, high = (reshape(n.b, slice_axis(n.b, values, 0, i, 1), ()) for i in range(2))
    return elementwise(n.b, lambda h, on, off: where(h, on, off), hits, high, low, dtype=dtype)


@translates("Compress")
def _compress(n: OnnxNode) -> Operand:
    chosen = np.flatnonzero(n.known(1))
    x = n.value(0)
    if not n.has_attribute("axis"):
        x, axis = reshape(n.b, x, (x.type.size,)), 0
    else:
        axis = n.axis(n.integer("axis"), len(x.shape))
    places = from_array(f"{n.output_names[0]}.places", chosen[chosen < x.shape[axis]].astype(np.int64))
    return gather(n.b, x, n.as_value(places), axis)


@translates("ReverseSequence")
def _reverse_sequence(n: OnnxNode) -> Operand:
    x = n.value(0)
    time, batch = n.integer("time_axis", 0), n.integer("batch_axis", 1)
    if {time, batch} != {0, 1}:
        raise n.fail(f"time_axis {time} and batch_axis {batch} must be 0 and 1")
    steps = positions(x.shape[time]).reshape([-1 if i == time else 1 for i in range(2)])
    at = n.as_value(from_array(f"{n.output_names[0]}.steps", steps))
    lengths = reshape(n.b, n.value(1), [-1 if i == batch else 1 for i in range(2)])
    places = elementwise(n.b, lambda t, length: where(t < length, length - 1 - t, t), at, lengths)
    spread = reshape(n.b, places, (*x.shape[:2], *(1,) * (len(x.shape) - 2)))
    return gather_elements(n.b, x, broadcast_to(n.b, spread, x.shape), time)


@translates("TensorScatter")
def _tensor_scatter(n: OnnxNode) -> Operand:
    past, new = n.value(0), n.value(1)
    rank = len(past.shape)
    axis, mode = n.axis(n.integer("axis", -2), rank), n.text("mode", "linear")
    others = [i for i in range(rank) if i != axis]
    fits = len(new.shape) == rank and axis and all(new.shape[i] == past.shape[i] for i in others)
    if not fits or not 1 <= new.shape[axis] <= past.shape[axis] or mode not in ("linear", "circular"):
        raise n.misshapen(f"{n.type(1)} along axis {axis} ({mode}) does not fit into {n.type(0)}")
    if not n.has(2):
        rest = slice_axis(n.b, past, axis, new.shape[axis], past.shape[axis] - new.shape[axis])
        return concat(n.b, [new, rest], axis)
    batch, length, count = past.shape[0], past.shape[axis], new.shape[axis]
    # For each place of the cache, the row of the update that goes there.
    places = n.as_value(from_array(f"{n.output_names[0]}.places", np.arange(length).reshape(1, -1)))
    begins = reshape(n.b, n.value(2), (batch, 1))
    at = elementwise(n.b, lambda p, w: call("mod", p - cast(w, "int64"), length), places, begins)
    numbers = n.as_value(from_array(f"{n.output_names[0]}.items", np.arange(batch).reshape(-1, 1) * count))
    row = elementwise(n.b, lambda a, i: i + where(a < count, a, 0), at, numbers)
    order = [0, axis, *(i for i in others if i)]
    moved = transpose(n.b, new, order)
    found = gather(n.b, reshape(n.b, moved, (batch * count, *moved.shape[2:])), row)
    found = transpose(n.b, found, [order.index(i) for i in range(rank)])
    spread = reshape(n.b, at, [past.shape[i] if i in (0, axis) else 1 for i in range(rank)])
    return elementwise(n.b, lambda a, u, p: where(a < count, u, p), spread, found, past, dtype=past.dtype)


@translates("NonMaxSuppression")
def _non_max_suppression(n: OnnxNode) -> Operand:
    read = " and ".join(map(repr, n.proto.input[:2]))
    raise n.unsupported(
        "how many boxes it selects depends on the data, and shapes are static (foreplan folds it where boxes and "
        "scores are constants). Filled up to a bound, its result would have rows that the model does not give. Cut "
        f"the model before it: onnx.utils.extract_model writes one with the outputs {read}; select boxes in Python"
    )

"""Reading and adding at places that other tensors name: gather and scatter-add of whole slices.

Indices may be negative and then count from the end, unless the op says otherwise. Indices from users are checked before
a step begins (`valid_range`). Inside a step, an index counts modulo the axis, so no kernel reads or writes elsewhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from foreplan.base.errors import ShapeError, UnsupportedError
from foreplan.graph import Array, Builder, Cost, DType, Op, TensorType, Value, as_dtype, register
from foreplan.graph.axes import Axes, Factors, Part, broadcast_dims, named
from foreplan.graph.op import Arrays, Cotangents, Types, Values, only
from foreplan.graph.types import FLOAT32, INT64, Shape
from foreplan.graph.value import Kind
from foreplan.ops.blocks import Folded, Piece, can_reshape, carve, carve_bytes, fold, folded_shape, iota
from foreplan.ops.expr import Arg, Expr, call, cast, where
from foreplan.ops.map import elementwise
from foreplan.ops.reduce import normalize_axes
from foreplan.ops.shape import reshape, slice_axis

INDICES = 8 * 1024  # indices a block
SLAB = 128  # elements an index: with more, one addition an index is faster than flat indices

MOST_POSITIONS = 1 << 24  # that a graph holds as a constant

_INT64 = np.dtype(np.int64)


def positions(count: int, dtype: DType = INT64) -> np.ndarray:
    """0, 1, 2, …: the content of a constant.

    Raises:
        UnsupportedError: it would take memory while the graph is made.
    """
    if count > MOST_POSITIONS:
        raise UnsupportedError(
            f"it needs the positions along an axis of {count:,} elements; a graph holds {MOST_POSITIONS:,} at most"
        )
    return np.arange(count, dtype=dtype.numpy)


def check_indices(type: TensorType) -> None:
    """Raise ShapeError unless the elements are integers."""
    if type.dtype.category not in ("int", "uint"):
        raise ShapeError(f"indices must be integers, and are {type}")


def check_known(indices: Value, extent: int, part: Any = ..., from_end: bool = True) -> None:
    """Check indices that are constants of the graph against the extent of their axis; others are known only in a step.

    Args:
        part: which of the indices, as an array is indexed; all of them by default.
        from_end: whether negative ones count from the end.

    Raises:
        ShapeError: one is outside.
    """
    if indices.kind is Kind.CONSTANT and isinstance(indices.init, Array):
        known = indices.init.array.reshape(indices.shape)[part]
        outside = known[(known < (-extent if from_end else 0)) | (known >= extent)]
        if outside.size:
            raise ShapeError(f"the index {outside.flat[0]} is outside an axis of {extent} elements")


@dataclass(frozen=True)
class ReadAt(Op):
    """Ops that read data (input 0) at indices (input 1).

    Attributes:
        axis: which the indices count along, not negative.
    """

    moves: ClassVar[bool] = True
    axis: int = 0

    def valid_range(self, index: int, inputs: Types) -> tuple[int, int] | None:
        """From the first element, counted from either end, to the last."""
        extent = inputs[0].shape[self.axis]
        return (-extent, extent - 1) if index == 1 else None

    def cost(self, inputs: Types, outputs: Types) -> Cost:
        """Bytes of the indices, and of the elements read and written."""
        return Cost(0, inputs[1].nbytes + 2 * outputs[0].nbytes)


@dataclass(frozen=True)
class AddAt(Op):
    """Ops that add updates (input 1) at indices (input 0): the same bits every time. Updates are added in the order of
    the indices; a card adds thousands of them at a place in parts.

    Attributes:
        axis: which the indices count along, not negative.
        shape: of the output.
    """

    axis: int
    shape: Shape

    def valid_range(self, index: int, inputs: Types) -> tuple[int, int] | None:
        """From the first element, counted from either end, to the last."""
        extent = self.shape[self.axis]
        return (-extent, extent - 1) if index == 0 else None

    def cost(self, inputs: Types, outputs: Types) -> Cost:
        """One addition an element of the updates."""
        return Cost(inputs[1].size, sum(type.nbytes for type in (*inputs, *outputs)) + inputs[1].nbytes)


@register
@dataclass(frozen=True)
class Gather(ReadAt):
    """y[a…, i…, b…] = data[a…, indices[i…], b…]: whole slices of one axis, whose place the axes of `indices` take.

    Attributes:
        from_end: whether a negative index counts from the end; else it is refused, as of a table of words.
    """

    name: ClassVar[str] = "gather"
    from_end: bool = True

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """The axis replaced by the indices' shape."""
        data, indices = inputs
        check_indices(indices)
        if not 0 <= self.axis < data.rank:
            raise ShapeError(f"{data} has no axis {self.axis}")
        if indices.size and not data.shape[self.axis]:
            raise ShapeError(f"axis {self.axis} of {data} has no elements to gather")
        return (data.with_shape((*data.shape[: self.axis], *indices.shape, *data.shape[self.axis + 1 :])),)

    def indexing(self, inputs: Types, outputs: Types) -> Axes:
        """The indices' axes in place of the table's."""
        f, (data, indices) = Factors(), inputs
        x, places = f.row("a", data.shape), f.row("i", indices.shape)
        y = (*x[: self.axis], *places, *x[self.axis + 1 :])
        return f.axes([x, places], [y], sums={f"a{self.axis}": "rows"})

    def valid_range(self, index: int, inputs: Types) -> tuple[int, int] | None:
        """To the last element, from the first, counted from either end or not."""
        found = super().valid_range(index, inputs)
        return found if found is None or self.from_end else (0, found[1])

    def vjp(self, b: Builder, inputs: Values, outputs: Values, cotangents: Cotangents) -> Cotangents:
        """Rows of the cotangent added where they were read."""
        (data, indices), g = inputs, only(cotangents)
        return [b.apply(ScatterAdd(self.axis, data.shape), indices, g), None]

    def workspace(self, inputs: Types, outputs: Types) -> int:
        """A block of indices as 64-bit integers, if they are not."""
        return 0 if inputs[1].dtype == INT64 else carve_bytes(((min(INDICES, inputs[1].size),), _INT64))

    def compute(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray) -> None:
        """NumPy's take, straight into the output."""
        data, indices = fold(inputs[0], self.axis), inputs[1].reshape(-1)
        out = outputs[0].reshape(data.shape[0], indices.size, data.shape[2])
        if not out.size:
            return
        if indices.dtype == _INT64:
            _take(data, indices, out)
            return
        (wide,) = carve(workspace, ((min(INDICES, indices.size),), _INT64))
        for start in range(0, indices.size, INDICES):
            here = wide[: min(INDICES, indices.size - start)]
            within(indices[start : start + here.size], data.shape[1], here)
            if here.size == indices.size:
                _take(data, here, out)
            else:
                for o in range(len(data)):
                    _take(data[o : o + 1], here, out[o : o + 1, start : start + here.size])


def within(indices: np.ndarray, n: int, out: np.ndarray) -> None:
    """Write indices modulo n, as int64; indices of uint64 may be too large for int64."""
    if indices.dtype == np.uint64:
        np.remainder(indices, np.uint64(n), out=out, casting="unsafe")
    else:
        np.copyto(out, indices)
        np.remainder(out, n, out=out)


def _take(data: np.ndarray, indices: np.ndarray, out: np.ndarray) -> None:
    """Slices of axis 1 of [outer, n, inner]. NumPy's "wrap" subtracts the extent until an index fits, so indices far
    beyond it, which no check has seen, are taken one by one.
    """
    n = data.shape[1]
    if -n <= indices.min() and indices.max() < 2 * n:
        np.take(data, indices, axis=1, out=out, mode="wrap")
        return
    for start in range(0, indices.size, 1024):
        for i, index in enumerate(indices[start : start + 1024].tolist(), start):
            out[:, i] = data[:, index % n]


@register
@dataclass(frozen=True)
class ScatterAdd(AddAt):
    """y = zeros (or a third input) of `shape`, with updates[a…, i…, b…] added to y[a…, indices[i…], b…]."""

    name: ClassVar[str] = "scatter_add"
    accumulates: ClassVar[int] = 2

    @property
    def combine(self) -> np.ufunc:
        """What an update and an element give."""
        return np.add

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """`shape`, if the updates have it with the axis replaced by the indices' shape."""
        indices, updates, *base = inputs
        out = updates.with_shape(self.shape)
        if (wanted := Gather(self.axis).infer([out, indices])[0]) != updates:
            raise ShapeError(f"updates must be {wanted}, and are {updates}")
        if len(base) > 1 or any(type != out for type in base):
            raise ShapeError(f"the tensor that updates are added to must be {out}, and is {base[0]}")
        return (out,)

    def indexing(self, inputs: Types, outputs: Types) -> Axes:
        """A sum over the indices."""
        f, at = Factors(), self.axis
        y, places = f.row("a", outputs[0].shape), f.row("i", inputs[0].shape)
        given = [places, (*y[:at], *places, *y[at + 1 :]), *(broadcast_dims(y, x.shape) for x in inputs[2:])]
        return f.axes(given, [y], [f"a{at}"], dict.fromkeys(named(places), "sum"))

    def part(self, part: Part) -> Op:
        """Of the part's shape."""
        return replace(self, shape=part.outputs[0])

    def vjp(self, b: Builder, inputs: Values, outputs: Values, cotangents: Cotangents) -> Cotangents:
        """The cotangent's rows, gathered; itself for the third input."""
        g = only(cotangents)
        rows = gather(b, g, inputs[0], self.axis) if b.wants(inputs[1]) else None
        return [None, rows, *[g] * (len(inputs) - 2)]

    def overwrites(self, inputs: Types, outputs: Types) -> tuple[tuple[int, int], ...]:
        """The third input may be changed in place."""
        return ((0, 2),) if len(inputs) == 3 else ()

    def accepts_strides(self, index: int, input: TensorType, strides: tuple[int, ...]) -> bool:
        """Updates whose axes merge into three, and anything to add to."""
        behind = len(self.shape) - self.axis - 1
        return index == 2 or (index == 1 and can_reshape(input, strides, self._folded(input.shape, behind)))

    def _folded(self, updates: Shape, behind: int) -> Folded:
        split = len(updates) - behind
        return math.prod(updates[: self.axis]), math.prod(updates[self.axis : split]), math.prod(updates[split:])

    def workspace(self, inputs: Types, outputs: Types) -> int:
        """Blocks of flat indices and of updates, where slices are too short to be added one by one."""
        return carve_bytes(*self._pieces(inputs[1].dtype.numpy))

    def _pieces(self, dtype: np.dtype) -> list[Piece]:
        outer, _, inner = folded_shape(self.shape, self.axis)
        if outer * inner >= SLAB:
            return []
        block = (max(1, INDICES // max(1, inner)), inner)
        return [((inner,), _INT64), (block, _INT64), (block, dtype)]

    def compute(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray) -> None:
        """A copy or zeros, then all updates."""
        (out,) = outputs
        if len(inputs) == 3:
            np.copyto(out, inputs[2])
        else:
            out.fill(0)
        self.add(inputs[0], inputs[1], out, workspace)

    def add(self, indices: np.ndarray, updates: np.ndarray, out: np.ndarray, workspace: np.ndarray) -> None:
        """Slice by slice where slices are long, by flat indices where they are short."""
        if not updates.size:
            return
        table, indices = fold(out, self.axis), indices.reshape(-1)
        updates = np.reshape(updates, (table.shape[0], indices.size, table.shape[2]), copy=False)
        pieces = self._pieces(out.dtype)
        if pieces:
            _combine_flat(self.combine, table, indices, updates, carve(workspace, *pieces))
        else:
            _combine_slabs(self.combine, table, indices, updates)


def _combine_slabs(combine: np.ufunc, table: np.ndarray, indices: np.ndarray, updates: np.ndarray) -> None:
    outer, n, _ = table.shape
    if outer == 1:
        rows, news = table[0], updates[0]
    else:
        rows, news = table.swapaxes(0, 1), updates.swapaxes(0, 1)
    for start in range(0, indices.size, 1024):
        for j, index in enumerate(indices[start : start + 1024].tolist(), start):
            row = rows[index % n]
            combine(row, news[j], out=row)


def _combine_flat(
    combine: np.ufunc, table: np.ndarray, indices: np.ndarray, updates: np.ndarray, scratch: Arrays
) -> None:
    outer, n, _ = table.shape
    column, flat, values = scratch
    iota(column)
    for start in range(0, indices.size, len(flat)):
        here = flat[: min(len(flat), indices.size - start)]
        within(indices[start : start + len(here), None], n, here)
        here *= len(column)
        here += column
        for o in range(outer):
            news = values[: len(here)]
            np.copyto(news, updates[o, start : start + len(here)])
            combine.at(table[o].reshape(-1), here.reshape(-1), news.reshape(-1))


def gather(b: Builder, data: Value, indices: Value, axis: int = 0, from_end: bool = True) -> Value:
    """Slices of one axis of `data` (a negative axis counts from the end), in the order and shape of `indices`.

    Args:
        from_end: whether negative indices count from the end, too; else they are refused.
    """
    (found,) = normalize_axes(axis, len(data.shape))
    check_known(indices, data.shape[found], from_end=from_end)
    return b.apply(Gather(found, from_end), data, indices)


def gather_nd(b: Builder, data: Value, indices: Value, batch_dims: int = 0) -> Value:
    """data[a…, indices[a…, i…, 0], indices[a…, i…, 1], …]: the last axis of `indices` holds positions in `data`.

    Made of a map and a `gather` of rows. The first `batch_dims` axes (a…) are shared by data and indices.

    Raises:
        ShapeError: the indices do not fit the data.
    """
    depth = indices.shape[-1] if indices.shape else 0
    indexed = data.shape[batch_dims : batch_dims + depth]
    if len(indexed) != depth or not depth or data.shape[:batch_dims] != indices.shape[:-1][:batch_dims]:
        raise ShapeError(
            f"{indices!r} does not fit {data!r}: the first {batch_dims} axes must be the same, and the last axis of "
            f"the indices must have 1 to {len(data.shape) - batch_dims} elements"
        )
    batch, rest = data.shape[:batch_dims], data.shape[batch_dims + depth :]
    for j, extent in enumerate(indexed):
        check_known(indices, extent, (..., j))
    parts = [slice_axis(b, indices, -1, j, 1) for j in range(depth)]
    step, steps = 1, []
    for extent in reversed(indexed):
        steps.append(step)
        step *= extent
    steps.reverse()

    def place(*args: Expr) -> Expr:
        terms = [
            where(a < 0, cast(a, "int64") + extent, cast(a, "int64")) * stride
            for a, extent, stride in zip(args, indexed, steps)
        ]
        return sum(terms[1:], terms[0]) + (args[depth] if batch else 0)

    if batch:
        starts = positions(math.prod(batch)) * step
        shape = (*batch, *[1] * (len(indices.shape) - batch_dims))
        parts.append(_constant(b, "batch_starts", starts.reshape(shape)))
    flat = elementwise(b, place, *parts)
    rows = reshape(b, data, (math.prod(batch) * math.prod(indexed), *rest))
    return gather(b, rows, reshape(b, flat, indices.shape[:-1]))


def one_hot(b: Builder, indices: Value, depth: int, axis: int = -1, dtype: DType | str = FLOAT32) -> Value:
    """1 where the position along a new axis of extent `depth` is the index, else 0.

    A negative index counts from the end; one outside [-depth, depth) gives zeros.
    """
    rank = len(indices.shape) + 1
    (found,) = normalize_axes(axis, rank)
    # Narrow indices are widened: they may be unable to hold the depth that is added to negative ones.
    wide = indices.dtype if indices.dtype.name in ("int32", "int64") else INT64
    places = positions(depth, wide).reshape([depth if i == found else 1 for i in range(rank)])
    counted = _constant(b, "positions", places)
    spread = reshape(b, indices, (*indices.shape[:found], 1, *indices.shape[found:]))
    index = Arg(0) if wide == indices.dtype else cast(Arg(0), wide)
    hit = where(index < 0, call("eq", index + depth, Arg(1)), call("eq", index, Arg(1)))
    return elementwise(b, where(hit, 1.0, 0.0), spread, counted, dtype=as_dtype(dtype))


def _constant(b: Builder, name: str, array: np.ndarray) -> Value:
    return b.store(b.scope + name, TensorType(as_dtype(array.dtype), array.shape), Kind.CONSTANT, Array(array))

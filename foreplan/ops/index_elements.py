"""Reading and adding single elements at places that other tensors name, each along one axis.

Indices are as those of `index`: negative ones count from the end, and inside a step they are taken modulo the axis.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from foreplan.base.errors import ShapeError
from foreplan.graph import Builder, TensorType, Value, register
from foreplan.graph.axes import Axes, Factors, Part
from foreplan.graph.op import Arrays, Cotangents, Types, Values, only
from foreplan.graph.types import Shape
from foreplan.ops.blocks import Folded, Piece, can_fold, carve, carve_bytes, fold, folded_shape, iota
from foreplan.ops.index import INDICES, AddAt, ReadAt, check_indices, check_known, within
from foreplan.ops.reduce import normalize_axes
from foreplan.ops.shape import slice_axis

_INT64 = np.dtype(np.int64)


def _check(axis: int, table: TensorType, indices: TensorType) -> None:
    """Raise ShapeError unless the two differ in extent along the axis only."""
    check_indices(indices)
    if not 0 <= axis < table.rank or table.rank != indices.rank:
        raise ShapeError(f"{table} and {indices} must have the same number of axes, with an axis {axis}")
    if any(a != b for i, (a, b) in enumerate(zip(table.shape, indices.shape)) if i != axis):
        raise ShapeError(f"{table} and {indices} may differ in axis {axis} only")
    if indices.size and not table.shape[axis]:
        raise ShapeError(f"axis {axis} of {table} has no elements, so no index is valid")


def _pieces(axis: int, indices: Shape, dtype: np.dtype) -> list[Piece]:
    """Row and column numbers, flat indices and values of one block."""
    rows, at, columns = _element_extents(folded_shape(indices, axis))
    block = (rows * at * columns,)
    return [((rows,), _INT64), ((columns,), _INT64), (block, _INT64), (block, dtype)]


def _element_extents(folded: Folded) -> Folded:
    outer, m, inner = folded
    columns = min(inner, INDICES)
    at = min(m, max(1, INDICES // max(1, columns))) if columns == inner else 1
    rows = min(outer, max(1, INDICES // max(1, at * columns))) if at == m and columns == inner else 1
    return rows, at, columns


def _element_blocks(
    indices: np.ndarray, n: int, scratch: Arrays
) -> Iterator[tuple[tuple[slice, slice, slice], np.ndarray, np.ndarray]]:
    """(where in the indices, flat indices into a table [outer, n, inner], scratch for values) of each block."""
    outer, m, inner = indices.shape
    row, column, flat, values = scratch
    iota(row)
    row *= n * inner
    iota(column)
    extents = _element_extents((outer, m, inner))
    starts = (range(0, extent, step) for extent, step in zip(indices.shape, extents))
    for at in itertools.product(*starts) if indices.size else ():
        o, j, i = (slice(s, min(s + step, extent)) for s, step, extent in zip(at, extents, indices.shape))
        here = indices[o, j, i]
        places = flat[: here.size].reshape(here.shape)
        within(here, n, places)
        places *= inner
        places += row[: here.shape[0], None, None]
        places += column[: here.shape[2]]
        places += o.start * n * inner + i.start
        yield (o, j, i), places, values[: here.size].reshape(here.shape)


@register
@dataclass(frozen=True)
class GatherElements(ReadAt):
    """y[a…, i, b…] = data[a…, indices[a…, i, b…], b…]."""

    name: ClassVar[str] = "gather_elements"

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """The indices' shape."""
        data, indices = inputs
        _check(self.axis, data, indices)
        return (data.with_shape(indices.shape),)

    def indexing(self, inputs: Types, outputs: Types) -> Axes:
        """Lines along the axis, which the indices choose from."""
        f, (data, indices) = Factors(), inputs
        y, table = f.row("a", indices.shape), f.dim(("table", data.shape[self.axis]))
        return f.axes([(*y[: self.axis], table, *y[self.axis + 1 :]), y], [y], whole=["table"])

    def vjp(self, b: Builder, inputs: Values, outputs: Values, cotangents: Cotangents) -> Cotangents:
        """Elements of the cotangent added where they were read."""
        (data, indices), g = inputs, only(cotangents)
        return [b.apply(ScatterElementsAdd(self.axis, data.shape), indices, g), None]

    def workspace(self, inputs: Types, outputs: Types) -> int:
        """A block of flat indices and values."""
        return carve_bytes(*_pieces(self.axis, inputs[1].shape, inputs[0].dtype.numpy))

    def compute(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray) -> None:
        """Block by block, by flat indices."""
        data, indices, out = (fold(x, self.axis) for x in (*inputs, *outputs))
        scratch = carve(workspace, *_pieces(self.axis, inputs[1].shape, data.dtype))
        for where_, flat, values in _element_blocks(indices, data.shape[1], scratch):
            np.take(data.reshape(-1), flat, out=values, mode="clip")
            np.copyto(out[where_], values)


@register
@dataclass(frozen=True)
class ScatterElementsAdd(AddAt):
    """y = zeros of `shape`, with updates[a…, i, b…] added to y[a…, indices[a…, i, b…], b…]."""

    name: ClassVar[str] = "scatter_elements_add"

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """`shape`, which may differ from the indices' along the axis."""
        indices, updates = inputs
        out = updates.with_shape(self.shape)
        _check(self.axis, out, indices)
        if updates.shape != indices.shape:
            raise ShapeError(f"updates {updates} and indices {indices} must have the same shape")
        return (out,)

    def indexing(self, inputs: Types, outputs: Types) -> Axes:
        """Lines along the axis, a sum over what adds to each."""
        f, at = Factors(), self.axis
        x, table = f.row("a", inputs[0].shape), f.dim(("table", self.shape[at]))
        return f.axes([x, x], [(*x[:at], table, *x[at + 1 :])], ["table"], {f"a{at}": "sum"})

    def part(self, part: Part) -> ScatterElementsAdd:
        """Of the part's shape."""
        return replace(self, shape=part.outputs[0])

    def vjp(self, b: Builder, inputs: Values, outputs: Values, cotangents: Cotangents) -> Cotangents:
        """The cotangent's elements, gathered."""
        return [None, b.apply(GatherElements(self.axis), only(cotangents), inputs[0])]

    def accepts_strides(self, index: int, input: TensorType, strides: tuple[int, ...]) -> bool:
        """Updates whose axes before and behind merge."""
        return index == 1 and can_fold(input, strides, self.axis)

    def workspace(self, inputs: Types, outputs: Types) -> int:
        """A block of flat indices and values."""
        return carve_bytes(*_pieces(self.axis, inputs[0].shape, inputs[1].dtype.numpy))

    def compute(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray) -> None:
        """Block by block, by flat indices."""
        indices, updates, out = (fold(x, self.axis) for x in (*inputs, *outputs))
        out.fill(0)
        scratch = carve(workspace, *_pieces(self.axis, inputs[0].shape, out.dtype))
        for where_, flat, values in _element_blocks(indices, out.shape[1], scratch):
            np.copyto(values, updates[where_])
            np.add.at(out.reshape(-1), flat.reshape(-1), values.reshape(-1))


def gather_elements(b: Builder, data: Value, indices: Value, axis: int = 0) -> Value:
    """data[a…, indices[a…, i, b…], b…] in the indices' shape, which may be smaller than the data's along other axes.

    Raises:
        ShapeError: the indices have other axes, or are larger along one of the others.
    """
    (found,) = normalize_axes(axis, len(data.shape))
    for i, extent in enumerate(indices.shape[: len(data.shape)]):
        if i != found and extent < data.shape[i]:
            data = slice_axis(b, data, i, 0, extent)
    check_known(indices, data.shape[found])
    return b.apply(GatherElements(found), data, indices)

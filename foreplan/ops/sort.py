"""Positions of extremes and the k largest or smallest elements; ties go to the lower index."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from foreplan.base.errors import ShapeError
from foreplan.graph import Builder, Op, TensorType, Value, register
from foreplan.graph.axes import ONE, Axes, Factors
from foreplan.graph.op import Arrays, Cotangents, Types, Values
from foreplan.graph.types import INT64
from foreplan.ops.blocks import Folded, Piece, carve, carve_bytes, fold, folded_shape, iota
from foreplan.ops.index_elements import ScatterElementsAdd
from foreplan.ops.reduce import normalize_axes

BLOCK = 8 * 1024  # elements a block, unless one row is longer

_INT64 = np.dtype(np.int64)
_LOW_BITS = 21  # bits of a 64-bit integer that lie beside the index in a sort key
_INDEX_BITS = 31


def _row_extents(folded: Folded) -> tuple[int, int]:
    """The outer and the inner extent of a block of rows."""
    outer, n, inner = folded
    rows = max(1, BLOCK // max(1, n))
    return (min(outer, max(1, rows // max(1, inner))), inner) if rows >= inner else (min(outer, 1), rows)


def _row_blocks(folded: Folded) -> Iterator[tuple[slice, slice]]:
    outer, _, inner = folded
    rows, columns = _row_extents(folded)
    for o in range(0, outer, max(1, rows)):
        for i in range(0, inner, max(1, columns)):
            yield slice(o, min(outer, o + rows)), slice(i, min(inner, i + columns))


@register
@dataclass(frozen=True)
class ArgReduce(Op):
    """y = position (int64) of the largest or smallest element along one axis.

    Attributes:
        how: max or min.
        axis: not negative.
        keepdims: keep the axis with extent 1.
        last: among equals take the last one, not the first.
    """

    name: ClassVar[str] = "arg_reduce"
    how: str
    axis: int
    keepdims: bool = False
    last: bool = False

    def __post_init__(self) -> None:
        if self.how not in ("max", "min"):
            raise ValueError(f"how must be max or min, and is {self.how!r}")

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """int64, with the axis gone or of extent 1."""
        (x,) = inputs
        if not 0 <= self.axis < x.rank or not x.shape[self.axis]:
            raise ShapeError(f"{x} must have an axis {self.axis} with at least one element")
        kept = (1,) if self.keepdims else ()
        return (TensorType(INT64, (*x.shape[: self.axis], *kept, *x.shape[self.axis + 1 :])),)

    def indexing(self, inputs: Types, outputs: Types) -> Axes:
        """All of the axis."""
        f = Factors()
        x = f.row("a", inputs[0].shape)
        y = tuple(ONE if i == self.axis else dim for i, dim in enumerate(x) if self.keepdims or i != self.axis)
        return f.axes([x], [y], whole=[f"a{self.axis}"])

    def vjp(self, b: Builder, inputs: Values, outputs: Values, cotangents: Cotangents) -> Cotangents:
        """Nothing flows through an integer."""
        return [None]

    def flops(self, inputs: Types, outputs: Types) -> int:
        """One comparison an element."""
        return inputs[0].size

    def workspace(self, inputs: Types, outputs: Types) -> int:
        """Dense copies of a block of rows, and their results, unless rows are dense already and read forward."""
        return carve_bytes(*self._pieces(folded_shape(inputs[0].shape, self.axis), inputs[0].dtype.numpy))

    def _pieces(self, folded: Folded, dtype: np.dtype) -> list[Piece]:
        if folded[2] == 1 and not self.last:
            return []
        rows, columns = _row_extents(folded)
        return [((rows * columns * folded[1],), dtype), ((rows * columns,), _INT64)]

    def compute(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray) -> None:
        """NumPy's argmax and argmin, which need dense rows."""
        find = np.argmax if self.how == "max" else np.argmin
        x = fold(inputs[0], self.axis)
        y = outputs[0].reshape(x.shape[0], x.shape[2])
        pieces = self._pieces(folded_shape(inputs[0].shape, self.axis), x.dtype)
        if not pieces:
            if y.size:
                find(x[:, :, 0], axis=1, out=y[:, 0])
            return
        dense, found = carve(workspace, *pieces)
        for o, i in _row_blocks(folded_shape(inputs[0].shape, self.axis)):
            part = x[o, ::-1, i] if self.last else x[o, :, i]
            rows = dense[: part.size].reshape(part.shape[0], part.shape[2], part.shape[1])
            np.copyto(rows, part.swapaxes(1, 2))
            places = found[: rows.shape[0] * rows.shape[1]].reshape(rows.shape[:2])
            find(rows, axis=2, out=places)
            if self.last:
                np.subtract(x.shape[1] - 1, places, out=places)
            np.copyto(y[o, i], places)


@register
@dataclass(frozen=True)
class TopK(Op):
    """(values, indices): the k largest or smallest elements along one axis in order, and their positions (int64).

    Equal elements come in the order of their positions. With k the whole axis, it sorts.

    Attributes:
        k: how many.
        axis: not negative.
        largest: the largest first; otherwise the smallest first.
    """

    name: ClassVar[str] = "top_k"
    k: int
    axis: int
    largest: bool = True

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """The axis shortened to k: the input's element type, and int64."""
        (x,) = inputs
        if not 0 <= self.axis < x.rank or not 0 <= self.k <= x.shape[self.axis]:
            raise ShapeError(f"cannot take {self.k} elements along axis {self.axis} of {x}")
        if x.shape[self.axis] >= 1 << _INDEX_BITS:
            raise ShapeError(
                f"axis {self.axis} of {x} is too long to be sorted; {(1 << _INDEX_BITS) - 1} elements are the most"
            )
        values = x.with_shape((*x.shape[: self.axis], self.k, *x.shape[self.axis + 1 :]))
        return values, values.with_dtype(INT64)

    def indexing(self, inputs: Types, outputs: Types) -> Axes:
        """All of the axis, and all of its best."""
        f = Factors()
        x, best = f.row("a", inputs[0].shape), f.dim(("k", self.k))
        y = tuple(best if i == self.axis else dim for i, dim in enumerate(x))
        return f.axes([x], [y, y], whole=[f"a{self.axis}", "k"])

    def vjp(self, b: Builder, inputs: Values, outputs: Values, cotangents: Cotangents) -> Cotangents:
        """The cotangent of the values, scattered to where they were."""
        g = cotangents[0]
        return [None if g is None else b.apply(ScatterElementsAdd(self.axis, inputs[0].shape), outputs[1], g)]

    def flops(self, inputs: Types, outputs: Types) -> int:
        """One comparison an element, and log₂ k an element that is taken."""
        return inputs[0].size + outputs[0].size * max(1, self.k - 1).bit_length()

    def workspace(self, inputs: Types, outputs: Types) -> int:
        """Sort keys of one block of rows, and numbers an element that is taken."""
        return carve_bytes(*self._pieces(folded_shape(inputs[0].shape, self.axis), inputs[0].dtype.numpy))

    def _pieces(self, folded: Folded, dtype: np.dtype) -> list[Piece]:
        _, n, inner = folded
        rows, columns = _row_extents(folded)
        count = rows * columns
        numbers: list[Piece] = [((count * n,), _INT64)] if dtype.kind in "iub" else []
        indices: list[Piece] = [((size,), _INT64) for size in (n, rows, inner, count * self.k)]
        return [((count * n,), np.dtype(np.complex128)), *indices, ((count * self.k,), dtype), *numbers]

    def compute(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray) -> None:
        """Sort keys in place; each is a pair of an element and its position.

        NumPy sorts complex numbers by real part, then by imaginary part. An element of up to 53 significant bits is
        the real part; of a 64-bit integer the lowest bits move to the imaginary part, above the position.
        """
        folded = folded_shape(inputs[0].shape, self.axis)
        x, values, indices = (fold(array, self.axis) for array in (inputs[0], *outputs))
        keys, position, row, column, taken, picked, *numbers = carve(workspace, *self._pieces(folded, x.dtype))
        iota(position)
        iota(row)
        row *= folded[1] * folded[2]
        iota(column)
        for o, i in _row_blocks(folded) if values.size else ():
            part = x[o, :, i].swapaxes(1, 2)
            key = keys[: part.size].reshape(part.shape)
            self._fill_keys(key, part, position, numbers)
            if self.k < folded[1]:
                key.partition(self.k - 1, axis=2)
            best = key[:, :, : self.k]
            best.sort(axis=2)
            places = taken[: best.size].reshape(best.shape)
            np.copyto(places, best.imag, casting="unsafe")
            if numbers:
                places &= (1 << _INDEX_BITS) - 1
            np.copyto(indices[o, :, i].swapaxes(1, 2), places)
            places *= folded[2]
            places += row[: best.shape[0], None, None]
            places += column[i, None]
            places += o.start * folded[1] * folded[2]
            got = picked[: best.size].reshape(best.shape)
            np.take(x.reshape(-1), places, out=got, mode="clip")
            np.copyto(values[o, :, i].swapaxes(1, 2), got)

    def _fill_keys(self, key: np.ndarray, part: np.ndarray, position: np.ndarray, numbers: Arrays) -> None:
        if not numbers:
            np.multiply(part, -1.0 if self.largest else 1.0, out=key.real, casting="unsafe")
            key.imag[...] = position
            return
        number = numbers[0][: part.size].reshape(part.shape)
        np.copyto(number, part, casting="unsafe")
        if part.dtype == np.uint64:
            np.bitwise_xor(number, np.int64(-(1 << 63)), out=number)  # order of unsigned numbers as signed ones
        if self.largest:
            np.invert(number, out=number)
        np.right_shift(number, _LOW_BITS, out=number)
        np.copyto(key.real, number)
        np.copyto(number, part, casting="unsafe")
        if self.largest:
            np.invert(number, out=number)
        number &= (1 << _LOW_BITS) - 1
        number <<= _INDEX_BITS
        number |= position
        np.copyto(key.imag, number)


def arg_reduce(b: Builder, how: str, x: Value, axis: int = 0, keepdims: bool = False, last: bool = False) -> Value:
    """Position of the maximum or minimum (`how`: max or min) along an axis; negative axes count from the end."""
    (found,) = normalize_axes(axis, len(x.shape))
    return b.apply(ArgReduce(how, found, keepdims, last), x)


def top_k(b: Builder, x: Value, k: int, axis: int = -1, largest: bool = True) -> tuple[Value, Value]:
    """(values, indices) of the k largest or smallest elements along an axis; negative axes count from the end."""
    (found,) = normalize_axes(axis, len(x.shape))
    values, indices = b.node(TopK(k, found, largest), x)
    return values, indices

"""Determinants of small matrices."""

from __future__ import annotations

import math

import numpy as np

from foreplan.base.errors import ShapeError, UnsupportedError
from foreplan.graph import Array, Builder, Kind, TensorType, Value
from foreplan.graph.types import INT64
from foreplan.ops.expr import Expr, call, where
from foreplan.ops.index_elements import gather_elements
from foreplan.ops.map import elementwise
from foreplan.ops.shape import broadcast_to, reshape, slice_axis
from foreplan.ops.sort import arg_reduce

EXPANDED = 3  # rows of matrices whose determinant is written out
MOST_ROWS = 64


def det(b: Builder, x: Value) -> Value:
    """The determinant of each matrix of x [..., n, n]: elimination with partial pivoting, a few nodes a row.

    Up to three rows it is written out, so that its gradient is right for singular matrices too. For larger ones the
    gradient is that of the elimination, which holds for all matrices of rank n.

    Raises:
        ShapeError: x holds no square matrices of floats.
        UnsupportedError: they are too large.
    """
    if len(x.shape) < 2 or x.shape[-1] != x.shape[-2] or not x.dtype.is_float or not x.shape[-1]:
        raise ShapeError(f"a determinant needs square matrices of floats, and got {x!r}")
    n = x.shape[-1]
    if n > MOST_ROWS:
        raise UnsupportedError(f"a determinant of {n} rows; foreplan takes {MOST_ROWS} at most")
    lead = x.shape[:-2]
    rest, result = reshape(b, x, (math.prod(lead), n, n)), None
    while rest.shape[1] > EXPANDED:
        factor, rest = _eliminated(b, rest)
        result = factor if result is None else elementwise(b, lambda x, y: x * y, result, factor)
    m = rest.shape[1]
    cells = [slice_axis(b, slice_axis(b, rest, 1, i, 1), 2, j, 1) for i in range(m) for j in range(m)]
    last = elementwise(b, lambda *cells: _expanded([list(cells[i * m : i * m + m]) for i in range(m)]), *cells)
    result = last if result is None else elementwise(b, lambda x, y: x * y, result, last)
    return reshape(b, result, lead)


def _expanded(rows: list[list[Expr]]) -> Expr:
    """By cofactors of the first row."""
    if len(rows) == 1:
        return rows[0][0]
    terms = [
        cell * _expanded([row[:j] + row[j + 1 :] for row in rows[1:]]) * (-1.0) ** j for j, cell in enumerate(rows[0])
    ]
    return sum(terms[1:], terms[0])


def _eliminated(b: Builder, x: Value) -> tuple[Value, Value]:
    """(the pivot with its sign, the matrices that are left): x [B, n, n] less its first column and the pivot's row."""
    count, n, _ = x.shape
    sizes = elementwise(b, lambda x: call("abs", x), slice_axis(b, x, 2, 0, 1))
    at = arg_reduce(b, "max", sizes, 1, keepdims=True)  # [B, 1, 1]
    row = gather_elements(b, x, broadcast_to(b, at, (count, 1, n)), 1)
    first, pivot = slice_axis(b, x, 1, 0, 1), slice_axis(b, row, 2, 0, 1)
    places = np.arange(1, n, dtype=np.int64).reshape(1, -1, 1)
    numbers = b.store(b.scope + "rows", TensorType(INT64, places.shape), Kind.CONSTANT, Array(places))
    # The first row takes the pivot's place.
    below = slice_axis(b, x, 1, 1, n - 1)
    below = elementwise(b, lambda x, f, p, i: where(call("eq", p, i), f, x), below, first, at, numbers)
    share = elementwise(
        b, lambda c, p: where(call("eq", p, 0.0), 0.0, c / where(call("eq", p, 0.0), 1.0, p)), _first(b, below), pivot
    )
    left = elementwise(b, lambda x, s, r: x - s * r, _others(b, below), share, _others(b, row))
    return elementwise(b, lambda p, i: where(call("eq", i, 0), p, -p), pivot, at), left


def _first(b: Builder, x: Value) -> Value:
    return slice_axis(b, x, 2, 0, 1)


def _others(b: Builder, x: Value) -> Value:
    return slice_axis(b, x, 2, 1, x.shape[2] - 1)

"""Norms of gradients and of parameters."""

from __future__ import annotations

from foreplan.graph import Builder, Value
from foreplan.graph.types import FLOAT64
from foreplan.ops.map import convert
from foreplan.ops.matmul import matmul
from foreplan.ops.reduce import reduce
from foreplan.ops.shape import reshape

ROW = 1 << 16  # elements that are squared and added in one product


def sum_of_squares(b: Builder, x: Value) -> Value:
    """Σ x² as a float64 scalar: products of rows with themselves, so that no square is kept, added in pairs."""
    row = 1
    for extent in reversed(x.shape):
        if row * extent > ROW:
            break
        row *= extent
    rows = x.type.size // max(1, row)
    dots = matmul(b, reshape(b, x, (rows, 1, row)), reshape(b, x, (rows, row, 1)))
    return convert(b, reduce(b, "sum", dots), FLOAT64)

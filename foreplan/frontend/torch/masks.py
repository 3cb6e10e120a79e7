"""Known tensors as nodes read them: once for what is the same along an axis, and masks of diagonals as two rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from foreplan.frontend.tracing.elementwise import apply
from foreplan.frontend.tracing.tensor import Tensor
from foreplan.ops.expr import Const, Expr, as_expr, call, where

_TIMES = 10  # as many elements as places has a matrix that is not stored


@dataclass(frozen=True)
class Diagonals:
    """A matrix of two numbers, one of which stands on neighbouring diagonals, as in the mask of causal attention or of
    a sliding window: a comparison of places.

    Attributes:
        columns: the place along the last axis, [1, keys].
        bounds: comparisons of it, and what it is compared with, [queries, 1]; what all hold for has the first number.
        numbers: both.
    """

    columns: np.ndarray
    bounds: tuple[tuple[str, np.ndarray], ...]
    numbers: tuple[Any, Any]

    @property
    def operands(self) -> list[np.ndarray]:
        """What `expr` reads."""
        return [self.columns, *(bound for _, bound in self.bounds)]

    def expr(self, column: Expr, *bounds: Expr) -> Expr:
        """An element."""
        inside = [call(name, column, bound) for (name, _), bound in zip(self.bounds, bounds)]
        both = inside[0] if len(inside) == 1 else call("and", *inside)
        if isinstance(self.numbers[0], bool):
            return both if self.numbers[0] else call("not", both)
        return where(both, *(Const(x) for x in self.numbers))


def compact(array: np.ndarray) -> np.ndarray:
    """An array that broadcasts to a known one: an axis along which all entries are the same, to the bit, has one."""
    if not array.size or array.itemsize > 8:
        return array
    bits = np.ascontiguousarray(array).view(f"u{array.itemsize}").reshape(array.shape)
    for axis, extent in enumerate(array.shape):
        if extent > 1:
            first, second = (bits.take([i], axis) for i in (0, 1))
            if (first == second).all() and (first == bits).all():
                bits = first
    return np.asarray(bits.view(array.dtype))


def diagonals(array: np.ndarray) -> Diagonals | None:
    """A known array as diagonals, if it is one large matrix of them."""
    queries, keys = array.shape[-2:] if array.ndim > 1 else (1, array.size)
    if array.size != queries * keys or array.size < _TIMES * (queries + keys):
        return None
    matrix = array.reshape(queries, keys)
    edge = np.concatenate([matrix[::-1, 0], matrix[0, 1:]])  # of diagonals 1 - queries … keys - 1
    changes = np.flatnonzero(edge[1:] != edge[:-1]) + 1
    if not 1 <= len(changes) <= 2 or (len(changes) == 2 and edge[0] != edge[-1]):
        return None
    start, stop = (0, *changes)[-2:]
    on, off = edge[start], edge[stop]
    for i, row in enumerate(matrix):
        begin, end = (min(max(i + each + 1 - queries, 0), keys) for each in (start, stop))
        if not ((row[begin:end] == on).all() and (row[:begin] == off).all() and (row[end:] == off).all()):
            return None
    rows = np.arange(queries, dtype=np.int32).reshape(*array.shape[:-1], 1)
    columns = np.arange(keys, dtype=np.int32).reshape(*array.shape[:-2], 1, keys)
    low, high = np.int32(start + 1 - queries), np.int32(stop - queries)
    bounds = (("ge", rows + low),) if start else ()
    return Diagonals(columns, (*bounds, ("le", rows + high)), (on.item(), off.item()))


def applied(name: str, fn: Callable[..., Any], operands: Sequence[Any]) -> Tensor:
    """A scalar function of tensors, literals and diagonals, which are computed within."""
    flat: list[Any] = []
    parts: list[tuple[Callable[..., Expr], int, int]] = []
    for x in operands:
        given: list[Any] = x.operands if isinstance(x, Diagonals) else [x]
        parts.append((x.expr if isinstance(x, Diagonals) else as_expr, len(flat), len(flat) + len(given)))
        flat += given
    return apply(name, lambda *args: fn(*(part(*args[start:stop]) for part, start, stop in parts)), *flat)

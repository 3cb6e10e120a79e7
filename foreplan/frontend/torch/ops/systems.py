"""Systems of linear equations, and factors of matrices, of a few rows: elimination, a few nodes for each row."""

from __future__ import annotations

from typing import Any

import numpy as np

from foreplan.base.errors import UnsupportedError
from foreplan.frontend.torch.call import Call
from foreplan.frontend.torch.ops.gradients import fitting
from foreplan.frontend.torch.table import aten
from foreplan.frontend.tracing.elementwise import select
from foreplan.frontend.tracing.tensor import Tensor
from foreplan.ops.custom_gradient import with_gradient
from foreplan.ops.determinant import MOST_ROWS

_numpy: Any = np  # on tensors, which its type stubs do not know


def solved(a: Tensor, b: Tensor) -> Tensor:
    """X of A X = B by Gaussian elimination with partial pivoting; A [..., n, n], B [..., n, k]. Infinities or NaNs if A
    is singular.
    """
    n = _rows(a)
    lead = _numpy.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    rest: Any = _numpy.concatenate([_numpy.broadcast_to(each, (*lead, *each.shape[-2:])) for each in (a, b)], -1)
    pivots: list[Any] = []
    found: Any = rest[..., n:] if not n else None
    for left in range(n, 0, -1):
        at = _numpy.argmax(_numpy.abs(rest[..., :1]), axis=-2, keepdims=True)
        row = _numpy.take_along_axis(rest, _numpy.broadcast_to(at, (*lead, 1, rest.shape[-1])), axis=-2)
        pivots.append(row)
        # The first row takes the pivot's place.
        below = (
            select(at == np.arange(1, left).reshape(-1, 1), rest[..., :1, :], rest[..., 1:, :]) if left > 1 else None
        )
        if below is not None:
            rest = below[..., 1:] - below[..., :1] / row[..., :1] * row[..., 1:]
    for i, row in enumerate(reversed(pivots)):
        right = row[..., i + 1 :] if found is None else row[..., i + 1 :] - row[..., 1 : i + 1] @ found
        x = right / row[..., :1]
        found = x if found is None else _numpy.concatenate([x, found], -2)
    return found


def substituted(a: Tensor, b: Tensor, upper: bool = False, ones: bool = False) -> Tensor:
    """X of A X = B where A is triangular, [..., n, n]; B [..., n, k].

    Args:
        ones: whether the diagonal is taken for ones.
    """
    n, found = _rows(a), b if not a.shape[-1] else None
    for i in reversed(range(n)) if upper else range(n):
        x: Any = b[..., i : i + 1, :]
        if found is not None:
            x = x - (a[..., i : i + 1, i + 1 :] if upper else a[..., i : i + 1, :i]) @ found
        x = x if ones else x / a[..., i : i + 1, i : i + 1]
        found = x if found is None else _numpy.concatenate([x, found] if upper else [found, x], -2)
    assert found is not None
    return found


def rooted(a: Tensor) -> Tensor:
    """L of L L^T = A, lower triangular; of A [..., n, n], symmetric, the lower half is read."""
    n, columns, rest = _rows(a), [a[..., :0]], a
    for i in range(n):
        size = _numpy.sqrt(rest[..., :1, :1])
        column: Any = rest[..., :, :1] / size
        rest = rest[..., 1:, 1:] - column[..., 1:, :] @ column[..., 1:, :].mT
        columns.append(_numpy.pad(column, [(0, 0)] * (a.ndim - 2) + [(i, 0), (0, 0)]))
    return _numpy.concatenate(columns, -1)


def _rows(a: Tensor) -> int:
    n = a.shape[-1]
    if n > MOST_ROWS:
        raise UnsupportedError(f"a matrix of {n} rows; foreplan takes {MOST_ROWS} at most")
    return n


@aten("_linalg_solve_ex")
def _solve(c: Call, a: Any, b: Any, *, left: bool = True, check_errors: bool = False) -> list[Any]:
    matrix, right = c.tensor(a), c.tensor(b)
    is_vector = right.ndim == 1 or (matrix.ndim - 1 == right.ndim and matrix.shape[:-1] == right.shape)
    right = right[..., None] if is_vector else right
    found = solved(matrix, right) if left else solved(matrix.mT, right.mT).mT
    return [found[..., 0] if is_vector else found, None, None, None]


@aten("linalg_inv_ex")
def _inverse(c: Call, a: Any, *, check_errors: bool = False) -> list[Any]:
    matrix = c.tensor(a)
    return [solved(matrix, c.tensor(np.eye(matrix.shape[-1]), matrix.value.dtype)), None]


@aten("linalg_cholesky_ex")
def _cholesky_ex(c: Call, a: Any, *, upper: bool = False, check_errors: bool = False) -> list[Any]:
    matrix = c.tensor(a)
    found = rooted((matrix + matrix.mT) * 0.5)
    return [found.mT if upper else found, None]


@aten("cholesky")
def _cholesky(c: Call, a: Any, upper: bool = False) -> Any:
    return _cholesky_ex(c, a, upper=upper)[0]


@aten("linalg_solve_triangular")
def _triangular(c: Call, a: Any, b: Any, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Any:
    matrix, right = c.tensor(a), c.tensor(b)
    if left:
        return substituted(matrix, right, upper, unitriangular)
    return substituted(matrix.mT, right.mT, not upper, unitriangular).mT


@aten("triangular_solve")
def _old_triangular(
    c: Call, b: Any, a: Any, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> list[Any]:
    matrix = c.tensor(a).mT if transpose else c.tensor(a)
    return [substituted(matrix, c.tensor(b), upper != transpose, unitriangular), None]


@aten("cholesky_solve")
def _by_root(c: Call, b: Any, root: Any, upper: bool = False) -> Any:
    """X of L L^T X = B. The gradient of L is that of a whole matrix, as PyTorch has it."""
    right, given = c.tensor(b), c.tensor(root)
    lower = given.mT if upper else given

    def twice(y: Tensor) -> Tensor:
        return substituted(lower.mT, substituted(lower, y), True)

    found = twice(right)
    g = c.wrap(c.b.input("cotangent", found.value.type))
    of_right = twice(g)
    outer: Any = of_right @ found.mT
    of_root = -(outer + outer.mT) @ lower
    of_root = of_root.mT if upper else of_root
    pulled = [fitting(c, of_right, right.value), fitting(c, of_root, given.value)]
    return c.wrap(with_gradient(c.b, [found.value], [right.value, given.value], [g.value], pulled)[0])


@aten("cholesky_inverse")
def _inverse_by_root(c: Call, root: Any, upper: bool = False) -> Any:
    return _by_root(c, np.eye(c.shape[-1], dtype=c.dtype.numpy), root, upper)

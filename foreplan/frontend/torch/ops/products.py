"""ATen ops that multiply matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from foreplan.base.errors import UnsupportedError
from foreplan.frontend.torch.call import Call
from foreplan.frontend.torch.ops.elementwise import broadcast, numbers
from foreplan.frontend.torch.ops.reductions import reduced, root
from foreplan.frontend.torch.table import aten
from foreplan.frontend.tracing.elementwise import apply, convert
from foreplan.frontend.tracing.tensor import Tensor, as_tensor
from foreplan.graph.types import broadcast_shapes
from foreplan.ops.determinant import det
from foreplan.ops.expr import call, cast, log
from foreplan.ops.matmul import matmul


@aten("matmul", "bmm", "mm", "mv", "dot", "vdot")
def _matmul(c: Call, x: Any, y: Any) -> Any:
    return c.tensor(x) @ c.tensor(y)


@aten("linear")
def _linear(c: Call, x: Any, weight: Any, bias: Any = None) -> Any:
    tensor, w = c.tensor(x), c.tensor(weight)
    rows = tensor.reshape(1, -1) if tensor.ndim == 1 else tensor
    matrix = w.reshape(1, -1) if w.ndim == 1 else w
    y = c.wrap(matmul(c.b, rows.value, matrix.value, transpose_b=True))
    y = y if bias is None else apply("add", lambda y, b: y + b, y, c.tensor(bias))
    return y.reshape(c.shape)


@aten("addmm", "baddbmm", "addmv", "addbmm", "addr")
def _addmm(c: Call, added: Any, x: Any, y: Any, beta: float = 1, alpha: float = 1) -> Tensor:
    product = _outer(c, x, y) if c.name == "addr" else c.tensor(x) @ c.tensor(y)
    if c.name == "addbmm":
        product = reduced(c, "sum", product, 0)
    if not c.dtype.is_float:
        alpha, beta = int(alpha), int(beta)
    if not beta:  # then what is added is not read at all
        return numbers(c, "addmm", lambda p: p * alpha, product)
    return numbers(c, "addmm", lambda p, a: p * alpha + a * beta, product, added)


def _outer(c: Call, x: Any, y: Any) -> Any:
    return c.tensor(x).reshape(-1, 1) * c.tensor(y)


@aten("einsum")
def _einsum(c: Call, equation: str, xs: Sequence[Any], path: Any = None) -> Any:
    return np.einsum(equation, *(c.tensor(x) for x in xs))


@aten("matrix_power", "linalg_matrix_power")
def _matrix_power(c: Call, x: Any, n: int) -> Any:
    return np.linalg.matrix_power(c.tensor(x), n)


@aten("bilinear")
def _bilinear(c: Call, x: Any, y: Any, weight: Any, bias: Any = None) -> Any:
    left, right, w = c.tensor(x), c.tensor(y), c.tensor(weight)
    outs, rows, columns = w.shape
    products = (left.reshape(-1, rows) @ w.transpose(1, 0, 2).reshape(rows, outs * columns)).reshape(-1, outs, columns)
    found = (products @ right.reshape(-1, columns, 1)).reshape(c.shape)
    return found if bias is None else found + c.tensor(bias)


@aten("trace")
def _trace(c: Call, x: Any) -> Any:
    return c.tensor(x).trace()


@aten("linalg_det", "det")
def _det(c: Call, x: Any) -> Tensor:
    return c.wrap(det(c.b, c.value(x)))


@aten("_linalg_slogdet")
def _slogdet(c: Call, x: Any) -> list[Any]:
    found = c.wrap(det(c.b, c.value(x)))
    return [np.sign(found), np.log(np.abs(found)), None, None]


@aten("_linalg_det")
def _inner_det(c: Call, x: Any) -> list[Any]:
    return [_det(c, x), None, None]


@aten("cross", "linalg_cross")
def _cross(c: Call, x: Any, y: Any, dim: int | None = -1) -> Any:
    axis = next(i for i, n in enumerate(c.shape) if n == 3) if dim is None else dim
    return np.cross(c.tensor(x), c.tensor(y), axis=axis)


@aten("cdist", "_euclidean_dist", "_cdist_forward")
def _cdist(c: Call, x: Any, y: Any, p: float = 2.0, mode: Any = None) -> Any:
    left, right = c.tensor(x), c.tensor(y)
    gaps = left[..., :, None, :] - right[..., None, :, :]
    return length(c, gaps, p)


@aten("_pdist_forward", "pdist")
def _pdist(c: Call, x: Any, p: float = 2.0) -> Any:
    rows = c.tensor(x)
    first, second = np.triu_indices(rows.shape[0], 1)
    return length(c, rows[first] - rows[second], p)


@aten("linalg_householder_product")
def _householder(c: Call, x: Any, scales: Any) -> Any:
    """The first columns of the product of reflections 1 - t v v^T, whose vectors v stand below the diagonal of x."""
    columns, t = c.tensor(x), c.tensor(scales)
    rows, count = columns.shape[-2:]
    found: Any = as_tensor(np.broadcast_to(np.eye(rows, count), columns.shape), columns.value.dtype)
    for i in reversed(range(t.shape[-1])):
        below = np.arange(rows)[:, None]
        v: Any = np.where(below > i, columns[..., :, i : i + 1], np.where(below == i, 1.0, 0.0))
        found = found - (t[..., i, None, None] * v) @ (v.mT @ found)
    return found


@aten("linalg_matrix_exp")
def _matrix_exp(c: Call, x: Any) -> Any:
    """exp(A) = exp(A / 2^s)^(2^s), the inner one as its Taylor polynomial (Moler and Van Loan 2003, method 3). `s` is
    the least for which the 1-norm of A / 2^s is at most 1/2, as far as 16, chosen by data: of 16 squares, the last s.
    """
    a: Any = convert(c.tensor(x), c.dtype.wide)
    size = reduced(c, "max", reduced(c, "sum", apply("abs", lambda x: call("abs", x), a), -2, True), -1, True)
    s = apply("halvings", lambda n: call("max", call("ceil", log(n * 2.0 + 1e-30) / math.log(2.0)), 0.0), size)
    small = a * np.exp(-math.log(2.0) * s)
    one = np.eye(a.shape[-1])
    terms = 10 if a.value.dtype.itemsize <= 4 else 16
    found: Any = one + small / float(terms)
    for n in range(terms - 1, 0, -1):
        found = one + (small @ found) / float(n)
    for i in range(16):
        found = np.where(s > 15.5 - i, found @ found, found)
    return convert(found, c.dtype)


@aten("pairwise_distance")
def _pairwise(c: Call, x: Any, y: Any, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> Any:
    found = length(c, c.tensor(x) - c.tensor(y) + eps, p)
    return found[..., None] if keepdim else found


def length(c: Call, gaps: Tensor, p: float) -> Tensor:
    """The p-norm of the last axis, whose gradient at zero is zero."""
    if p == 0:
        return reduced(c, "sum", apply("ne", lambda x: cast(call("ne", x, 0.0), c.dtype), gaps), -1)
    if p == 1:
        return reduced(c, "sum", apply("abs", lambda x: call("abs", x), gaps), -1)
    if p == float("inf"):
        return reduced(c, "max", apply("abs", lambda x: call("abs", x), gaps), -1)
    powers = apply("pow", lambda x: x * x if p == 2 else call("abs", x) ** float(p), gaps)
    return root(reduced(c, "sum", powers, -1), p)


@aten("cosine_similarity")
def _cosine(c: Call, x: Any, y: Any, dim: int = 1, eps: float = 1e-8) -> Any:
    given = c.tensor(x), c.tensor(y)
    shape = broadcast_shapes(*(each.shape for each in given))
    left, right = (broadcast(each, shape) for each in given)  # vectors, too: what is broadcast counts in a length

    def size(of: Tensor) -> Any:
        total = reduced(c, "sum", apply("square", lambda x: x * x, of), dim)
        return apply("size", lambda s: call("max", call("sqrt", s), eps), total)

    return reduced(c, "sum", left * right, dim) / (size(left) * size(right))


@aten("_grouped_mm", "transformers::grouped_mm_fallback")
def _grouped(c: Call, x: Any, weights: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
    """Rows, each by the matrix of its group; `offs` says where each group ends. All groups are multiplied, with zeros
    in the place of the rows of others: which rows are whose is data.
    """
    if bias is not None or offs is None:
        raise UnsupportedError("a grouped product with a bias, or without the ends of its groups")
    rows, w, ends = c.tensor(x), c.tensor(weights), c.tensor(offs)
    groups, inner, outer = w.shape
    begun = ends.reshape(-1, 1) <= np.arange(rows.shape[0])
    group = convert(begun, "int64").sum(0)
    member = convert(group.reshape(-1, 1) == np.arange(groups), rows.dtype)
    spread = (member[:, :, None] * rows[:, None, :]).reshape(rows.shape[0], groups * inner)
    return spread @ w.reshape(groups * inner, outer)

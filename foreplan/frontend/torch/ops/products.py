"""ATen ops that multiply matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from foreplan.frontend.torch.call import Call
from foreplan.frontend.torch.ops.elementwise import numbers
from foreplan.frontend.torch.ops.reductions import reduced
from foreplan.frontend.torch.table import aten
from foreplan.frontend.tracing.elementwise import apply, convert
from foreplan.frontend.tracing.tensor import Tensor
from foreplan.ops.determinant import det
from foreplan.ops.expr import call
from foreplan.ops.matmul import matmul


@aten("matmul", "bmm", "mm", "mv", "dot", "vdot", "inner")
def _matmul(c: Call, x: Any, y: Any) -> Any:
    left, right = c.tensor(x), c.tensor(y)
    if c.name == "inner":
        right = right.mT if right.ndim > 1 else right
    return left @ right


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
    return numbers(c, "addmm", lambda p, a: p * alpha + a * beta, product, added)


@aten("outer", "ger")
def _outer(c: Call, x: Any, y: Any) -> Any:
    return c.tensor(x).reshape(-1, 1) * c.tensor(y)


@aten("einsum")
def _einsum(c: Call, equation: str, xs: Sequence[Any], path: Any = None) -> Any:
    return np.einsum(equation, *(c.tensor(x) for x in xs))


@aten("tensordot")
def _tensordot(c: Call, x: Any, y: Any, dims_x: Sequence[int], dims_y: Sequence[int]) -> Any:
    return np.tensordot(c.tensor(x), c.tensor(y), (list(dims_x), list(dims_y)))


@aten("kron")
def _kron(c: Call, x: Any, y: Any) -> Any:
    return np.kron(c.tensor(x), c.tensor(y))


@aten("linalg_multi_dot", "chain_matmul")
def _multi_dot(c: Call, xs: Sequence[Any]) -> Any:
    found = c.tensor(xs[0])
    for each in xs[1:]:
        found = found @ c.tensor(each)
    return found


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


@aten("cross", "linalg_cross")
def _cross(c: Call, x: Any, y: Any, dim: int | None = -1) -> Any:
    axis = next(i for i, n in enumerate(c.shape) if n == 3) if dim is None else dim
    return np.cross(c.tensor(x), c.tensor(y), axis=axis)


@aten("cdist", "_euclidean_dist", "_cdist_forward")
def _cdist(c: Call, x: Any, y: Any, p: float = 2.0, mode: Any = None) -> Any:
    left, right = c.tensor(x), c.tensor(y)
    gaps = left[..., :, None, :] - right[..., None, :, :]
    return _length(c, gaps, p)


@aten("pairwise_distance")
def _pairwise(c: Call, x: Any, y: Any, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> Any:
    found = _length(c, c.tensor(x) - c.tensor(y) + eps, p)
    return found[..., None] if keepdim else found


def _length(c: Call, gaps: Tensor, p: float) -> Tensor:
    """The p-norm of the last axis, whose gradient at zero is zero."""
    if p == 1:
        return reduced(c, "sum", apply("abs", lambda x: call("abs", x), gaps), -1)
    if p == float("inf"):
        return reduced(c, "max", apply("abs", lambda x: call("abs", x), gaps), -1)
    powers = apply("pow", lambda x: x * x if p == 2 else call("abs", x) ** float(p), gaps)

    def root(s: Any) -> Any:
        inside = call("where", s > 0.0, s, 1.0)
        return call("where", s > 0.0, call("sqrt", inside) if p == 2 else inside ** (1.0 / p), 0.0)

    return apply("root", root, reduced(c, "sum", powers, -1))


@aten("cosine_similarity")
def _cosine(c: Call, x: Any, y: Any, dim: int = 1, eps: float = 1e-8) -> Any:
    left, right = c.tensor(x), c.tensor(y)

    def size(of: Tensor) -> Any:
        total = reduced(c, "sum", apply("square", lambda x: x * x, of), dim)
        return apply("size", lambda s: call("max", call("sqrt", s), eps), total)

    return reduced(c, "sum", left * right, dim) / (size(left) * size(right))


@aten("_grouped_mm", "transformers::grouped_mm_fallback")
def _grouped(c: Call, x: Any, weights: Any, offs: Any = None, **_: Any) -> Any:
    """Rows, each by the matrix of its group; `offs` says where each group ends. All groups are multiplied, with zeros
    in the place of the rows of others: which rows are whose is data.
    """
    rows, w, ends = c.tensor(x), c.tensor(weights), c.tensor(offs)
    groups, inner, outer = w.shape
    begun = ends.reshape(-1, 1) <= np.arange(rows.shape[0])
    group = convert(begun, "int64").sum(0)
    member = convert(group.reshape(-1, 1) == np.arange(groups), rows.dtype)
    spread = (member[:, :, None] * rows[:, None, :]).reshape(rows.shape[0], groups * inner)
    return spread @ w.reshape(groups * inner, outer)

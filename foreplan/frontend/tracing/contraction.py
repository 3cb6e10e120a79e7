"""Matrix products of traced tensors: matmul, dot, tensordot and einsum, as batched `matmul` nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from foreplan.errors import ShapeError
from foreplan.frontend.tracing.dispatch import as_axis
from foreplan.frontend.tracing.elementwise import convert
from foreplan.frontend.tracing.tensor import Tensor, as_tensor, common_float
from foreplan.frontend.tracing.tracer import current, fail
from foreplan.ops import matmul as product
from foreplan.ops.expr import promote
from foreplan.ops.shape import reshape


def _pair(x: Any, y: Any) -> tuple[Tensor, Tensor]:
    """Both as tensors of their common element type."""
    like = common_float(x, y)
    left, right = as_tensor(x, like), as_tensor(y, like)
    dtype = promote(left.value.dtype, right.value.dtype)
    return convert(left, dtype), convert(right, dtype)


def matmul(x: Any, y: Any) -> Tensor:
    """NumPy's matmul: batches of matrices; an operand with one axis is a row (left) or a column (right).

    Raises:
        ShapeError: the inner extents differ, or the batch axes do not broadcast.
        TraceError: an operand has no axes.
    """
    left, right = _pair(x, y)
    if not left.ndim or not right.ndim:
        raise fail("matmul of a scalar; multiply with * instead")
    tracer, b = current(), current().at()
    row, column = left.ndim == 1, right.ndim == 1
    p = reshape(b, left.value, (1, *left.shape)) if row else left.value
    q = reshape(b, right.value, (*right.shape, 1)) if column else right.value
    transposed = [value in tracer.swapped for value in (p, q)]
    p, q = (tracer.swapped.get(value, value) for value in (p, q))
    y_value = product.matmul(b, p, q, *transposed)
    shape = list(y_value.shape)
    if column:
        del shape[-1]
    if row:
        del shape[-1 if column else -2]
    return tracer.wrap(reshape(b, y_value, shape))


def tensordot(x: Any, y: Any, axes: int | Sequence[Any] = 2) -> Tensor:
    """Sum of products over pairs of axes, as np.tensordot."""
    left, right = _pair(x, y)
    if isinstance(axes, int):
        pairs = [(left.ndim - axes + i, i) for i in range(axes)]
    else:
        first, second = ([part] if isinstance(part, int) else list(part) for part in axes)
        pairs = [(as_axis(i, left.ndim), as_axis(j, right.ndim)) for i, j in zip(first, second, strict=True)]
    letters = [chr(ord("a") + i) for i in range(left.ndim)]
    others = [chr(ord("A") + i) for i in range(right.ndim)]
    for i, j in pairs:
        others[j] = letters[i]
    kept = [c for c in letters if c not in others] + [c for c in others if c not in letters]
    return einsum(f"{''.join(letters)},{''.join(others)}->{''.join(kept)}", left, right)


def dot(x: Any, y: Any) -> Any:
    """np.dot: a product with a scalar, or over the last axis of `x` and the last but one of `y`."""
    left, right = _pair(x, y)
    if not left.ndim or not right.ndim:
        return left * right
    if right.ndim <= 2:
        return matmul(left, right)
    return tensordot(left, right, ([left.ndim - 1], [right.ndim - 2]))


def einsum(subscripts: str, *operands: Any) -> Any:
    """Einstein's sum over one, two or more operands, contracted from the left.

    Args:
        subscripts: letters without ellipsis; no operand has one letter twice.
        operands: a tensor or array for each part of the subscripts.

    Raises:
        TraceError: the subscripts have another form, or do not fit the operands.
    """
    if not isinstance(subscripts, str):
        raise fail("einsum is traced with its subscripts as text, such as np.einsum('bij,bjk->bik', x, y)")
    text = subscripts.replace(" ", "")
    left, arrow, out = text.partition("->")
    labels = left.split(",")
    if not arrow:
        out = "".join(sorted(c for c in set(left) - {","} if left.count(c) == 1))
    like = common_float(*operands)
    tensors = [as_tensor(operand, like) for operand in operands]
    if "." in text or len(labels) != len(tensors) or any(len(set(part)) < len(part) for part in (*labels, out)):
        raise fail(f"einsum({subscripts!r}) is traced without ellipsis, and with no letter twice in one operand")
    extents: dict[str, int] = {}
    for part, tensor in zip(labels, tensors):
        if len(part) != tensor.ndim:
            raise ShapeError(f"einsum({subscripts!r}): {part!r} has {len(part)} letters for {tensor.value!r}")
        for letter, extent in zip(part, tensor.shape):
            if extents.setdefault(letter, extent) != extent:
                raise ShapeError(f"einsum({subscripts!r}): {letter!r} is both {extents[letter]} and {extent}")
    if missing := sorted(set(out) - set(extents)):
        raise fail(f"einsum({subscripts!r}): the output's {missing[0]!r} is in no operand")
    result, label = tensors[0], labels[0]
    for i in range(1, len(tensors)):
        later = set(out).union(*labels[i + 1 :])
        result, label = _contract(result, label, tensors[i], labels[i], later)
    result, label = _sum_out(result, label, set(out))
    return result.transpose([label.index(c) for c in out]) if label else result


def _sum_out(x: Tensor, label: str, needed: set[str]) -> tuple[Tensor, str]:
    axes = tuple(i for i, letter in enumerate(label) if letter not in needed)
    if not axes:
        return x, label
    return x.sum(axis=axes), "".join(letter for letter in label if letter in needed)


def _contract(x: Tensor, first: str, y: Tensor, second: str, needed: set[str]) -> tuple[Tensor, str]:
    """One product: letters of both that are needed later are batch axes, the others are summed over."""
    x, first = _sum_out(x, first, needed | set(second))
    y, second = _sum_out(y, second, needed | set(first))
    x, y = _pair(x, y)
    size = dict(zip(first + second, x.shape + y.shape))
    batch = [c for c in first if c in second and c in needed]
    inner = [c for c in first if c in second and c not in needed]
    rows = [c for c in first if c not in second]
    columns = [c for c in second if c not in first]

    def arrange(tensor: Tensor, label: str, *groups: list[str]) -> Tensor:
        moved = tensor.transpose([label.index(c) for group in groups for c in group])
        return moved.reshape([size[c] for c in groups[0]] + [int(np.prod([size[c] for c in g])) for g in groups[1:]])

    product_ = matmul(arrange(x, first, batch, rows, inner), arrange(y, second, batch, inner, columns))
    label = "".join(batch + rows + columns)
    return product_.reshape([size[c] for c in label]), label

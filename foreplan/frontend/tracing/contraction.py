"""Matrix products of traced tensors: matmul, dot, tensordot and einsum, as batched `matmul` nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from foreplan.base.errors import ShapeError
from foreplan.frontend.tracing.dispatch import as_axis
from foreplan.frontend.tracing.elementwise import convert
from foreplan.frontend.tracing.methods import for_tensors
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


@for_tensors
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
    return Tensor(tracer, reshape(b, y_value, shape))


@for_tensors
def matvec(x: Any, y: Any) -> Any:
    """np.matvec: matrices [..., n, m] times vectors [..., m]."""
    left, right = _pair(x, y)
    return matmul(left, right.reshape(*right.shape, 1)).squeeze(-1)


@for_tensors
def vecmat(x: Any, y: Any) -> Any:
    """np.vecmat: vectors [..., n] times matrices [..., n, m]."""
    left, right = _pair(x, y)
    return matmul(left.reshape(*left.shape[:-1], 1, left.shape[-1] if left.ndim else 1), right).squeeze(-2)


@for_tensors
def vecdot(x: Any, y: Any) -> Any:
    """np.vecdot: the sum of products along the last axis."""
    left, right = _pair(x, y)
    return (left * right).sum(-1)


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


def einsum(subscripts: str, *operands: Any, optimize: Any = False) -> Any:
    """Einstein's sum over one, two or more operands, contracted from the left.

    Args:
        subscripts: letters, and at most one ellipsis an operand. A letter twice in one operand is its diagonal.
        operands: a tensor or array for each part of the subscripts.
        optimize: NumPy's; the order stays from left to right.

    Raises:
        TraceError: the subscripts have another form, or do not fit the operands.
    """
    if not isinstance(subscripts, str):
        raise fail("einsum is traced with its subscripts as text, such as np.einsum('bij,bjk->bik', x, y)")
    like = common_float(*operands)
    tensors = [as_tensor(operand, like) for operand in operands]
    labels, out = _labels(subscripts, tensors)
    tensors, labels = map(list, zip(*map(_diagonals, tensors, labels)))
    extents: dict[str, int] = {}
    for part, tensor in zip(labels, tensors):
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


def _labels(subscripts: str, tensors: list[Tensor]) -> tuple[list[str], str]:
    """A letter for each axis of each operand, and those of the result; an ellipsis is digits, its last axis 0.

    Operands lose the axes of an ellipsis that have one element and are broadcast.
    """
    text = subscripts.replace(" ", "")
    left, arrow, out = text.partition("->")
    parts = left.split(",")
    letters = [part.replace("...", "", 1) for part in (*parts, out)]
    if len(parts) != len(tensors) or not all(part.isalpha() for part in letters if part):
        raise fail(
            f"einsum({subscripts!r}) of {len(tensors)} operands: the subscripts must have letters, and at most one "
            "ellipsis, for each operand"
        )
    if len(set(letters[-1])) < len(letters[-1]):
        raise fail(f"einsum({subscripts!r}): the output has one letter twice")
    widest = 0
    for i, (part, tensor) in enumerate(zip(parts, tensors)):
        more = tensor.ndim - len(letters[i])
        if more < 0 or (more and "..." not in part):
            raise ShapeError(f"einsum({subscripts!r}): {part!r} has {len(letters[i])} letters for {tensor.value!r}")
        # Characters that are no letters stand for the axes of an ellipsis.
        parts[i] = part.replace("...", "".join(chr(_ELLIPSIS + n) for n in reversed(range(more))))
        widest = max(widest, more if "..." in part else 0)
    dots = "".join(chr(_ELLIPSIS + n) for n in reversed(range(widest)))
    if arrow and widest and "..." not in out:
        raise fail(f"einsum({subscripts!r}): the output must have the ellipsis of the operands")
    if not arrow:
        once = sorted(c for c in set(left) - {",", "."} if left.count(c) == 1)
        return _spread(parts, tensors), dots + "".join(once)
    return _spread(parts, tensors), out.replace("...", dots)


_ELLIPSIS = 0xE000  # the first character for private use in Unicode


def _spread(parts: list[str], tensors: list[Tensor]) -> list[str]:
    """Drop the axes of ellipses that have one element where another operand has more."""
    sizes: dict[str, int] = {}
    for part, tensor in zip(parts, tensors):
        for letter, extent in zip(part, tensor.shape):
            sizes[letter] = extent if sizes.get(letter, 1) == 1 else sizes[letter]
    for i, (part, tensor) in enumerate(zip(parts, tensors)):
        gone = [
            n for n, (c, m) in enumerate(zip(part, tensor.shape)) if ord(c) >= _ELLIPSIS and m == 1 and sizes[c] != 1
        ]
        if gone:
            tensors[i] = tensor.squeeze(tuple(gone))
            parts[i] = "".join(c for n, c in enumerate(part) if n not in gone)
    return parts


def _diagonals(x: Tensor, label: str) -> tuple[Tensor, str]:
    """The diagonal for each letter that an operand has twice."""
    for letter in dict.fromkeys(label):
        while label.count(letter) > 1:
            first = label.index(letter)
            second = label.index(letter, first + 1)
            if x.shape[first] != x.shape[second]:
                raise ShapeError(f"einsum: {letter!r} is both {x.shape[first]} and {x.shape[second]} of {x.value!r}")
            taken: Any = np.diagonal(x, 0, first, second)
            rest = "".join(c for i, c in enumerate(label) if i not in (first, second))
            x, label = taken, rest + letter
    return x, label


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

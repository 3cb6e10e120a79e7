"""Functions of neural networks that have no parameters: activations, pooling, attention, dropout, selection."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

import numpy as np

from foreplan.base.arguments import flag, listed, number_in, shown, whole
from foreplan.base.errors import ShapeError
from foreplan.frontend.tracing.dispatch import as_axis
from foreplan.frontend.tracing.elementwise import as_bool, convert, select
from foreplan.frontend.tracing.tensor import Tensor, as_tensor, takes_tensors, wrap
from foreplan.frontend.tracing.tracer import current, fail
from foreplan.graph import Value, as_dtype
from foreplan.ops import index, random, scan, sort
from foreplan.ops import loss as losses
from foreplan.ops.attention import ops as attending


def dropout(x: Any, ratio: float = 0.5) -> Tensor:
    """Zero each element with probability `ratio` and scale the rest by 1 / (1 − ratio) (Srivastava et al. 2014).

    This happens in training only; in inference the result is `x`.

    Raises:
        TraceError: the ratio is no number in [0, 1).
    """
    return _dropout("dropout", x, ratio)


def stochastic_depth(x: Any, ratio: float = 0.1) -> Tensor:
    """Zero each item of the batch with probability `ratio` and scale the rest by 1 / (1 − ratio) (Huang et al. 2016,
    arXiv:1603.09382), also called DropPath. Items are along the first axis.

    Give it the branch of a residual block, before the block's input is added. This happens in training only; in
    inference the result is `x`.

    Raises:
        TraceError: the ratio is no number in [0, 1).
    """
    return _dropout("stochastic_depth", x, ratio, whole_items=True)


def _dropout(kind: str, x: Any, ratio: float, whole_items: bool = False) -> Tensor:
    if isinstance(ratio, bool) or not isinstance(ratio, Real) or not 0.0 <= ratio < 1.0:
        raise fail(f"{kind}'s ratio must be a number in [0, 1), and is {shown(ratio)}")
    tensor = as_tensor(x)
    return tensor if not ratio else _wrap(random.dropout(current().at(), tensor.value, float(ratio), whole_items))


def concat(tensors: Sequence[Any], axis: int = 1) -> Tensor:
    """Tensors joined along an axis, the channels by default. Their other extents and element types are the same."""
    parts = [as_tensor(each) for each in listed("what is joined", tensors)]
    if not parts:
        raise ShapeError("concat needs at least one tensor")
    joined: Any = np.concatenate(parts, axis=as_axis(axis, parts[0].ndim))
    return as_tensor(joined)


@takes_tensors
def flatten(x: Tensor, start: int = 1) -> Tensor:
    """The axes from `start` on as one axis: [N, C, H, W] → [N, C·H·W]."""
    first = as_axis(start, x.ndim)
    return x.reshape(*x.shape[:first], math.prod(x.shape[first:]))


# Attention


@takes_tensors
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any = None,
    causal: bool = False,
    scale: float | None = None,
    heads_last: bool = False,
) -> Tensor:
    """softmax(q·kᵀ·scale + mask)·v: [B, H, T, E]. The whole score matrix never exists.

    Args:
        q: queries [B, H, T, D].
        k: keys [B, G, S, D]; G divides H, and H/G neighbouring query heads share a key head.
        v: values [B, G, S, E].
        mask: broadcasts to [B, H, T, S]; added to the scores, or boolean (True: attend).
        causal: position t attends to positions up to t.
        scale: factor on the scores, 1/√D by default.
        heads_last: q, k, v and the result are [B, positions, heads, depth], as `split_heads` gives them.

    Raises:
        ShapeError: shapes or element types do not fit each other.
    """
    if wrong := [x for x in (q, k, v) if x.ndim != 4]:
        raise ShapeError(f"attention needs q, k and v with four axes, and got {wrong[0]!r}")
    factor = None if scale is None else number_in("attention's scale", scale, -math.inf, math.inf)
    causal, last = flag("causal", causal), flag("heads_last", heads_last)
    bias = None if mask is None else _additive(mask, q).value
    b = current().at()
    y = attending.attention(b, q.value, k.value, v.value, bias, causal=causal, scale=factor, heads_last=last)
    return _wrap(y)


def _additive(mask: Any, q: Tensor) -> Tensor:
    """A mask as numbers to add to scores, with four axes."""
    mask = mask if isinstance(mask, Tensor) else np.asarray(mask)
    dtype = q.value.dtype
    if np.dtype(mask.dtype) == bool:
        # The lowest number and not -inf: a query without any key then gets the mean of the values, not NaN.
        lowest = float(np.finfo(np.float32 if dtype.name == "bfloat16" else dtype.numpy).min)
        if isinstance(mask, np.ndarray):
            mask = np.where(mask, 0.0, lowest)
        else:
            mask = select(mask, 0.0, lowest)
    found = convert(as_tensor(mask, dtype), dtype)
    return found.reshape((1,) * (4 - found.ndim) + found.shape)


@takes_tensors
def split_heads(x: Tensor, heads: int, parts: int = 1) -> tuple[Tensor, ...]:
    """[B, T, parts·D] → `parts` tensors [B, T, heads, D/heads], all of them views, for `attention(heads_last=True)`.

    Raises:
        ShapeError: `x` does not have three axes, or the heads do not divide D.
        UsageError: `heads` or `parts` is not a whole number of at least 1.
    """
    parts, heads = whole("the number of parts", parts, 1), whole("the number of heads", heads, 1)
    if x.ndim != 3 or x.shape[2] % (parts * heads):
        raise ShapeError(
            f"{x!r} does not split into {parts} × {heads} heads; it needs [batch, positions, width] with a width that "
            f"{parts * heads} divides"
        )
    batch, length, width = x.shape
    pieces: Any = np.split(x, parts, axis=2) if parts > 1 else [x]
    return tuple(piece.reshape(batch, length, heads, width // parts // heads) for piece in pieces)


@takes_tensors
def join_heads(x: Tensor) -> Tensor:
    """[B, T, H, D] → [B, T, H·D], a view.

    Raises:
        ShapeError: `x` does not have four axes.
    """
    if x.ndim != 4:
        raise ShapeError(f"join_heads needs [batch, positions, heads, depth], and got {x!r}")
    batch, length, heads, width = x.shape
    return x.reshape(batch, length, heads * width)


# Loss terms and selection


@takes_tensors
def cross_entropy(logits: Tensor, target: Tensor, axis: int = -1, ignore_index: int = -100) -> Tensor:
    """−log softmax(logits)[target]: one number for each item, in the shape of the target.

    Args:
        logits: floating-point scores, with the classes along `axis`.
        target: integers in the shape of the logits without that axis.
        axis: the axis of the classes.
        ignore_index: the target of items that do not count; their loss is 0.

    Raises:
        ShapeError: the target does not fit the logits.
    """
    found = as_axis(axis, logits.ndim)
    b = current().at()
    return _wrap(losses.cross_entropy(b, logits.value, target.value, axis=found, ignore_index=ignore_index))


@takes_tensors
def one_hot(ids: Tensor, depth: int, axis: int = -1, dtype: str = "float32") -> Tensor:
    """1 where the index along the new axis equals the element, else 0: integers [...] → [..., depth].

    Raises:
        UsageError: the depth is not a whole number of at least 0.
    """
    depth = whole("one_hot's depth", depth, 0)
    return _wrap(
        index.one_hot(current().at(), ids.value, depth, axis=as_axis(axis, ids.ndim + 1), dtype=as_dtype(dtype))
    )


@takes_tensors
def cumsum(x: Tensor, axis: int = -1, exclusive: bool = False, reverse: bool = False) -> Tensor:
    """Running sum along an axis; `exclusive` leaves the element itself out, `reverse` runs from the end."""
    return _wrap(current().at().apply(scan.CumSum(as_axis(axis, x.ndim), exclusive, reverse), x.value))


@takes_tensors
def topk(x: Tensor, k: int, axis: int = -1, largest: bool = True) -> tuple[Tensor, Tensor]:
    """The k largest (or smallest) elements along an axis, in order, and their indices (int64).

    Raises:
        ShapeError: the axis has fewer than k elements.
        UsageError: k is not a whole number of at least 0.
    """
    k = whole("topk's k", k, 0)
    values, indices = current().at().node(sort.TopK(k, as_axis(axis, x.ndim), largest), x.value)
    return _wrap(values), _wrap(indices)


@takes_tensors
def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of the elements where the mask is true, a scalar; 0 if it is true nowhere."""
    count = convert(as_bool(mask), x.value.dtype).sum()
    return (x * convert(as_bool(mask), x.value.dtype)).sum() / np.maximum(count, 1.0)


def _wrap(value: Value) -> Tensor:
    return wrap(value)

"""Scaled dot-product attention, with the masks that PyTorch's models give it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from foreplan.frontend import nn
from foreplan.frontend.torch.call import Call
from foreplan.frontend.torch.masks import Diagonals, applied, compact
from foreplan.frontend.torch.ops.elementwise import as_operand, broadcast
from foreplan.frontend.torch.ops.random import dropped
from foreplan.frontend.torch.table import aten
from foreplan.frontend.tracing.elementwise import convert
from foreplan.frontend.tracing.tensor import Tensor, as_tensor
from foreplan.graph.types import BOOL, broadcast_shapes
from foreplan.ops.attention.ops import attention
from foreplan.ops.expr import cast, where


@aten("scaled_dot_product_attention", draws=True)
def _attention(
    c: Call,
    q: Any,
    k: Any,
    v: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    queries, keys, values = (_of_four_axes(x) for x in _of_one_rank(c, q, k, v))
    factor = 1 / math.sqrt(max(1, queries.shape[-1])) if scale is None else scale
    mask, causal = _recognised(attn_mask, is_causal, queries.shape[-2], keys.shape[-2])
    added = None if mask is None else _additive(c, mask, queries)
    if not dropout_p:
        whole = None if added is None else applied("mask", lambda x: cast(x, queries.value.dtype), [added]).value
        y = attention(c.b, queries.value, keys.value, values.value, whole, causal=causal, scale=factor)
        return c.wrap(y).reshape(c.shape)
    group = queries.shape[1] // keys.shape[1]
    if group > 1:
        keys, values = (as_tensor(np.repeat(x, group, axis=1)) for x in (keys, values))
    scores: Any = (queries * factor) @ keys.mT
    if causal:
        below = as_operand(c, np.tril(np.ones(scores.shape[-2:], bool)), BOOL)
        scores = applied("where", where, [below, scores, -np.inf])
    if added is not None:
        scores = applied("add", lambda x, y: x + y, [scores, added])
    return (dropped(c, nn.softmax(scores), dropout_p) @ values).reshape(c.shape)


def _of_one_rank(c: Call, *xs: Any) -> list[Tensor]:
    """Tensors with the same leading axes: PyTorch broadcasts them, but for heads that are shared (`enable_gqa`)."""
    given = [c.tensor(x) for x in xs]
    rank = max(x.ndim for x in given)
    if all(x.ndim == rank for x in given) and (rank > 4 or len({x.shape[:-3] for x in given}) == 1):
        return given
    lead = broadcast_shapes(*(x.shape[:-2] for x in given))
    return [broadcast(x, (*lead, *x.shape[-2:])) for x in given]


def _of_four_axes(x: Tensor) -> Tensor:
    """[items, heads, positions, depth] of a tensor with more or fewer axes."""
    return x if x.ndim == 4 else x.reshape(-1, *((1, 1, 1, *x.shape)[-3:]))


def _recognised(mask: Any, causal: bool, queries: int, keys: int) -> tuple[Any, bool]:
    """A mask that is known, as the causal flag where that says the same."""
    if not isinstance(mask, np.ndarray) or causal:
        return mask, causal
    mask = compact(mask)
    allowed = mask if mask.dtype == bool else None
    if allowed is None and mask.dtype.kind == "f":
        lowest = np.finfo(mask.dtype).min
        if np.isin(mask, (0, lowest, -np.inf)).all():
            allowed = mask == 0
    if allowed is None:
        return mask, causal
    if allowed.all():
        return None, False
    below = np.tril(np.ones((queries, keys), bool))
    if allowed.shape[-2:] == below.shape and (allowed == below).all():
        return None, True
    return mask, causal


def _additive(c: Call, mask: Any, queries: Tensor) -> Tensor | Diagonals:
    """A mask as numbers that are added to the scores."""
    dtype = queries.value.dtype
    if isinstance(mask, np.ndarray):
        mask = np.where(mask, 0.0, -np.inf).astype(dtype.numpy) if mask.dtype == bool else mask
        found = as_operand(c, _with_items(mask), dtype)
        return found if isinstance(found, Diagonals) else c.tensor(found, dtype)
    tensor = c.tensor(mask)
    if tensor.value.dtype.category == "bool":
        numbers: Any = np.where(tensor, 0.0, -np.inf)
        tensor = numbers
    return convert(_with_items(tensor), dtype)


def _with_items(mask: Any) -> Any:
    return mask if mask.ndim <= 4 else mask.reshape(-1, *mask.shape[-3:])

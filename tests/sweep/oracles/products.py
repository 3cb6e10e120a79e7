"""Products and attention with all scores at once, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.special

from foreplan.ops.attention.ops import LOWEST
from tests.sweep.oracles.expressions import values_of
from tests.sweep.oracles.windows import conv

Array = np.ndarray
Arrays = list[Array]


def matmul(op: Any, a: Array, b: Array, *base: Array) -> Arrays:
    """Summed index by index, without BLAS."""
    left, right = "km" if op.transpose_a else "mk", "nk" if op.transpose_b else "kn"
    y = np.einsum(f"...{left},...{right}->...mn", a, b, optimize=True)
    return [y + base[0] if base else y]


def matmul_map(op: Any, a: Array, b: Array, *others: Array) -> Arrays:
    (product,) = matmul(op, a, b)
    return [np.broadcast_to(values_of(expr, [product, *others]), product.shape) for expr in op.exprs]


def _heads_first(op: Any, *arrays: Array) -> Arrays:
    return [x.swapaxes(1, 2) if op.heads_last else x for x in arrays]


def _scores(op: Any, q: Array, k: Array, mask: Array | None) -> Array:
    s = np.einsum("bhtd,bhsd->bhts", q, k, optimize=True) * op.scale
    s = s if mask is None else s + mask
    return np.where(np.tril(np.ones(s.shape[-2:], bool)), s, -np.inf) if op.causal else s


def attention(op: Any, q: Array, k: Array, v: Array, *mask: Array) -> Arrays:
    """Queries that see nothing give zeros, and the log-sum-exp that the op says."""
    q, k, v = _heads_first(op, q, k, v)
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    s = _scores(op, q, k, mask[0] if mask else None)
    blind = (s == -np.inf).all(-1)
    with np.errstate(all="ignore"):
        p = np.where(blind[..., None], 0.0, scipy.special.softmax(np.where(blind[..., None], 0.0, s), -1))
        lse = np.where(blind, LOWEST, scipy.special.logsumexp(np.where(blind[..., None], 0.0, s), -1))
    (o,) = _heads_first(op, np.einsum("bhts,bhse->bhte", p, v, optimize=True))
    return [o, lse]


def attention_grad(op: Any, q: Array, k: Array, v: Array, o: Array, lse: Array, g: Array, *mask: Array) -> Arrays:
    q, k, v, o, g = _heads_first(op, q, k, v, o, g)
    group = q.shape[1] // k.shape[1]
    keys, values = (np.repeat(x, group, axis=1) for x in (k, v))
    s = _scores(op, q, keys, mask[0] if mask else None)
    p = np.exp(s - lse[..., None])
    dp = np.einsum("bhte,bhse->bhts", g, values, optimize=True)
    ds = p * (dp - (o * g).sum(-1, keepdims=True))
    dq = np.einsum("bhts,bhsd->bhtd", ds, keys, optimize=True) * op.scale
    dk = np.einsum("bhts,bhtd->bhsd", ds, q, optimize=True) * op.scale
    dv = np.einsum("bhts,bhte->bhse", p, g, optimize=True)
    dk, dv = (x.reshape(len(x), k.shape[1], group, *x.shape[2:]).sum(2) for x in (dk, dv))
    found = _heads_first(op, dq, dk, dv)
    if op.mask_gradient:
        axes = tuple(i for i, n in enumerate(mask[0].shape) if n == 1)
        found.append(ds.sum(axes, keepdims=True))
    return found


def packed_attention_grad(op: Any, x: Array, o: Array, lse: Array, g: Array) -> Arrays:
    heads = (op.heads, op.kv_heads, op.kv_heads)
    depth = x.shape[2] // sum(heads)
    cut = np.split(x, np.cumsum(heads)[:2] * depth, axis=2)
    parts = [part.reshape(*x.shape[:2], n, depth) for part, n in zip(cut, heads)]
    found = attention_grad(op.unpacked, *parts, o, lse, g)
    return [np.concatenate([part.reshape(*x.shape[:2], n * depth) for part, n in zip(found, heads)], 2)]


def conv_map(op: Any, x: Array, w: Array, *others: Array) -> Arrays:
    biases, further = others[: int(op.biased)], others[int(op.biased) :]
    (y,) = conv(op, x, w, *biases)
    return [np.broadcast_to(values_of(op.expr, [y, *further]), y.shape)]

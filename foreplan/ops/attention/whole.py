"""Attention over whole score matrices, as graph nodes: what targets without its kernels run."""

from __future__ import annotations

import math

from foreplan.graph import Array, Builder, TensorType, Value, as_dtype
from foreplan.graph.types import Shape
from foreplan.graph.value import Kind
from foreplan.ops.attention.blocks import AttentionOp, Extents
from foreplan.ops.expr import where
from foreplan.ops.index import positions
from foreplan.ops.map import convert, elementwise
from foreplan.ops.matmul import matmul
from foreplan.ops.shape import reshape, transpose


def heads_apart(b: Builder, op: AttentionOp, e: Extents, x: Value) -> Value:
    """Queries, keys, values, or what is like them, wide: [batch, key heads, heads that share them, positions, depth].

    The heads that share keys are an axis of their own, along which keys and values broadcast.
    """
    x = convert(b, x, x.dtype.wide)
    if op.heads_last:
        x = transpose(b, x, (0, 2, 1, 3))
    return reshape(b, x, (e.batch, e.kv_heads, x.shape[1] // e.kv_heads, *x.shape[2:]))


def heads_together(b: Builder, op: AttentionOp, x: Value, like: Value) -> Value:
    """The inverse of `heads_apart`, in the element type of `like`."""
    x = convert(b, reshape(b, x, (x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])), like.dtype)
    return transpose(b, x, (0, 2, 1, 3)) if op.heads_last else x


def whole_scores(b: Builder, op: AttentionOp, e: Extents, q: Value, k: Value, mask: Value | None) -> Value:
    """scale · q·kᵀ + mask [batch, heads, queries, keys], -inf where a causal query does not look."""
    s = reshape(b, matmul(b, q, k, transpose_b=True), (e.batch, e.heads, e.queries, e.keys))
    s = elementwise(b, lambda s: s * op.scale, s)
    if mask is not None:
        s = elementwise(b, lambda s, m: s + m, s, convert(b, mask, s.dtype))
    if op.causal:
        i, j = (_positions(b, shape) for shape in ((e.queries, 1), (1, e.keys)))
        s = elementwise(b, lambda s, i, j: where(j <= i, s, -math.inf), s, i, j)
    return s


def _positions(b: Builder, shape: Shape) -> Value:
    places = positions(math.prod(shape)).reshape(shape)
    return b.store(b.scope + "positions", TensorType(as_dtype("int64"), shape), Kind.CONSTANT, Array(places))

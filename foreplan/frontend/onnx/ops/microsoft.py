"""Ops of ONNX Runtime's domain com.microsoft that exporters and its graph optimizer write.

Source: ONNX Runtime's ContribOperators.md.
"""

from __future__ import annotations

import math
from functools import partial

from foreplan.frontend.onnx.node import OnnxNode, Operand, Result, translates
from foreplan.frontend.onnx.ops.map import gelu, tanh_gelu
from foreplan.frontend.onnx.tensors import from_array
from foreplan.graph import Value
from foreplan.graph.types import INT64
from foreplan.ops.attention.ops import attention
from foreplan.ops.expr import cast, sigmoid, where
from foreplan.ops.index import gather, positions
from foreplan.ops.join import concat, split
from foreplan.ops.map import convert, elementwise
from foreplan.ops.matmul import matmul
from foreplan.ops.norm.rows import LayerNorm, rms_norm
from foreplan.ops.shape import broadcast_to, reshape, slice_axis, transpose

_translates = partial(translates, domain="com.microsoft")


@_translates("Gelu", "BiasGelu")
def _gelu(n: OnnxNode) -> Operand:
    return n.map(lambda *parts: gelu(sum(parts[1:], parts[0])))


@_translates("FastGelu")
def _fast_gelu(n: OnnxNode) -> Operand:
    return n.map(lambda *parts: tanh_gelu(sum(parts[1:], parts[0])))


@_translates("QuickGelu")
def _quick_gelu(n: OnnxNode) -> Operand:
    alpha = n.number("alpha", 1.702)
    return n.map(lambda x: x * sigmoid(x * alpha), 0)


@_translates("FusedMatMul")
def _fused_matmul(n: OnnxNode) -> Operand:
    if n.integer("transBatchA", 0) or n.integer("transBatchB", 0):
        raise n.unsupported("transBatchA or transBatchB is set; write the batch axis with a Transpose")
    if min(len(n.shape(0)), len(n.shape(1))) < 2:
        raise n.unsupported(f"it multiplies vectors ({n.type(0)} and {n.type(1)}); use MatMul")
    alpha = n.number("alpha", 1.0)
    product = matmul(n.b, n.value(0), n.value(1), bool(n.integer("transA", 0)), bool(n.integer("transB", 0)))
    return elementwise(n.b, lambda p: p * alpha, product)


@_translates("SkipLayerNormalization", "SkipSimplifiedLayerNormalization")
def _skip_norm(n: OnnxNode) -> Result:
    """The norm of input + skip (+ bias); the sum is output 3."""
    plain, epsilon = n.op_type == "SkipLayerNormalization", n.number("epsilon", 1e-12)
    bias = 4 if plain else 3
    parts = [n.value(i) for i in (0, 1, bias) if n.has(i)]
    total = elementwise(n.b, lambda *xs: sum(xs[1:], xs[0]), *parts)
    if not plain:
        if n.wants(1) or n.wants(2):
            raise n.unsupported("its outputs mean and inv_std_var are used; export the model without them")
        return [rms_norm(n.b, total, n.value(2), epsilon=epsilon), None, None, total]
    axis = len(total.shape) - 1
    y, *statistics = n.b.node(LayerNorm(axis, epsilon), total, *(n.value(i) for i in (2, 3) if n.has(i)))
    kept = (*total.shape[:-1], 1)
    return [y, *(reshape(n.b, value, kept) for value in statistics), total]


@_translates("RotaryEmbedding")
def _rotary(n: OnnxNode) -> Operand:
    """Pairs of a head's first elements, turned by the angles of their positions; x[B, T, H·D] or x[B, H, T, D]."""
    x = n.value(0)
    heads_first, turned = len(x.shape) == 4, 2 * n.shape(2)[1]
    if n.integer("is_packed_batching", 0):
        raise n.unsupported("is_packed_batching=1, sequences of several lengths in one row; export it without packing")
    if heads_first:
        x = transpose(n.b, x, (0, 2, 1, 3))
    else:
        heads = n.integer("num_heads", 0) or x.shape[2] // turned
        x = reshape(n.b, x, (*x.shape[:2], heads, x.shape[2] // heads))
    batch, length, heads, depth = x.shape
    if not turned <= depth:
        raise n.misshapen(f"its tables {n.type(2)} turn {turned} elements, and a head has {depth}")
    cos, sin = (_angles(n, i, batch, length) for i in (2, 3))
    head, rest = split(n.b, x, [turned, depth - turned], 3) if turned < depth else (x, None)
    if n.integer("interleaved", 0):
        pairs = reshape(n.b, head, (batch, length, heads, turned // 2, 2))
        a, b = (reshape(n.b, slice_axis(n.b, pairs, 4, i, 1), pairs.shape[:4]) for i in (0, 1))
    else:
        a, b = split(n.b, head, [turned // 2] * 2, 3)
    parts = [
        elementwise(n.b, lambda a, b, c, s: a * c - b * s, a, b, cos, sin),
        elementwise(n.b, lambda a, b, c, s: a * s + b * c, a, b, cos, sin),
    ]
    if n.integer("interleaved", 0):
        stacked = concat(n.b, [reshape(n.b, part, (*part.shape, 1)) for part in parts], 4)
        parts = [reshape(n.b, stacked, head.shape)]
    y = concat(n.b, [*parts, *([] if rest is None else [rest])], 3)
    return transpose(n.b, y, (0, 2, 1, 3)) if heads_first else reshape(n.b, y, n.shape(0))


def _angles(n: OnnxNode, index: int, batch: int, length: int) -> Value:
    """The rows of a table at the positions, [B, T, 1, D/2]; a single position is that of the first token."""
    at = n.value(1)
    if at.type.size == 1 and len(at.shape) < 2:
        steps = n.as_value(from_array(f"{n.output_names[0]}.steps", positions(length)))
        at = elementwise(n.b, lambda first, step: cast(first, INT64) + step, reshape(n.b, at, (1,)), steps)
        at = reshape(n.b, at, (1, length))
    rows = gather(n.b, n.value(index), at, 0)
    return reshape(n.b, broadcast_to(n.b, rows, (batch, length, rows.shape[-1])), (batch, length, 1, rows.shape[-1]))


@_translates("Attention")
def _attention(n: OnnxNode) -> Result:
    """Self-attention with its projection: x[B, T, C], weights [C, Q + K + V] and a bias."""
    _refuse(n, {4: "past", 6: "past_sequence_length"}, {1: "present"})
    if n.integer("do_rotary", 0):
        raise n.unsupported("do_rotary=1; write the rotation with RotaryEmbedding")
    product = matmul(n.b, n.value(0), n.value(1))
    if n.has(2):
        product = elementwise(n.b, lambda p, bias: p + bias, product, n.value(2))
    widths = n.integers("qkv_hidden_sizes", [product.shape[2] // 3] * 3)
    q, k, v = split(n.b, product, widths, 2)
    return _attend(n, q, k, v, 3, 5)


@_translates("MultiHeadAttention")
def _multi_head_attention(n: OnnxNode) -> Result:
    """Queries, keys and values [B, T, C] of their own, and a bias for the three."""
    _refuse(n, {6: "past_key", 7: "past_value", 8: "past_sequence_length"}, {1: "present_key", 3: "qk"})
    if not (n.has(1) and n.has(2)) or any(len(n.shape(i)) != 3 for i in range(3)):
        raise n.unsupported("queries, keys and values are packed; give them as three tensors of three axes")
    q, k, v = (n.value(i) for i in range(3))
    if n.has(3):
        biases = split(n.b, n.value(3), [part.shape[2] for part in (q, k, v)], 0)
        q, k, v = (elementwise(n.b, lambda x, c: x + c, x, c) for x, c in zip((q, k, v), biases))
    return _attend(n, q, k, v, 4, 5)


def _refuse(n: OnnxNode, inputs: dict[int, str], outputs: dict[int, str]) -> None:
    used = [name for i, name in inputs.items() if n.has(i)] + [name for i, name in outputs.items() if n.wants(i)]
    if used:
        raise n.unsupported(f"its {used[0]} is used, a cache of keys and values; export the model without use_cache")


def _attend(n: OnnxNode, q: Value, k: Value, v: Value, mask: int, bias: int) -> Operand:
    """Attention of the node's heads, given side by side in the last axis.

    Args:
        mask: the input that has 0 where a key is left out, or the number of keys of each item.
        bias: the input that is added to the scores.
    """
    heads = n.integer("num_heads")
    batch, queries, _ = q.shape
    parts = [reshape(n.b, x, (*x.shape[:2], heads, x.shape[2] // heads)) for x in (q, k, v)]
    added = [_left_out(n, mask, queries, k.shape[1])] if n.has(mask) else []
    added += [n.value(bias)] if n.has(bias) else []
    total = elementwise(n.b, lambda *xs: sum(xs[1:], xs[0]), *added, dtype=q.dtype) if added else None
    scale = n.number("scale", 0.0) or 1 / math.sqrt(q.shape[2] // heads)
    causal = bool(n.integer("unidirectional", 0))
    y = attention(n.b, parts[0], parts[1], parts[2], total, causal=causal, scale=scale, heads_last=True)
    return reshape(n.b, y, (batch, queries, y.shape[2] * y.shape[3]))


def _left_out(n: OnnxNode, index: int, queries: int, keys: int) -> Value:
    """What is added to scores [B, H, Tq, Tk] so that some keys count for nothing."""
    shape, low = n.shape(index), n.number("mask_filter_value", -10000.0)
    found = n.value(index)
    if len(shape) == 1 and shape[0] == n.shape(0)[0]:
        steps = n.as_value(from_array(f"{n.output_names[0]}.keys", positions(keys)))
        counts = reshape(n.b, convert(n.b, found, INT64), (shape[0], 1, 1, 1))
        return elementwise(n.b, lambda at, count: where(at < count, 0.0, low), steps, counts)
    if len(shape) == 2 and shape[1] == keys:
        found = reshape(n.b, found, (shape[0], 1, 1, keys))
    elif len(shape) == 3 and shape[1:] == (queries, keys):
        found = reshape(n.b, found, (shape[0], 1, queries, keys))
    else:
        raise n.unsupported(
            f"its mask {n.type(index)} has none of the shapes [B], [B, keys] and [B, queries, keys]; reshape it to one"
        )
    return elementwise(n.b, lambda keep: where(cast(keep, "bool"), 0.0, low), found)

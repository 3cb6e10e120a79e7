"""ONNX's attention and loss functions."""

from __future__ import annotations

import math

from foreplan.frontend.onnx.node import OnnxNode, Result, translates
from foreplan.graph import Value
from foreplan.ops.attention.ops import attention
from foreplan.ops.expr import Arg, call, where
from foreplan.ops.loss import IGNORE, cross_entropy
from foreplan.ops.map import elementwise
from foreplan.ops.reduce import reduce
from foreplan.ops.shape import reshape
from foreplan.ops.softmax import log_softmax

_PLAIN = {"is_causal", "kv_num_heads", "q_num_heads", "qk_matmul_output_mode", "scale", "softcap", "softmax_precision"}


@translates("Attention")
def _attention(n: OnnxNode) -> Result | None:
    """The plain forms by one op; caches, soft caps and score outputs by ONNX's function body."""
    is_plain = not any(n.has(i) for i in (4, 5, 6)) and not any(n.wants(i) for i in (1, 2, 3))
    q, k, v = (n.type(i) for i in range(3))
    if (
        not is_plain
        or n.attribute_names - _PLAIN
        or n.number("softcap", 0.0)
        or not q.dtype.is_float
        or not q.dtype == k.dtype == v.dtype
    ):
        return None
    if q.rank != k.rank or q.rank not in (3, 4) or 0 in (q.size, k.size, v.size):
        return None
    heads_last = q.rank == 3
    if heads_last:
        heads, shared = n.integer("q_num_heads"), n.integer("kv_num_heads")
        parts = [_split_heads(n, i, count) for i, count in enumerate((heads, shared, shared))]
    else:
        parts = [n.value(i) for i in range(3)]
    mask = None
    if n.has(3):
        keys = k.shape[-2]
        # From opset 24 on the function body pads a mask of fewer keys, also one of a single key.
        if not n.shape(3) or n.shape(3)[-1] not in ((keys,) if n.opset >= 24 else (1, keys)):
            return None
        mask = n.value(3)
        if mask.dtype.name == "bool":
            mask = elementwise(n.b, lambda m: where(m, 0.0, -math.inf), mask, dtype=q.dtype)
        if mask.dtype != q.dtype:
            return None
    scale = n.number("scale") if n.has_attribute("scale") else None
    causal = bool(n.integer("is_causal", 0))
    y = attention(n.b, parts[0], parts[1], parts[2], mask, causal=causal, scale=scale, heads_last=heads_last)
    return reshape(n.b, y, (*y.shape[:2], y.shape[2] * y.shape[3])) if heads_last else y


def _split_heads(n: OnnxNode, index: int, heads: int) -> Value:
    batch, positions, width = n.shape(index)
    if heads < 1 or width % heads:
        raise n.misshapen(f"the width of {n.type(index)} must be a multiple of its {heads} heads")
    return reshape(n.b, n.value(index), (batch, positions, heads, width // heads))


@translates("SoftmaxCrossEntropyLoss")
def _softmax_cross_entropy(n: OnnxNode) -> Result | None:
    """Without class weights by one op; with them by ONNX's function body."""
    if n.has(2):
        return None
    logits, target = n.value(0), n.value(1)
    ignore = n.integer("ignore_index", None)
    items = cross_entropy(n.b, logits, target, 1, IGNORE if ignore is None else ignore)
    how = n.text("reduction", "mean")
    if how not in ("none", "sum", "mean"):
        raise n.fail(f"reduction must be none, sum or mean, and is {how!r}")
    loss = items if how == "none" else reduce(n.b, "mean" if how == "mean" and ignore is None else "sum", items)
    if how == "mean" and ignore is not None:
        counted = where(call("eq", Arg(0), ignore), 0.0, 1.0)
        count = reduce(n.b, "sum", elementwise(n.b, counted, target, dtype=loss.dtype))
        loss = elementwise(n.b, lambda s, c: s / c, loss, count)
    return [loss, log_softmax(n.b, logits, 1)] if n.wants(1) else loss

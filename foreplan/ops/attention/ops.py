"""Scaled dot-product attention. The scores exist for one block of queries at a time. The backward pass keeps the
log-sum-exp of each query's scores, and computes the probabilities of a block again from it (Rabe and Staats, 2021,
arXiv:2112.05682; Dao et al., 2022, arXiv:2205.14135).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from foreplan.base.errors import UnsupportedError
from foreplan.graph import Builder, TensorType, Value, as_dtype, register
from foreplan.graph.axes import Axes, Factors, broadcast_dims
from foreplan.graph.op import Arrays, Cotangents, Types, Values
from foreplan.ops.attention.blocks import AttentionOp, Extents, fill_ahead, mask_block, widened
from foreplan.ops.attention.gradient import AttentionGrad
from foreplan.ops.attention.whole import heads_apart, heads_together, whole_scores
from foreplan.ops.blocks import Piece, carve, carve_bytes, flush
from foreplan.ops.expr import exp, log, maximum
from foreplan.ops.map import convert, elementwise
from foreplan.ops.matmul import matmul
from foreplan.ops.reduce import reduce
from foreplan.ops.shape import reshape

# A row's maximum is taken to be at least this, so that a row of nothing but -inf gives exp(-inf) = 0 and not NaN. The
# sum of such a row, 0, is then raised to 1; every other sum is at least 1.
LOWEST = -3e38


@register
@dataclass(frozen=True)
class Attention(AttentionOp):
    """(o, lse): o = softmax(scale · q·kᵀ + mask)·v for each head, lse the log-sum-exp of each query's scores.

    Inputs are q[B, H, T, D], k[B, G, S, D], v[B, G, S, E] and optionally a mask that broadcasts to [B, H, T, S]. H is
    a multiple of G, and neighbouring query heads share a key head. Outputs are o[B, H, T, E] and lse[B, H, T], which
    is float32 where q is narrower. If all scores of a query are -inf, its output is 0.
    """

    name: ClassVar[str] = "attention"
    narrow: ClassVar[int] = 3

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """The type of q with the values' depth, and that of lse."""
        q, k, v, *mask = inputs
        e = self.check(q, k, v, mask[0] if mask else None)
        return q.with_shape((*q.shape[:3], e.value_depth)), e.log_sums

    def indexing(self, inputs: Types, outputs: Types) -> Axes:
        """Items; heads with the keys that they share; and queries, if each of them reads all keys."""
        f = Factors()
        (q, k, v, o), scores = self.walked(f, inputs)
        masks = (broadcast_dims(scores, x.shape) for x in inputs[3:])
        return f.axes([q, k, v, *masks], [o, scores[:3]], self.read_whole)

    def vjp(self, b: Builder, inputs: Values, outputs: Values, cotangents: Cotangents) -> Cotangents:
        """One op for all gradients, which share the probabilities."""
        g, g_lse = cotangents
        if g_lse is not None:
            raise UnsupportedError(
                "the log-sum-exp of attention has no derivative here; compute it from the scores, with log_softmax"
            )
        assert g is not None
        mask_gradient = len(inputs) == 4 and b.wants(inputs[3])
        op = AttentionGrad(self.scale, self.causal, self.heads_last, mask_gradient)
        gradients = b.node(op, *inputs[:3], outputs[0], outputs[1], g, *inputs[3:])
        of_mask = [convert(b, gradients[3], inputs[3].dtype)] if mask_gradient else [None] * len(inputs[3:])
        return [*gradients[:3], *of_mask]

    def overwrites(self, inputs: Types, outputs: Types) -> tuple[tuple[int, int], ...]:
        """The output may take the queries' bytes, block by block."""
        return ((0, 0),) if inputs[0] == outputs[0] else ()

    def accepts_strides(self, index: int, input: TensorType, strides: tuple[int, ...]) -> bool:
        """Any strides for the mask; those that BLAS takes for q, k and v."""
        return index == 3 or self.takes_strides(input, strides)

    def flops(self, inputs: Types, outputs: Types) -> int:
        """Two products and five scalar operations for each query and each key that it reads."""
        e = self.sizes(inputs)
        pairs = e.batch * e.heads * e.pairs(self.causal)
        return pairs * (2 * (e.depth + e.value_depth) + 5)

    def workspace(self, inputs: Types, outputs: Types) -> int:
        """A block of scores and scaled queries, one number for each query of it, and keys and values if widened."""
        return carve_bytes(*self._pieces(self.sizes(inputs)))

    def _pieces(self, e: Extents) -> list[Piece]:
        rows = e.heads_together * e.block
        result = rows * e.value_depth if e.is_narrow else 0
        return [((rows,), e.wide), ((result,), e.wide), *self.wide_pieces(e), *self.score_pieces(e)]

    def compute(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray) -> None:
        """One block of queries after another, each with all keys that it reads."""
        q, k, v = map(self.heads_first, inputs[:3])
        mask = inputs[3] if len(inputs) == 4 else None
        out, lse = self.heads_first(outputs[0]), outputs[1]
        e = self.extents(inputs[0].shape, inputs[1].shape, inputs[2].shape, as_dtype(q.dtype))
        totals, result, wide_k, wide_v, *scratch = carve(workspace, *self._pieces(e))
        fill_ahead(scratch[2])
        for n, kv, head_blocks in e.head_blocks():
            keys, values = widened(k[n, kv], wide_k), widened(v[n, kv], wide_v)
            for heads in head_blocks:
                for start in range(0, e.queries, e.block):
                    rows = slice(start, min(e.queries, start + e.block))
                    seen = self.seen(e, rows)
                    here = mask_block(mask, n, heads, rows, seen)
                    s, _ = self.scores(q[n, heads, rows], keys[:, :seen], here, rows, scratch)
                    high, total = lse[n, heads, rows], totals[: s.shape[0] * s.shape[1]].reshape(s.shape[:2])
                    np.maximum.reduce(s, axis=2, out=high)
                    np.maximum(high, LOWEST, out=high)
                    s -= high[:, :, None]
                    np.exp(s, out=s)
                    flush(s)
                    np.add.reduce(s, axis=2, out=total)
                    np.maximum(total, 1, out=total)
                    block = out[n, heads, rows]
                    o = result[: block.size].reshape(block.shape) if e.is_narrow else block
                    np.matmul(s, values[:, :seen], out=o)
                    np.divide(o, total[:, :, None], out=block, casting="same_kind")
                    np.log(total, out=total)
                    high += total

    def decompose(self, b: Builder, inputs: Values) -> Values | None:
        """Products and maps over whole score matrices."""
        q, k, v, *mask = inputs
        e = self.sizes([q.type, k.type, v.type])
        wide_q, wide_k, wide_v = (heads_apart(b, self, e, x) for x in (q, k, v))
        s = whole_scores(b, self, e, wide_q, wide_k, mask[0] if mask else None)
        high = reduce(b, "max", s, 3, keepdims=True)
        high = elementwise(b, lambda m: maximum(m, LOWEST), high)
        p = elementwise(b, lambda s, m: exp(s - m), s, high)
        total = elementwise(b, lambda t: maximum(t, 1.0), reduce(b, "sum", p, 3, keepdims=True))
        p = elementwise(b, lambda p, t: p / t, p, total)
        lse = elementwise(b, lambda m, t: m + log(t), high, total)
        o = matmul(b, reshape(b, p, (e.batch, e.kv_heads, e.group, e.queries, e.keys)), wide_v)
        return [heads_together(b, self, o, q), reshape(b, lse, lse.shape[:3])]


def attention(
    b: Builder,
    q: Value,
    k: Value,
    v: Value,
    mask: Value | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    heads_last: bool = False,
) -> Value:
    """softmax(scale · q·kᵀ + mask)·v for each head.

    Args:
        b: where nodes are added.
        q: queries [batch, heads, queries, depth].
        k: keys [batch, heads or a divisor of it, keys, depth].
        v: values, like the keys with a depth of their own.
        mask: added to the scores [batch, heads, queries, keys]; it broadcasts to them.
        causal: query i reads keys 0 … i only.
        scale: 1/√depth if left out.
        heads_last: q, k, v and the result are [batch, positions, heads, depth].

    Raises:
        ShapeError: the shapes or element types do not fit each other.
    """
    scale = 1 / math.sqrt(max(1, q.shape[-1])) if scale is None else scale
    if mask is not None:
        mask = reshape(b, mask, (*[1] * (4 - len(mask.shape)), *mask.shape))
    o, _ = b.node(Attention(float(scale), causal, heads_last), q, k, v, *([] if mask is None else [mask]))
    return o

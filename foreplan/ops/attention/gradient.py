"""The gradient of attention. It computes the probabilities of each block of queries again, from the log-sum-exp."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from foreplan.base.errors import ShapeError
from foreplan.graph import Builder, TensorType, as_dtype, register
from foreplan.graph.axes import Axes, Factors, broadcast_dims
from foreplan.graph.op import Arrays, Types, Values
from foreplan.ops.attention.blocks import AttentionOp, Extents, fill_ahead, mask_block, widened
from foreplan.ops.attention.whole import heads_apart, heads_together, whole_scores
from foreplan.ops.blocks import Piece, carve, carve_bytes, flush
from foreplan.ops.expr import exp
from foreplan.ops.map import elementwise
from foreplan.ops.matmul import matmul
from foreplan.ops.reduce import reduce
from foreplan.ops.shape import reshape, sum_to_shape


@register
@dataclass(frozen=True)
class AttentionGrad(AttentionOp):
    """(dq, dk, dv) and, if asked for, dmask from q, k, v, o, lse, the cotangent g of o, and the mask if there is one.

    The inputs have the shapes of `attention`, and each gradient has the type of its input. Only dmask is float32 where
    the mask is narrower, because blocks add to it.

    Attributes:
        mask_gradient: also return dmask.
    """

    name: ClassVar[str] = "attention_grad"
    mask_gradient: bool = False

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """The types of q, k, v (and the mask)."""
        q, k, v, o, lse, g, *mask = inputs
        e = self.check(q, k, v, mask[0] if mask else None)
        wanted = q.with_shape((*q.shape[:3], e.value_depth))
        if o != wanted or g != wanted or lse != e.log_sums:
            raise ShapeError(
                f"for queries {q} the output and its cotangent must be {wanted} and the log-sum-exp {e.log_sums}, and "
                f"they are {o}, {g} and {lse}"
            )
        if self.mask_gradient and not mask:
            raise ShapeError("mask_gradient=True needs a mask as the last input, and there is none")
        return (q, k, v, *([TensorType(q.dtype.wide, mask[0].shape)] if self.mask_gradient else []))

    def indexing(self, inputs: Types, outputs: Types) -> Axes:
        """As attention's; gradients of what heads share are sums over them."""
        f = Factors()
        (q, k, v, o), scores = self.walked(f, inputs)
        masks = [broadcast_dims(scores, x.shape) for x in inputs[6:]]
        given = [q, k, v, o, scores[:3], o, *masks]
        sums = dict.fromkeys({"n", "g", "h", "t"} - self.read_whole, "sum")
        return f.axes(given, [q, k, v, *masks[: len(outputs) - 3]], self.read_whole, sums)

    def overwrites(self, inputs: Types, outputs: Types) -> tuple[tuple[int, int], ...]:
        """A block of dq is written after its inputs are read; dk and dv after all queries of their heads are read."""
        e = self.sizes(inputs)
        pairs = [(0, i) for i in (0, 3, 5) if inputs[i] == outputs[0]]
        shared = (1, 2) if e.group > 1 else (1, 2, 0, 3, 5)
        return (*pairs, *((o, i) for o in (1, 2) for i in shared if inputs[i] == outputs[o]))

    def accepts_strides(self, index: int, input: TensorType, strides: tuple[int, ...]) -> bool:
        """Any strides for o and the mask; those that BLAS takes for q, k, v and g."""
        return index in (3, 6) or (index != 4 and self.takes_strides(input, strides))

    def flops(self, inputs: Types, outputs: Types) -> int:
        """Five products and eight scalar operations for each query and each key that it reads."""
        e = self.sizes(inputs)
        pairs = e.batch * e.heads * e.pairs(self.causal)
        return pairs * (6 * e.depth + 4 * e.value_depth + 8)

    def workspace(self, inputs: Types, outputs: Types) -> int:
        """Two blocks of scores, and the sums for the keys and values of one head."""
        return carve_bytes(*self._pieces(self.sizes(inputs)))

    def _pieces(self, e: Extents) -> list[Piece]:
        together, block, deep, dtype = e.heads_together, e.block, max(e.depth, e.value_depth), e.wide
        row = ((together * block,), dtype)
        sums: list[Piece] = [((together, e.keys, depth), dtype) for depth in (e.depth, e.value_depth)]
        product = 0 if e.group == 1 and block >= e.queries else e.keys * deep
        rest: list[Piece] = [((product,), dtype), ((together * block * max(e.keys, e.value_depth),), dtype)]
        summed = ((together * block * e.keys if self.mask_gradient else 0,), dtype)
        wide_g = ((together * block * e.value_depth if e.is_narrow else 0,), dtype)
        return [row, *sums, *rest, summed, wide_g, *self.wide_pieces(e), *self.score_pieces(e)]

    def compute(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray) -> None:
        """Head by head; the last queries first, because they read all keys and so begin every sum."""
        q, k, v, o, g = (self.heads_first(inputs[i]) for i in (0, 1, 2, 3, 5))
        lse, mask = inputs[4], inputs[6] if len(inputs) == 7 else None
        dq, dk, dv = map(self.heads_first, outputs[:3])
        e = self.extents(inputs[0].shape, inputs[1].shape, inputs[2].shape, as_dtype(q.dtype))
        pieces = carve(workspace, *self._pieces(e))
        rowsums, sum_k, sum_v, product, second, summed, wide_g, wide_k, wide_v, *scratch = pieces
        fill_ahead(scratch[2])
        for sum_ in outputs[3:] if lse.size else outputs:  # blocks add to dmask; without a block every sum is 0
            sum_.fill(0)
        for n, kv, head_blocks in e.head_blocks() if lse.size else ():
            count = kv.stop - kv.start
            all_keys, all_values = widened(k[n, kv], wide_k), widened(v[n, kv], wide_v)
            for i, heads in enumerate(head_blocks):
                for start in reversed(range(0, e.queries, e.block)):
                    rows = slice(start, min(e.queries, start + e.block))
                    seen = self.seen(e, rows)
                    keys, values, at = all_keys[:, :seen], all_values[:, :seen], (n, heads, rows)
                    here = widened(g[at], wide_g)
                    p, scaled = self.scores(q[at], keys, mask_block(mask, n, heads, rows, seen), rows, scratch)
                    p -= lse[at][:, :, None]
                    np.exp(p, out=p)
                    flush(p)
                    rowsum = rowsums[: p.shape[0] * p.shape[1]].reshape(p.shape[:2])
                    _row_dots(o[at], here, second, rowsum)
                    begins = i == 0 and rows.stop == e.queries
                    _accumulate(p.swapaxes(1, 2), here, sum_v[:count], product, begins)
                    ds = second[: p.size].reshape(p.shape)
                    np.matmul(here, values.swapaxes(1, 2), out=ds)
                    ds -= rowsum[:, :, None]
                    ds *= p
                    if self.mask_gradient:
                        _add_to_mask(ds, mask_block(outputs[3], n, heads, rows, seen), summed)
                    _accumulate(ds.swapaxes(1, 2), scaled, sum_k[:count], product, begins)
                    block = scaled if e.is_narrow else dq[at]  # the scaled queries have been read
                    np.matmul(ds, keys, out=block)
                    np.multiply(block, self.scale, out=dq[at], casting="same_kind")
            np.copyto(dk[n, kv], sum_k[:count])
            np.copyto(dv[n, kv], sum_v[:count])

    def decompose(self, b: Builder, inputs: Values) -> Values:
        """Products and maps over whole score matrices."""
        (q, k, v, o, lse, g, *mask), e = inputs, self.sizes([value.type for value in inputs])
        shared = (e.batch, e.kv_heads, e.group, e.queries, e.keys)
        wide_q, wide_k, wide_v, wide_o, wide_g = (heads_apart(b, self, e, x) for x in (q, k, v, o, g))
        s = reshape(b, whole_scores(b, self, e, wide_q, wide_k, mask[0] if mask else None), shared)
        p = elementwise(b, lambda s, m: exp(s - m), s, reshape(b, lse, (*shared[:4], 1)))
        rowsum = reduce(b, "sum", elementwise(b, lambda o, g: o * g, wide_o, wide_g), 4, keepdims=True)
        dp = matmul(b, wide_g, wide_v, transpose_b=True)
        ds = elementwise(b, lambda d, r, p: (d - r) * p, dp, rowsum, p)
        dq, dk = (
            elementwise(b, lambda x: x * self.scale, x)
            for x in (matmul(b, ds, wide_k), reduce(b, "sum", matmul(b, ds, wide_q, True), 2, keepdims=True))
        )
        dv = reduce(b, "sum", matmul(b, p, wide_g, True), 2, keepdims=True)
        found = [heads_together(b, self, x, like) for x, like in ((dq, q), (dk, k), (dv, v))]
        if self.mask_gradient:
            scores = reshape(b, ds, (e.batch, e.heads, e.queries, e.keys))
            found.append(sum_to_shape(b, scores, mask[0].shape))
        return found


def _row_dots(a: np.ndarray, b: np.ndarray, scratch: np.ndarray, out: np.ndarray) -> None:
    products = scratch[: a.size].reshape(a.shape)
    np.multiply(a, b, out=products)
    np.add.reduce(products, axis=2, out=out)


def _accumulate(a: np.ndarray, b: np.ndarray, total: np.ndarray, product: np.ndarray, begins: bool) -> None:
    """Add a·b to the first rows of `total`; if `begins`, set all its rows."""
    seen = a.shape[1]
    if begins:
        np.matmul(a, b, out=total[:, :seen])
        total[:, seen:] = 0
        return
    part = product[: seen * b.shape[2]].reshape(1, seen, b.shape[2])
    np.matmul(a, b, out=part)
    total[:, :seen] += part


def _add_to_mask(ds: np.ndarray, target: np.ndarray | None, scratch: np.ndarray) -> None:
    """Add score gradients [heads, rows, keys] to a block of dmask, summed over the axes that it broadcasts."""
    assert target is not None
    axes = tuple(i for i in range(3) if target.shape[i] == 1 and ds.shape[i] != 1)
    if axes:
        total = scratch[: target.size].reshape(target.shape)
        np.add.reduce(ds, axis=axes, keepdims=True, out=total)
        target += total
    else:
        target += ds

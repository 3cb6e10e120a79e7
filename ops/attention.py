"""Scaled dot-product attention. The scores exist for one block of queries at a time; what is kept for the backward pass
is the logarithm of each query's normaliser, from which the gradient makes the probabilities of a block again
(Rabe and Staats, 2021, arXiv:2112.05682; Dao et al., 2022, arXiv:2205.14135).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from foreplan.errors import ShapeError, UnsupportedError
from foreplan.graph import Array, Builder, Cost, Op, TensorType, Value, as_dtype, register
from foreplan.graph.ir import Kind
from foreplan.graph.op import Arrays, Types
from foreplan.ops.blocks import Piece, carve, carve_bytes, flush
from foreplan.ops.expr import exp, log, maximum, where
from foreplan.ops.map import elementwise
from foreplan.ops.matmul import MatMul, matmul
from foreplan.ops.reduce import reduce
from foreplan.ops.shape import reshape, transpose

SCORE_BYTES = 512 * 1024  # a block of scores stays in a core's cache
QUERIES = 256  # a block, at most
FEW_QUERIES = 16  # a block, at least, while its scores take no more than MOST_SCORE_BYTES
MOST_SCORE_BYTES = 4 * 2**20

_BOOL = np.dtype(np.bool_)


@dataclass(frozen=True)
class _Extents:
    """Sizes of one attention, and how it is cut into blocks."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    depth: int
    value_depth: int
    itemsize: int

    @property
    def group(self) -> int:
        """Query heads that share a key and value head."""
        return self.heads // self.kv_heads

    @property
    def block(self) -> int:
        """Queries a block."""
        row = max(1, self.keys * self.itemsize)
        few = min(FEW_QUERIES, max(1, MOST_SCORE_BYTES // row))
        return max(1, min(self.queries, QUERIES, max(few, SCORE_BYTES // row)))

    @property
    def heads_together(self) -> int:
        """Heads a block: several where all queries of one are few."""
        if self.group > 1 or self.block < self.queries:
            return 1
        return max(1, min(self.heads, SCORE_BYTES // max(1, self.block * self.keys * self.itemsize)))

    def head_blocks(self) -> Iterator[tuple[int, slice, list[slice]]]:
        """(batch item, key and value heads, the blocks of query heads that read them)."""
        for n in range(self.batch):
            for start in range(0, self.kv_heads, self.heads_together):
                kv = slice(start, min(self.kv_heads, start + self.heads_together))
                if self.group == 1:
                    yield n, kv, [kv]
                else:
                    yield n, kv, [slice(h, h + 1) for h in range(start * self.group, (start + 1) * self.group)]

    def pairs(self, causal: bool) -> int:
        """(query, key) pairs of one head that have a score."""
        if not causal:
            return self.queries * self.keys
        full = min(self.queries, self.keys)
        return full * (full + 1) // 2 + (self.queries - full) * self.keys


@dataclass(frozen=True)
class _AttentionOp(Op):
    """What attention and its gradient share.

    Attributes:
        scale: of the scores.
        causal: query i reads keys 0 … i only.
        heads_last: tensors are [batch, positions, heads, depth], else [batch, heads, positions, depth]; the
            log-sum-exp is [batch, heads, queries] either way.
    """

    scale: float
    causal: bool = False
    heads_last: bool = False

    def extents(self, q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], itemsize: int) -> _Extents:
        """Sizes from the shapes of queries, keys and values."""
        at, head = (1, 2) if self.heads_last else (2, 1)
        return _Extents(q[0], q[head], k[head], q[at], k[at], q[3], v[3], itemsize)

    def check(self, q: TensorType, k: TensorType, v: TensorType, mask: TensorType | None) -> _Extents:
        """Sizes of types that fit each other; ShapeError otherwise."""
        if any(type.rank != 4 or type.dtype != q.dtype for type in (q, k, v)) or not q.dtype.is_float:
            raise ShapeError(f"needs floating-point q, k, v with four axes, and got {q}, {k}, {v}")
        e = self.extents(q.shape, k.shape, v.shape, q.dtype.itemsize)
        head = 2 if self.heads_last else 1
        if k.shape[:3] != v.shape[:3] or k.shape[0] != e.batch or k.shape[3] != e.depth:
            raise ShapeError(f"queries {q}, keys {k} and values {v} do not fit each other")
        if not e.kv_heads or e.heads % e.kv_heads:
            raise ShapeError(f"the {e.heads} heads of {q} cannot share the {k.shape[head]} heads of {k}")
        if not e.queries or not e.keys:
            raise ShapeError(f"there must be at least one query and one key in {q} and {k}")
        full = (e.batch, e.heads, e.queries, e.keys)
        if mask is not None and (
            mask.rank != 4 or mask.dtype != q.dtype or any(m not in (1, x) for m, x in zip(mask.shape, full))
        ):
            raise ShapeError(f"the mask must be {q.dtype} and broadcast to {list(full)}, and is {mask}")
        return e

    def sizes(self, inputs: Types) -> _Extents:
        """Sizes from the types of the inputs, of which q, k, v are the first."""
        return self.check(inputs[0], inputs[1], inputs[2], None)

    def heads_first(self, array: np.ndarray) -> np.ndarray:
        """A view as [batch, heads, positions, depth]."""
        return array.swapaxes(1, 2) if self.heads_last else array

    def takes_strides(self, input: TensorType, strides: tuple[int, ...]) -> bool:
        """Whether each head is a matrix that BLAS takes, with dense rows."""
        if self.heads_last:
            input = input.with_shape(tuple(input.shape[i] for i in (0, 2, 1, 3)))
            strides = tuple(strides[i] for i in (0, 2, 1, 3))
        return strides[3] == input.dtype.itemsize and MatMul().accepts_strides(0, input, strides)

    def score_pieces(self, e: _Extents, dtype: np.dtype) -> list[Piece]:
        """Scratch of `scores`: a block of scores, scaled queries, and which keys of the block's end lie ahead."""
        together, block = e.heads_together, e.block
        ahead = (block, block) if self.causal else (0, 0)
        return [((together * block * e.keys,), dtype), ((together * block * e.depth,), dtype), (ahead, _BOOL)]

    def seen(self, e: _Extents, rows: slice) -> int:
        """Keys that a block of queries reads."""
        return min(e.keys, rows.stop) if self.causal else e.keys

    def scores(
        self, q: np.ndarray, k: np.ndarray, mask: np.ndarray | None, rows: slice, scratch: Arrays
    ) -> tuple[np.ndarray, np.ndarray]:
        """(scores, scaled queries) of queries [heads, rows, depth] and all keys that they read."""
        heads, count, _ = q.shape
        seen = k.shape[1]
        scaled = scratch[1][: q.size].reshape(q.shape)
        np.multiply(q, self.scale, out=scaled)
        s = scratch[0][: heads * count * seen].reshape(heads, count, seen)
        np.matmul(scaled, k.swapaxes(1, 2), out=s)
        if mask is not None:
            s += mask
        if self.causal and seen > rows.start:
            width = seen - rows.start
            np.copyto(s[:, :, rows.start :], -np.inf, where=scratch[2][:count, :width])
        return s, scaled


def _fill_ahead(ahead: np.ndarray) -> None:
    """ahead[i, j]: key j lies ahead of query i, counted from where the block starts."""
    ahead.fill(True)
    for i in range(len(ahead)):
        ahead[i, : i + 1] = False


def _mask_block(mask: np.ndarray | None, n: int, heads: slice, rows: slice, seen: int) -> np.ndarray | None:
    """The part of a mask [batch or 1, heads or 1, queries or 1, keys or 1] that belongs to a block."""
    if mask is None:
        return None
    whole = slice(None)
    return mask[
        0 if mask.shape[0] == 1 else n,
        whole if mask.shape[1] == 1 else heads,
        whole if mask.shape[2] == 1 else rows,
        whole if mask.shape[3] == 1 else slice(seen),
    ]


@register
@dataclass(frozen=True)
class Attention(_AttentionOp):
    """(o, lse): o = softmax(scale · q·kᵀ + mask)·v for each head, lse the log-sum-exp of each query's scores.

    Inputs q[B, H, T, D], k[B, G, S, D], v[B, G, S, E] and, if there is one, a mask that broadcasts to [B, H, T, S]; H
    is a multiple of G, and neighbouring query heads share a key head. Output o[B, H, T, E] and lse[B, H, T]. A query
    all of whose scores are -inf gets zeros.
    """

    name: ClassVar[str] = "attention"

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """o like q with the values' depth, and lse."""
        q, k, v, *mask = inputs
        e = self.check(q, k, v, mask[0] if mask else None)
        return q.with_shape((*q.shape[:3], e.value_depth)), q.with_shape((e.batch, e.heads, e.queries))

    def vjp(
        self, b: Builder, inputs: Sequence[Value], outputs: Sequence[Value], cotangents: Sequence[Value | None]
    ) -> Sequence[Value | None]:
        """One op for all gradients, which share the probabilities."""
        g, g_lse = cotangents
        if g_lse is not None:
            raise UnsupportedError("the log-sum-exp of attention has no derivative here; compute it with log_softmax")
        assert g is not None
        mask_gradient = len(inputs) == 4 and b.wants(inputs[3])
        op = AttentionGrad(self.scale, self.causal, self.heads_last, mask_gradient)
        gradients = b.node(op, *inputs[:3], outputs[0], outputs[1], g, *inputs[3:])
        return [*gradients, *[None] * (len(inputs) - len(gradients))]

    def overwrites(self, inputs: Types, outputs: Types) -> tuple[tuple[int, int], ...]:
        """The output may take the queries' bytes, block by block."""
        return ((0, 0),) if inputs[0] == outputs[0] else ()

    def accepts_strides(self, index: int, input: TensorType, strides: tuple[int, ...]) -> bool:
        """Any mask; matrices as BLAS takes them."""
        return index == 3 or self.takes_strides(input, strides)

    def cost(self, inputs: Types, outputs: Types) -> Cost:
        """Two products and five scalar operations for each pair of a query and a key it reads."""
        e = self.sizes(inputs)
        pairs = e.batch * e.heads * e.pairs(self.causal)
        return Cost(pairs * (2 * (e.depth + e.value_depth) + 5), sum(type.nbytes for type in (*inputs, *outputs)))

    def workspace(self, inputs: Types, outputs: Types) -> int:
        """One block of scores and of scaled queries, and a number a query of it."""
        return carve_bytes(*self._pieces(self.sizes(inputs), inputs[0].dtype.numpy))

    def _pieces(self, e: _Extents, dtype: np.dtype) -> list[Piece]:
        return [((e.heads_together * e.block,), dtype), *self.score_pieces(e, dtype)]

    def compute(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray) -> None:
        """Block by block of queries, each with all the keys it reads."""
        q, k, v = map(self.heads_first, inputs[:3])
        mask = inputs[3] if len(inputs) == 4 else None
        out, lse = self.heads_first(outputs[0]), outputs[1]
        e = self.extents(inputs[0].shape, inputs[1].shape, inputs[2].shape, q.itemsize)
        totals, *scratch = carve(workspace, *self._pieces(e, q.dtype))
        _fill_ahead(scratch[2])
        lowest = _lowest(q.dtype)
        for n, kv, head_blocks in e.head_blocks():
            for heads in head_blocks:
                for start in range(0, e.queries, e.block):
                    rows = slice(start, min(e.queries, start + e.block))
                    seen = self.seen(e, rows)
                    here = _mask_block(mask, n, heads, rows, seen)
                    s, _ = self.scores(q[n, heads, rows], k[n, kv, :seen], here, rows, scratch)
                    high, total = lse[n, heads, rows], totals[: s.shape[0] * s.shape[1]].reshape(s.shape[:2])
                    np.maximum.reduce(s, axis=2, out=high)
                    np.maximum(high, lowest, out=high)
                    s -= high[:, :, None]
                    np.exp(s, out=s)
                    flush(s)
                    np.add.reduce(s, axis=2, out=total)
                    np.maximum(total, 1, out=total)
                    block = out[n, heads, rows]
                    np.matmul(s, v[n, kv, :seen], out=block)
                    block /= total[:, :, None]
                    np.log(total, out=total)
                    high += total

    def decompose(self, b: Builder, inputs: Sequence[Value]) -> Sequence[Value] | None:
        """Products and maps over whole score matrices."""
        q, k, v, *mask = inputs
        e = self.sizes([q.type, k.type, v.type])
        if self.heads_last:
            q, k, v = (transpose(b, x, (0, 2, 1, 3)) for x in (q, k, v))
        # The heads that share keys become an axis of their own, along which keys and values broadcast.
        q = reshape(b, q, (e.batch, e.kv_heads, e.group, e.queries, e.depth))
        k, v = (reshape(b, x, (e.batch, e.kv_heads, 1, *x.shape[2:])) for x in (k, v))
        s = reshape(b, matmul(b, q, k, transpose_b=True), (e.batch, e.heads, e.queries, e.keys))
        s = elementwise(b, lambda s: s * self.scale, s)
        if mask:
            s = elementwise(b, lambda s, m: s + m, s, mask[0])
        if self.causal:
            i, j = (_positions(b, shape) for shape in ((e.queries, 1), (1, e.keys)))
            s = elementwise(b, lambda s, i, j: where(j <= i, s, -math.inf), s, i, j)
        high = reduce(b, "max", s, 3, keepdims=True)
        high = elementwise(b, lambda m: maximum(m, _lowest(high.dtype.numpy)), high)
        p = elementwise(b, lambda s, m: exp(s - m), s, high)
        total = elementwise(b, lambda t: maximum(t, 1.0), reduce(b, "sum", p, 3, keepdims=True))
        p = elementwise(b, lambda p, t: p / t, p, total)
        lse = elementwise(b, lambda m, t: m + log(t), high, total)
        o = matmul(b, reshape(b, p, (e.batch, e.kv_heads, e.group, e.queries, e.keys)), v)
        o = reshape(b, o, (e.batch, e.heads, e.queries, e.value_depth))
        return [transpose(b, o, (0, 2, 1, 3)) if self.heads_last else o, reshape(b, lse, lse.shape[:3])]


def _lowest(dtype: np.dtype) -> float:
    """What a row's maximum is raised to, so that rows of -inf alone get exp(-inf) = 0 and a sum of 0, not NaN. That sum
    is raised to 1 then, which all other sums are at least.
    """
    return -6e4 if dtype == np.float16 else -3e38


def _positions(b: Builder, shape: tuple[int, ...]) -> Value:
    places = np.arange(math.prod(shape), dtype=np.int64).reshape(shape)
    return b.store(b.scope + "positions", TensorType(as_dtype("int64"), shape), Kind.CONSTANT, Array(places))


@register
@dataclass(frozen=True)
class AttentionGrad(_AttentionOp):
    """(dq, dk, dv) and, if asked for, dmask from q, k, v, o, lse, the cotangent g of o, and the mask if there is one.

    Attributes:
        mask_gradient: return dmask too.
    """

    name: ClassVar[str] = "attention_grad"
    mask_gradient: bool = False

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """The types of q, k, v (and the mask)."""
        q, k, v, o, lse, g, *mask = inputs
        e = self.check(q, k, v, mask[0] if mask else None)
        wanted = q.with_shape((*q.shape[:3], e.value_depth))
        if o != wanted or g != wanted or lse != q.with_shape((e.batch, e.heads, e.queries)):
            raise ShapeError(f"the output {o}, its cotangent {g} and log-sum-exp {lse} do not fit queries {q}")
        if self.mask_gradient and not mask:
            raise ShapeError("there is no mask whose gradient could be returned")
        return (q, k, v, *(mask if self.mask_gradient else ()))

    def overwrites(self, inputs: Types, outputs: Types) -> tuple[tuple[int, int], ...]:
        """dq is written where the block has been read; dk and dv when all queries of their heads have been."""
        e = self.sizes(inputs)
        pairs = [(0, i) for i in (0, 3, 5) if inputs[i] == outputs[0]]
        shared = (1, 2) if e.group > 1 else (1, 2, 0, 3, 5)
        return (*pairs, *((o, i) for o in (1, 2) for i in shared if inputs[i] == outputs[o]))

    def accepts_strides(self, index: int, input: TensorType, strides: tuple[int, ...]) -> bool:
        """Any output and mask; matrices as BLAS takes them."""
        return index in (3, 6) or (index != 4 and self.takes_strides(input, strides))

    def cost(self, inputs: Types, outputs: Types) -> Cost:
        """Five products and eight scalar operations for each pair of a query and a key it reads."""
        e = self.sizes(inputs)
        pairs = e.batch * e.heads * e.pairs(self.causal)
        moved = sum(type.nbytes for type in (*inputs, *outputs))
        return Cost(pairs * (6 * e.depth + 4 * e.value_depth + 8), moved)

    def workspace(self, inputs: Types, outputs: Types) -> int:
        """Two blocks of scores, and the sums for the keys and values of one head."""
        return carve_bytes(*self._pieces(self.sizes(inputs), inputs[0].dtype.numpy))

    def _pieces(self, e: _Extents, dtype: np.dtype) -> list[Piece]:
        together, block, deep = e.heads_together, e.block, max(e.depth, e.value_depth)
        row = ((together * block,), dtype)
        sums: list[Piece] = [((together, e.keys, depth), dtype) for depth in (e.depth, e.value_depth)]
        product = 0 if e.group == 1 and block >= e.queries else e.keys * deep
        rest: list[Piece] = [((product,), dtype), ((together * block * max(e.keys, e.value_depth),), dtype)]
        summed = ((together * block * e.keys if self.mask_gradient else 0,), dtype)
        return [row, *sums, *rest, summed, *self.score_pieces(e, dtype)]

    def compute(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray) -> None:
        """Head by head; the last queries first, because they read all keys and so begin every sum."""
        q, k, v, o, g = (self.heads_first(inputs[i]) for i in (0, 1, 2, 3, 5))
        lse, mask = inputs[4], inputs[6] if len(inputs) == 7 else None
        dq, dk, dv = map(self.heads_first, outputs[:3])
        e = self.extents(inputs[0].shape, inputs[1].shape, inputs[2].shape, q.itemsize)
        rowsums, sum_k, sum_v, product, second, summed, *scratch = carve(workspace, *self._pieces(e, q.dtype))
        _fill_ahead(scratch[2])
        if self.mask_gradient:
            outputs[3].fill(0)
        for n, kv, head_blocks in e.head_blocks():
            count = kv.stop - kv.start
            for i, heads in enumerate(head_blocks):
                for start in reversed(range(0, e.queries, e.block)):
                    rows = slice(start, min(e.queries, start + e.block))
                    seen = self.seen(e, rows)
                    keys, values, at = k[n, kv, :seen], v[n, kv, :seen], (n, heads, rows)
                    p, scaled = self.scores(q[at], keys, _mask_block(mask, n, heads, rows, seen), rows, scratch)
                    p -= lse[at][:, :, None]
                    np.exp(p, out=p)
                    flush(p)
                    rowsum = rowsums[: p.shape[0] * p.shape[1]].reshape(p.shape[:2])
                    _row_dots(o[at], g[at], second, rowsum)
                    begins = i == 0 and rows.stop == e.queries
                    _accumulate(p.swapaxes(1, 2), g[at], sum_v[:count], product, begins)
                    ds = second[: p.size].reshape(p.shape)
                    np.matmul(g[at], values.swapaxes(1, 2), out=ds)
                    ds -= rowsum[:, :, None]
                    ds *= p
                    if self.mask_gradient:
                        _add_to_mask(ds, _mask_block(outputs[3], n, heads, rows, seen), summed)
                    _accumulate(ds.swapaxes(1, 2), scaled, sum_k[:count], product, begins)
                    block = dq[at]
                    np.matmul(ds, keys, out=block)
                    block *= self.scale
            np.copyto(dk[n, kv], sum_k[:count])
            np.copyto(dv[n, kv], sum_v[:count])


def _row_dots(a: np.ndarray, b: np.ndarray, scratch: np.ndarray, out: np.ndarray) -> None:
    products = scratch[: a.size].reshape(a.shape)
    np.multiply(a, b, out=products)
    np.add.reduce(products, axis=2, out=out)


def _accumulate(a: np.ndarray, b: np.ndarray, total: np.ndarray, product: np.ndarray, begins: bool) -> None:
    """Add a·b to the first rows of `total`, or set the whole of it."""
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
        mask: added to the scores [batch, heads, queries, keys], to which it broadcasts.
        causal: query i reads keys 0 … i only.
        scale: 1/√depth if left out.
        heads_last: q, k, v and the result are [batch, positions, heads, depth].
    """
    scale = 1 / math.sqrt(max(1, q.shape[-1])) if scale is None else scale
    if mask is not None:
        mask = reshape(b, mask, (*[1] * (4 - len(mask.shape)), *mask.shape))
    o, _ = b.node(Attention(float(scale), causal, heads_last), q, k, v, *([] if mask is None else [mask]))
    return o

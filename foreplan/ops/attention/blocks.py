"""The blocks of queries that attention and its gradient work on, and the scores of one block.

Sums are float32 or wider: blocks of narrower elements are widened in scratch memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from foreplan.base.errors import ShapeError
from foreplan.graph import DType, Op, TensorType
from foreplan.graph.axes import Dim, Dims, Factors
from foreplan.graph.op import Arrays, Types
from foreplan.ops.blocks import Piece
from foreplan.ops.matmul import MatMul

SCORE_BYTES = 512 * 1024  # a block of scores stays in a core's cache
QUERIES = 256  # the most in a block
FEW_QUERIES = 16  # the fewest in a block, unless their scores take more than MOST_SCORE_BYTES
MOST_SCORE_BYTES = 4 * 2**20

_BOOL = np.dtype(np.bool_)


@dataclass(frozen=True)
class Extents:
    """Sizes of one attention and of its blocks."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    depth: int
    value_depth: int
    dtype: DType

    @property
    def wide(self) -> np.dtype:
        """Element type of scores and sums."""
        return self.dtype.wide.numpy

    @property
    def is_narrow(self) -> bool:
        """Whether inputs and outputs have a narrower element type than sums."""
        return self.dtype.wide != self.dtype

    @property
    def log_sums(self) -> TensorType:
        """The type of the log-sum-exp."""
        return TensorType(self.dtype.wide, (self.batch, self.heads, self.queries))

    @property
    def group(self) -> int:
        """Number of query heads that share a key head and a value head."""
        return self.heads // self.kv_heads

    @property
    def block(self) -> int:
        """Number of queries in a block."""
        row = max(1, self.keys * self.wide.itemsize)
        few = min(FEW_QUERIES, max(1, MOST_SCORE_BYTES // row))
        return max(1, min(self.queries, QUERIES, max(few, SCORE_BYTES // row)))

    @property
    def heads_together(self) -> int:
        """Number of heads in a block: several if one head has few queries."""
        if self.group > 1 or self.block < self.queries:
            return 1
        return max(1, min(self.heads, SCORE_BYTES // max(1, self.block * self.keys * self.wide.itemsize)))

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
class AttentionOp(Op):
    """The attributes and checks that attention and its gradient share.

    Attributes:
        scale: factor on the scores.
        causal: query i reads keys 0 … i only.
        heads_last: tensors are [batch, positions, heads, depth], else [batch, heads, positions, depth]; the
            log-sum-exp is [batch, heads, queries] either way.
    """

    scale: float
    causal: bool = False
    heads_last: bool = False

    def extents(self, q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], dtype: DType) -> Extents:
        """Sizes from the shapes of queries, keys and values, and their element type."""
        at, head = (1, 2) if self.heads_last else (2, 1)
        return Extents(q[0], q[head], k[head], q[at], k[at], q[3], v[3], dtype)

    def check(self, q: TensorType, k: TensorType, v: TensorType, mask: TensorType | None) -> Extents:
        """Sizes of these queries, keys, values and mask.

        Raises:
            ShapeError: the types do not fit each other.
        """
        if any(type.rank != 4 or type.dtype != q.dtype for type in (q, k, v)) or not q.dtype.is_float:
            raise ShapeError(f"q, k and v must have one floating-point type and four axes, and are {q}, {k} and {v}")
        e = self.extents(q.shape, k.shape, v.shape, q.dtype)
        head = 2 if self.heads_last else 1
        if k.shape[:3] != v.shape[:3] or k.shape[0] != e.batch or k.shape[3] != e.depth:
            raise ShapeError(
                f"queries {q}, keys {k} and values {v} do not fit: all need one batch size, keys and values the same "
                "heads and positions, queries and keys the same depth"
            )
        if not e.kv_heads or e.heads % e.kv_heads:
            raise ShapeError(
                f"the {e.heads} heads of {q} cannot share the {k.shape[head]} heads of {k}; the first number "
                "must be a multiple of the second"
            )
        if not e.queries or not e.keys:
            raise ShapeError(f"attention needs at least one query and one key, and got {q} and {k}")
        full = (e.batch, e.heads, e.queries, e.keys)
        if mask is not None and (
            mask.rank != 4
            or mask.dtype not in (q.dtype, q.dtype.wide)
            or any(m not in (1, x) for m, x in zip(mask.shape, full))
        ):
            raise ShapeError(
                f"the mask must be {q.dtype.wide} with four axes that broadcast to {list(full)}, and is {mask}"
            )
        return e

    def sizes(self, inputs: Types) -> Extents:
        """Sizes from the types of the inputs, which begin with q, k, v."""
        return self.check(inputs[0], inputs[1], inputs[2], None)

    def walked(self, f: Factors, inputs: Types) -> tuple[tuple[Dims, Dims, Dims, Dims], Dims]:
        """The axes of q, k, v and o; and of scores [batch, heads, queries, keys]."""
        e = self.sizes(inputs)
        n, g, d, v = f.dim(("n", e.batch)), f.dim(("g", e.kv_heads)), f.dim(("d", e.depth)), f.dim(("v", e.value_depth))
        t, s, h = f.dim(("t", e.queries)), f.dim(("s", e.keys)), f.dim(("g", e.kv_heads), ("h", e.group))

        def lies(heads: Dim, positions: Dim, depth: Dim) -> Dims:
            return (n, positions, heads, depth) if self.heads_last else (n, heads, positions, depth)

        return (lies(h, t, d), lies(g, s, d), lies(g, s, v), lies(h, t, v)), (n, h, t, s)

    @property
    def read_whole(self) -> set[str]:
        """The factors of which each result needs all: keys, depths, and queries that read keys by their number."""
        return {"s", "d", "v"} | ({"t"} if self.causal else set())

    def heads_first(self, array: np.ndarray) -> np.ndarray:
        """A view as [batch, heads, positions, depth]."""
        return array.swapaxes(1, 2) if self.heads_last else array

    def takes_strides(self, input: TensorType, strides: tuple[int, ...]) -> bool:
        """Whether each head is a matrix that BLAS takes, with dense rows."""
        if self.heads_last:
            input = input.with_shape(tuple(input.shape[i] for i in (0, 2, 1, 3)))
            strides = tuple(strides[i] for i in (0, 2, 1, 3))
        return strides[3] == input.dtype.itemsize and MatMul().accepts_strides(0, input, strides)

    def score_pieces(self, e: Extents) -> list[Piece]:
        """Scratch of `scores`: a block of scores, its scaled queries, and (if causal) the mask of `fill_ahead`."""
        together, block = e.heads_together, e.block
        ahead = (block, block) if self.causal else (0, 0)
        return [((together * block * e.keys,), e.wide), ((together * block * e.depth,), e.wide), (ahead, _BOOL)]

    def wide_pieces(self, e: Extents) -> list[Piece]:
        """Scratch for the widened keys and values of a block's heads; empty if they are not narrow."""
        positions = e.heads_together * e.keys if e.is_narrow else 0
        return [((positions * e.depth,), e.wide), ((positions * e.value_depth,), e.wide)]

    def seen(self, e: Extents, rows: slice) -> int:
        """Number of keys that a block of queries reads."""
        return min(e.keys, rows.stop) if self.causal else e.keys

    def scores(
        self, q: np.ndarray, k: np.ndarray, mask: np.ndarray | None, rows: slice, scratch: Arrays
    ) -> tuple[np.ndarray, np.ndarray]:
        """(scores, scaled queries) of queries [heads, rows, depth] and all keys that they read."""
        heads, count, _ = q.shape
        seen = k.shape[1]
        scaled = scratch[1][: q.size].reshape(q.shape)
        np.multiply(q, self.scale, out=scaled, dtype=scaled.dtype)
        s = scratch[0][: heads * count * seen].reshape(heads, count, seen)
        np.matmul(scaled, k.swapaxes(1, 2), out=s)
        if mask is not None:
            s += mask
        if self.causal and seen > rows.start:
            width = seen - rows.start
            np.copyto(s[:, :, rows.start :], -np.inf, where=scratch[2][:count, :width])
        return s, scaled


def widened(array: np.ndarray, scratch: np.ndarray) -> np.ndarray:
    """The array with the element type of the scratch: itself, or a copy in the scratch."""
    if array.dtype == scratch.dtype:
        return array
    wide = scratch[: array.size].reshape(array.shape)
    np.copyto(wide, array)
    return wide


def fill_ahead(ahead: np.ndarray) -> None:
    """Set ahead[i, j] where key j comes after query i; both are counted from the start of the block."""
    ahead.fill(True)
    for i in range(len(ahead)):
        ahead[i, : i + 1] = False


def mask_block(mask: np.ndarray | None, n: int, heads: slice, rows: slice, seen: int) -> np.ndarray | None:
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

"""How the CPU engine cuts attention: blocks of queries, heads that share a call, and how their matrices lie."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from foreplan.graph import DType, TensorType, Window
from foreplan.graph.op import Windows
from foreplan.graph.types import FLOAT32
from foreplan.ops.attention.blocks import AttentionOp, Extents, mask_block
from foreplan.ops.blocks import Piece
from foreplan.runtime.cpu.codegen.elements import check_elements
from foreplan.runtime.cpu.kernels.rows import flat
from foreplan.runtime.kernel import Refused

QUERIES = 256  # a block, at most
CAUSAL_QUERIES = 128  # likewise if a block reads only the keys up to its end
FEW_QUERIES = 16  # a block, at least
SCORES = 2**17  # a block, at most, unless its queries are few
TOGETHER = 2**16  # scores of several heads that share a call, at most
GRAIN = 2**16  # scores that are worth a thread


@dataclass(frozen=True)
class Cut:
    """One attention in units of some heads, each in blocks of queries.

    Attributes:
        e: sizes.
        causal: query i reads keys 0 … i only.
    """

    e: Extents
    causal: bool

    @property
    def block(self) -> int:
        """Queries a block, as even as may be."""
        most = CAUSAL_QUERIES if self.causal else QUERIES
        most = min(most, max(FEW_QUERIES, SCORES // self.e.keys))
        return -(-self.e.queries // -(-self.e.queries // most))

    @property
    def together(self) -> int:
        """Heads a unit: several where the scores of all queries of one are few."""
        if self.e.group > 1 or self.block < self.e.queries:
            return 1
        most = max(1, TOGETHER // (self.e.queries * self.e.keys))
        return max(n for n in range(1, self.e.heads + 1) if n <= most and self.e.heads % n == 0)

    @property
    def scores(self) -> int:
        """Elements of the largest block of scores."""
        return self.together * self.block * self.e.keys

    def blocks(self) -> list[tuple[slice, int]]:
        """(queries, keys that they read) of each block."""
        starts = range(0, self.e.queries, self.block)
        rows = [slice(start, min(self.e.queries, start + self.block)) for start in starts]
        return [(some, min(self.e.keys, some.stop) if self.causal else self.e.keys) for some in rows]

    def first_ahead(self, rows: slice) -> int:
        """How many keys the first query of a block reads."""
        return rows.start + 1 if self.causal else self.e.keys

    def units(self) -> Iterator[tuple[int, slice, list[slice]]]:
        """(batch item, key and value heads, the query heads that read them), one call each."""
        for n in range(self.e.batch):
            for start in range(0, self.e.kv_heads, self.together):
                kv = slice(start, start + self.together)
                heads = range(start * self.e.group, (start + 1) * self.e.group)
                yield n, kv, [kv] if self.e.group == 1 else [slice(h, h + 1) for h in heads]

    @property
    def repeats(self) -> int:
        """How often all blocks are worked on: for each unit, and for each of its heads that do not share a call."""
        return sum(len(head_blocks) for _, _, head_blocks in self.units())

    def some(self, x: Window, rows: int) -> Window:
        """Some rows of the heads of a call; x is [batch, heads, rows, depth]."""
        return _matrices(x.viewed((self.together, rows, x.shape[3]), x.strides[1:]))

    def dense(self, rows: int, columns: int, dtype: DType = FLOAT32) -> Window:
        """Dense matrices, one a head of a call."""
        return _matrices(Window.dense(TensorType(dtype, (self.together, rows, columns))))

    @property
    def narrow(self) -> Piece:
        """Memory for a block of scores in the operands' type; none if the scores have that type already."""
        return (0 if self.e.dtype == FLOAT32 else self.scores,), self.e.dtype.numpy


def cut_of(op: AttentionOp, inputs: Windows, *others: Window) -> tuple[Cut, list[Window]]:
    """The cut of an attention, and how q, k, v and others lie as [batch, heads, positions, depth].

    Raises:
        Refused: elements other than float32 and bfloat16, or none; strides below 0.
    """
    windows = (*inputs[:3], *others)
    check_elements(*windows)
    if not all(x.type.size for x in windows):
        raise Refused(f"queries {windows[0].type} and values {windows[2].type}")
    if any(step < 0 for x in inputs for step in x.strides):
        raise Refused("strides below 0")
    e = op.sizes([x.type for x in windows[:3]])
    order = (0, 2, 1, 3) if op.heads_last else (0, 1, 2, 3)
    seen = [x.viewed([x.shape[i] for i in order], [x.strides[i] for i in order]) for x in windows]
    return Cut(e, op.causal), seen


def _matrices(x: Window) -> Window:
    """Without the axis of heads if there is only one."""
    return x.viewed(x.shape[1:], x.strides[1:]) if x.shape[0] == 1 else x


def turned(x: Window) -> Window:
    """Each matrix transposed."""
    return x.viewed((*x.shape[:-2], x.shape[-1], x.shape[-2]), (*x.strides[:-2], x.strides[-1], x.strides[-2]))


def matrices(array: np.ndarray) -> np.ndarray:
    """[heads, rows, columns], without the axis of heads if there is only one."""
    return array[0] if array.shape[0] == 1 else array


@dataclass(frozen=True)
class MaskPart:
    """A block of the mask that is added to scores, or of its gradient; empty without a mask.

    Attributes:
        elements: as they lie, from the first.
        steps: elements to the next head, query and key; 0 where the mask is repeated.
    """

    elements: np.ndarray
    steps: tuple[int, int, int]

    @classmethod
    def of(cls, mask: np.ndarray | None, item: int, heads: slice, rows: slice, seen: int) -> MaskPart:
        """The part of a mask [batch or 1, heads or 1, queries or 1, keys or 1] that belongs to a block."""
        part = mask_block(mask, item, heads, rows, seen)
        if part is None:
            return cls(np.zeros(0, np.float32), (0, 0, 0))
        head, row, key = (0 if n == 1 else step // part.itemsize for n, step in zip(part.shape, part.strides))
        return cls(flat(part), (head, row, key))

"""Attention in blocks of queries: oneDNN's products, and the softmax of a block of scores between them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from foreplan.graph import Op
from foreplan.graph.op import Arrays, Windows
from foreplan.ops.attention.ops import Attention
from foreplan.runtime.cpu import prices
from foreplan.runtime.cpu.codegen.elements import bits, check_elements, check_float, settled
from foreplan.runtime.cpu.codegen.jit import SUMS, looped
from foreplan.runtime.cpu.gemm.products import Products
from foreplan.runtime.cpu.kernel import LoopKernel
from foreplan.runtime.cpu.kernels.attention_cut import GRAIN, MaskPart, cut_of, matrices, turned
from foreplan.runtime.cpu.kernels.rows import flat, flat_input
from foreplan.runtime.cpu.kernels.scores import ZERO, largest, probability, scale_and_mask
from foreplan.runtime.cpu.threads import current_threads, ranged
from foreplan.runtime.kernel import Run, one_after_another

_ONE = np.float32(1)


def attention(op: Op, inputs: Windows, outputs: Windows) -> LoopKernel:
    """The kernel of `attention`, block after block: the output may take the queries' bytes."""
    assert isinstance(op, Attention)
    check_elements(*inputs)
    check_float(outputs[1])
    cut, (q, k, v, out) = cut_of(op, inputs, outputs[0])
    products, cost = Products(), 0
    for rows, seen in cut.blocks():
        count = rows.stop - rows.start
        cost += products.describe(cut.some(q, count), turned(cut.some(k, seen)), cut.dense(count, seen))
        cost += products.describe(cut.dense(count, seen, cut.e.dtype), cut.some(v, seen), cut.some(out, count))
        cost += prices.loops(cut.together * count * seen, prices.SCORES)

    def loops(inputs: Arrays, outputs: Arrays, scratch: Arrays) -> Run:
        q, k, v, out = map(op.heads_first, (*inputs[:3], outputs[0]))
        mask = inputs[3] if len(inputs) == 4 else None
        runs: list[Run] = []
        for n, kv, head_blocks in cut.units():
            for heads in head_blocks:
                for rows, seen in cut.blocks():
                    block, part = (n, heads, rows), MaskPart.of(mask, n, heads, rows, seen)
                    tensors = (q[block], k[n, kv, :seen], v[n, kv, :seen], out[block], outputs[1][block])
                    runs += _block(products, op.scale, tensors, part, cut.first_ahead(rows), scratch)
        return one_after_another(*runs)

    # A block of scores, and of narrow probabilities; and what products need.
    pieces = (((cut.scores,), np.dtype(np.float32)), cut.narrow, ((products.scratchpad,), np.dtype(np.uint8)))
    overwrites = ((0, 0),) if inputs[0] == outputs[0] else ()
    return LoopKernel(loops, pieces, overwrites, nanoseconds=cost * cut.repeats)


def _block(
    products: Products, scale: float, tensors: Arrays, mask: MaskPart, first: int, pieces: Arrays
) -> Iterator[Run]:
    """The calls of one block, its tensors [heads, positions, depth]."""
    q, k, v, out, log_sums = tensors
    heads, count, seen = len(q), q.shape[1], k.shape[1]
    *scores, scratch = pieces
    s, narrow = (x[: heads * count * seen] for x in scores)
    p = narrow if narrow.size else s
    s, p = (x.reshape(heads, count, seen) for x in (s, p))
    yield products.bind(matrices(q), matrices(k.swapaxes(1, 2)), matrices(s), scratch)
    numbers = (np.float32(scale), count, first, flat_input(mask.elements), *mask.steps, flat(log_sums))
    rows = heads * count
    both = (s.reshape(rows, seen), bits(p.reshape(rows, seen)))
    yield ranged(_softmax, rows, GRAIN // seen, current_threads(), *both, *numbers)
    yield products.bind(matrices(p), matrices(v), matrices(out), scratch)


@looped(fastmath=SUMS)
def _softmax(
    start: int, stop: int, s: np.ndarray, p: np.ndarray, scale: np.float32, count: int, first: int,
    mask: np.ndarray, mask_head: int, mask_row: int, mask_key: int, log_sums: np.ndarray,
) -> None:  # fmt: skip
    """Turn products into probabilities, and write log-sum-exps.

    Args:
        start, stop: rows of s [heads · count, keys].
        p: the place of probabilities, of s's shape; probabilities of float32 stay in s.
        first: keys that the first row of a head reads; each further row reads one key more, up to all.
        mask: its elements; key j of row i of a head h has the one at h · mask_head + i · mask_row + j · mask_key.
        log_sums: of each row.
    """
    n = s.shape[1]
    for i in range(start, stop):
        row, head, at = s[i], i // count, i % count
        width = min(n, first + at)
        scale_and_mask(row, width, scale, mask, head * mask_head + at * mask_row, mask_key)
        high = largest(row, width)
        total = ZERO
        for k in range(width):
            e = probability(row[k] - high)
            row[k] = e
            total += e
        total = _ONE if total < _ONE else total
        share = _ONE / total
        for k in range(width):
            row[k] *= share
        for k in range(width, n):
            row[k] = ZERO
        settled(p[i], row)
        log_sums[i] = high + np.log(total)

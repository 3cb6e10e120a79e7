"""The gradient of attention in blocks of queries: five products a block, and between them the probabilities again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from foreplan.graph import Op, TensorType, Window
from foreplan.graph.op import Arrays, Windows
from foreplan.graph.types import FLOAT32
from foreplan.ops.attention.gradient import AttentionGrad
from foreplan.ops.attention.packed import PackedAttentionGrad
from foreplan.ops.blocks import Piece
from foreplan.runtime.cpu import prices
from foreplan.runtime.cpu.codegen.elements import as_in, bits, check_elements, check_float, number, settled
from foreplan.runtime.cpu.codegen.jit import FLOAT, SUMS, looped
from foreplan.runtime.cpu.gemm.products import Products
from foreplan.runtime.cpu.kernel import LoopKernel
from foreplan.runtime.cpu.kernels.attention_cut import GRAIN, MaskPart, cut_of, matrices, turned
from foreplan.runtime.cpu.kernels.rows import flat, flat_input
from foreplan.runtime.cpu.kernels.scores import ZERO, probability, scale_and_mask
from foreplan.runtime.cpu.threads import current_threads, ranged
from foreplan.runtime.kernel import Run, one_after_another

_FLOAT, _BYTE = np.dtype(np.float32), np.dtype(np.uint8)


def attention_grad(op: Op, inputs: Windows, outputs: Windows) -> LoopKernel:
    """The kernel of `attention_grad`: gradients of queries are written after their block was read, the others after
    their unit was.
    """
    assert isinstance(op, AttentionGrad)
    return _gradient(op, inputs, op.overwrites([x.type for x in inputs], [x.type for x in outputs]))


def packed_attention_grad(op: Op, inputs: Windows, outputs: Windows) -> LoopKernel:
    """The kernel of `packed_attention_grad`, on windows onto both tensors: the gradient takes the tensor's bytes, each
    part after its last read.
    """
    assert isinstance(op, PackedAttentionGrad)
    x, *others = inputs
    types = op.unpacked_types([window.type for window in inputs])[:3]
    windows = [window for _, window in op.unpacked_windows(x, types)]
    unpacked, parts = _gradient(op.unpacked, [*windows, *others], ()), op.unpacked_arrays

    def loops(inputs: Arrays, outputs: Arrays, scratch: Arrays) -> Run:
        return unpacked.bind([*parts(inputs[0]), *inputs[1:]], parts(outputs[0]), scratch[0])

    return LoopKernel(loops, (((unpacked.workspace,), _BYTE),), ((0, 0),), nanoseconds=unpacked.nanoseconds)


def _gradient(op: AttentionGrad, inputs: Windows, overwrites: tuple[tuple[int, int], ...]) -> LoopKernel:
    """The gradient, unit after unit; the last queries first, because they read all keys and so begin every sum."""
    cut, (q, k, v, g) = cut_of(op, inputs, inputs[5])
    check_elements(inputs[3], *inputs[6:])
    check_float(inputs[4])
    products, together, e, cost = Products(), cut.together, cut.e, 0
    describe = products.describe
    sums = [Window.dense(TensorType(FLOAT32, (1, together, e.keys, depth))) for depth in (e.depth, e.value_depth)]
    for rows, seen in cut.blocks():
        count = rows.stop - rows.start
        scores, queries, cotangents = cut.dense(count, seen), cut.some(q, count), cut.some(g, count)
        cost += describe(queries, turned(cut.some(k, seen)), scores)
        cost += describe(cotangents, turned(cut.some(v, seen)), scores)
        scores = cut.dense(count, seen, e.dtype)
        cost += describe(scores, cut.some(k, seen), cut.dense(count, e.depth))
        for factor, total in ((queries, sums[0]), (cotangents, sums[1])):
            describe(turned(scores), factor, cut.some(total, seen))
            cost += describe(turned(scores), factor, cut.some(total, seen), True)
        cost += prices.loops(together * count * seen, prices.SCORES)

    def loops(inputs: Arrays, outputs: Arrays, scratch: Arrays) -> Run:
        q, k, v, o, g = (op.heads_first(inputs[i]) for i in (0, 1, 2, 3, 5))
        dq, dk, dv = map(op.heads_first, outputs[:3])
        mask, dmask = (inputs[6] if len(inputs) == 7 else None), (outputs[3] if op.mask_gradient else None)
        runs: list[Run] = [] if dmask is None else [partial(dmask.fill, 0)]
        for n, kv, head_blocks in cut.units():
            sum_k, sum_v = (_rows_of(x, together, e.keys) for x in scratch[3:5])
            begins = True
            for heads in head_blocks:
                for rows, seen in reversed(cut.blocks()):
                    at = (n, heads, rows)
                    block = _Block(
                        *(q[at], o[at], inputs[4][at], g[at], dq[at]),
                        *(k[n, kv, :seen], v[n, kv, :seen], sum_k[:, :seen], sum_v[:, :seen]),
                        MaskPart.of(mask, n, heads, rows, seen),
                        MaskPart.of(dmask, n, heads, rows, seen),
                    )
                    if begins and seen < e.keys:
                        runs += [partial(x[:, seen:].fill, 0) for x in (sum_k, sum_v)]
                    runs += _block(products, op.scale, block, cut.first_ahead(rows), scratch, not begins)
                    begins = False
            runs.append(_scaled(sum_k, op.scale, dk[n, kv]))
            runs.append(_scaled(sum_v, 1, dv[n, kv]))
        return one_after_another(*runs)

    # Two blocks of scores, the gradients of a block's queries and of a unit's keys and values; memory of products; and,
    # for narrow operands, the blocks again in their type.
    keys, narrow = together * e.keys, [cut.narrow] * 2
    floats = (cut.scores, cut.scores, together * cut.block * e.depth, keys * e.depth, keys * e.value_depth)
    pieces: list[Piece] = [*(((count,), _FLOAT) for count in floats), ((products.scratchpad,), _BYTE), *narrow]
    return LoopKernel(loops, tuple(pieces), overwrites, nanoseconds=cost * cut.repeats)


def _block(products: Products, scale: float, x: _Block, first: int, pieces: Arrays, adds: bool) -> Iterator[Run]:
    """The calls of one block."""
    heads, count, depth = x.q.shape
    seen, scratch, multiply = x.k.shape[1], pieces[5], products.bind
    p, ds, *narrow = (_rows_of(y[: heads * count * seen], heads, count) for y in (*pieces[:2], *pieces[6:]) if y.size)
    factors = narrow or [p, ds]
    queries = _rows_of(pieces[2][: heads * count * depth], heads, count)
    yield multiply(matrices(x.q), matrices(x.k.swapaxes(1, 2)), matrices(p), scratch)
    yield multiply(matrices(x.g), matrices(x.v.swapaxes(1, 2)), matrices(ds), scratch)
    rows = heads * count
    numbers = (np.float32(scale), count, first, flat_input(x.mask.elements), *x.mask.steps)
    outputs = [flat_input(x.log_sums), flat_input(x.o), *_steps(x.o), flat_input(x.g), *_steps(x.g), x.g.shape[2]]
    scores = [bits(y.reshape(rows, seen)) for y in (p, ds, *factors)]
    yield ranged(_score_gradients, rows, GRAIN // seen, current_threads(), *scores, *numbers, *outputs)
    if x.dmask.elements.size:
        yield partial(_add_to_mask, ds, x.dmask.elements, *x.dmask.steps)
    p, ds = factors
    yield multiply(matrices(p.swapaxes(1, 2)), matrices(x.g), matrices(x.sum_v), scratch, adds)
    yield multiply(matrices(ds.swapaxes(1, 2)), matrices(x.q), matrices(x.sum_k), scratch, adds)
    yield multiply(matrices(ds), matrices(x.k), matrices(queries), scratch)
    yield _scaled(queries, scale, x.dq)


@dataclass(frozen=True)
class _Block:
    """Tensors of a block of queries of some heads [heads, positions, depth], log_sums and mask excepted."""

    q: np.ndarray
    o: np.ndarray
    log_sums: np.ndarray
    g: np.ndarray
    dq: np.ndarray
    k: np.ndarray
    v: np.ndarray
    sum_k: np.ndarray
    sum_v: np.ndarray
    mask: MaskPart
    dmask: MaskPart


def _rows_of(elements: np.ndarray, heads: int, rows: int) -> np.ndarray:
    return elements.reshape(heads, rows, -1)


def _steps(x: np.ndarray) -> tuple[int, int]:
    """Elements to the next head and row."""
    return x.strides[0] // x.itemsize, x.strides[1] // x.itemsize


def _scaled(source: np.ndarray, scale: float, target: np.ndarray) -> Run:
    """A call that copies dense [heads, rows, depth], times a number."""
    heads, rows, depth = source.shape
    numbers = (np.float32(scale), rows, flat(target), *_steps(target))
    return ranged(_copy, heads * rows, GRAIN // depth, current_threads(), source.reshape(heads * rows, depth), *numbers)


@looped(fastmath=FLOAT)
def _copy(
    start: int, stop: int, source: np.ndarray, scale: np.float32, rows: int, target: np.ndarray, head: int, step: int
) -> None:
    for i in range(start, stop):
        row = source[i]
        to = target[i // rows * head + i % rows * step :][: row.size]
        for k in range(row.size):
            to[k] = as_in(to, row[k] * scale)


@looped(fastmath=SUMS)
def _score_gradients(
    start: int, stop: int, p: np.ndarray, ds: np.ndarray, p_out: np.ndarray, ds_out: np.ndarray,
    scale: np.float32, count: int, first: int,
    mask: np.ndarray, mask_head: int, mask_row: int, mask_key: int, log_sums: np.ndarray,
    o: np.ndarray, o_head: int, o_row: int, g: np.ndarray, g_head: int, g_row: int, depth: int,
) -> None:  # fmt: skip
    """Turn products q·k into probabilities, and g·v into gradients of scaled products.

    Args:
        start, stop: rows of p and ds [heads · count, keys].
        p_out, ds_out: places of the results, of their shape; results of float32 stay in p and ds.
        first, mask, mask_*: as in the forward direction.
        log_sums: of each row.
        o, g: outputs and their cotangents, with elements to the next head and row.
    """
    n = p.shape[1]
    for i in range(start, stop):
        row, gradient, head, at = p[i], ds[i], i // count, i % count
        width = min(n, first + at)
        ours, theirs = o[head * o_head + at * o_row :][:depth], g[head * g_head + at * g_row :][:depth]
        dot = ZERO
        for k in range(depth):
            dot += number(ours[k]) * number(theirs[k])
        scale_and_mask(row, width, scale, mask, head * mask_head + at * mask_row, mask_key)
        high = log_sums[i]
        for k in range(width):
            e = probability(row[k] - high)
            row[k] = e
            gradient[k] = e * (gradient[k] - dot)
        for k in range(width, n):
            row[k] = gradient[k] = ZERO
        settled(p_out[i], row)
        settled(ds_out[i], gradient)


@looped
def _add_to_mask(ds: np.ndarray, target: np.ndarray, head: int, step: int, key: int) -> None:
    """Add gradients [heads, rows, keys] to a mask's, with elements to the next head, row and key; 0 where they sum."""
    for h in range(ds.shape[0]):
        for i in range(ds.shape[1]):
            row, base = ds[h, i], h * head + i * step
            if key == 0:
                total = 0.0
                for k in range(row.size):
                    total += row[k]
                target[base] += np.float32(total)
            else:
                for k in range(row.size):
                    target[base + k * key] += row[k]

"""Cross-entropy fused with the matrix that makes the logits: a chunk of rows at a time, in blocks of classes.

Each block of logits is computed and turned into exponentials. When the normaliser is known, each block becomes
gradients just before its products with the hidden states and the matrix.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from foreplan.graph import Op, Window
from foreplan.graph.op import Arrays, Windows
from foreplan.graph.types import FLOAT32
from foreplan.ops.blocks import Piece, carve, carve_bytes
from foreplan.ops.linear_cross_entropy import LinearCrossEntropy
from foreplan.runtime.cpu import prices
from foreplan.runtime.cpu.codegen.elements import bits, check_elements, check_float, settled, written
from foreplan.runtime.cpu.codegen.jit import FLOAT, SUMS, looped
from foreplan.runtime.cpu.gemm.products import Products, matrix
from foreplan.runtime.cpu.kernels.copies import copy
from foreplan.runtime.cpu.kernels.scores import FLUSH, LOWEST, ZERO, largest, probability
from foreplan.runtime.cpu.threads import current_threads, ranged
from foreplan.runtime.kernel import Refused, Run, one_after_another

CLASSES = 512  # a block: its logits stay in a core's cache
GRAIN = 2**16  # logits that are worth a thread

_FLOAT, _DOUBLE, _INT64, _BYTE = (np.dtype(x) for x in (np.float32, np.float64, np.int64, np.uint8))


def linear_cross_entropy(op: Op, inputs: Windows, outputs: Windows) -> LossKernel:
    """The kernel of `linear_cross_entropy`."""
    assert isinstance(op, LinearCrossEntropy)
    h, w, _, *bias = inputs
    check_elements(h, w)
    check_float(outputs[0], *outputs[2:], *bias)
    if not h.type.size or not w.type.size:
        raise Refused(f"hidden states {h.type}")
    return LossKernel(op, h.shape[0], w, len(inputs) > 3)


class LossKernel:
    """The loss and its gradients, the output matrix lying as it does.

    Attributes:
        workspace: the logits of a chunk, its hidden states, and some numbers a row; of narrow operands the gradients of
            a block's logits as they are multiplied, and those of a chunk's hidden states as they are summed.
        overwrites: the gradient of the hidden states takes their bytes; those of a chunk are copied first.
        nanoseconds: predicted.
    """

    overwrites = ((1, 0),)

    def __init__(self, op: LinearCrossEntropy, rows: int, weights: Window, biased: bool) -> None:
        self.op, self.rows, self.biased = op, rows, biased
        self.classes, self.depth = weights.shape
        self.dtype, self.products = weights.type.dtype, Products()
        some = Counter((len(chunk), len(block)) for chunk in self.chunks() for block in self.blocks())
        self.nanoseconds = sum(times * self._describe(*sizes, weights) for sizes, times in some.items())
        self.workspace = carve_bytes(*self._pieces())

    def _describe(self, count: int, n: int, weights: Window) -> int:
        """Describe the products of a block of classes and some rows; their predicted time, with that of the loops."""
        describe = self.products.describe
        h, x, sums = matrix(count, self.depth, self.dtype), matrix(count, n, self.dtype), matrix(count, self.depth)
        w = weights.viewed((n, self.depth), weights.strides)
        cost = describe(h, w.viewed((self.depth, n), w.strides[::-1]), matrix(count, n))
        for add in (False, True):
            products = [(x, w, sums)]
            if not self.op.frozen:
                products.append((x.viewed((n, count), x.strides[::-1]), h, matrix(n, self.depth)))
            cost += sum([describe(*each, add) for each in products]) * add
        return cost + prices.loops(count * n, prices.EXPONENTIALS) + prices.loops(count * n, prices.LOGITS)

    def chunks(self) -> Iterator[range]:
        """Rows whose logits exist at once."""
        for start in range(0, self.rows, self.op.chunk):
            yield range(start, min(self.rows, start + self.op.chunk))

    def blocks(self) -> Iterator[range]:
        """Classes that are worked on together."""
        for start in range(0, self.classes, CLASSES):
            yield range(start, min(self.classes, start + CLASSES))

    def _pieces(self) -> list[Piece]:
        chunk, blocks = min(self.op.chunk, self.rows), len(list(self.blocks()))
        narrow = self.dtype != FLOAT32
        states: list[Piece] = [((chunk, self.depth), self.dtype.numpy), ((chunk if narrow else 0, self.depth), _FLOAT)]
        block: Piece = (chunk * min(CLASSES, self.classes) if narrow else 0,), self.dtype.numpy
        numbers: list[Piece] = [((chunk,), dtype) for dtype in (_FLOAT, _FLOAT, _FLOAT, _DOUBLE, _INT64)]
        rest: list[Piece] = [((2,), _DOUBLE), ((chunk * self.classes,), _FLOAT), ((self.products.scratchpad,), _BYTE)]
        return [*states, block, ((blocks, chunk), _FLOAT), *numbers, *rest]

    def bind(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray) -> Run:
        """One chunk of rows after the other."""
        hidden, sums, narrow, highs, *numbers, state, logits, scratch = carve(workspace, *self._pieces())
        h, w, target, *bias = inputs
        loss, dh, *of_weights = outputs
        dw, *dbias = of_weights or (None,)
        none = np.zeros(0, np.float32)
        threads = current_threads()
        runs: list[Run] = [partial(_begin, target, self.op.ignore_index, self.op.mean, state)]
        for chunk in self.chunks():
            count, some = len(chunk), slice(chunk.start, chunk.stop)
            rows = _Rows(hidden[:count], *(x[:count] for x in numbers))
            runs.append(copy(rows.hidden, h[some]))
            runs.append(
                partial(_start, target[some], self.op.ignore_index, self.classes, rows.high, rows.total, rows.label)
            )
            blocks = []
            for i, block in enumerate(self.blocks()):
                of = slice(block.start, block.stop)
                x = logits[block.start * count : block.stop * count].reshape(count, len(block))
                gradients = (None if dw is None else dw[of], dbias[0][of] if dbias else none)
                parameters = (w[of], bias[0][of] if bias else none, *gradients)
                factors = narrow[: x.size].reshape(x.shape) if narrow.size else x
                blocks.append(_Block(x, factors, block.start, highs[i, :count], *parameters))
            into = sums[:count] if sums.size else dh[some]
            calls = _Chunk(rows, state, into, self.products, scratch, threads, adds=chunk.start > 0)
            runs += [run for block in blocks for run in calls.forward(block)]
            runs.append(partial(_finish, rows.high, rows.picked, rows.total, rows.label, rows.factor, state))
            runs += [run for block in blocks for run in calls.backward(block)]
            if sums.size:
                runs.append(ranged(_round, count, GRAIN // self.depth, threads, into, bits(dh[some])))
        return one_after_another(*runs, partial(_end, state, loss.reshape(1)))


@dataclass(frozen=True)
class _Rows:
    """Numbers of the rows of a chunk.

    Attributes:
        hidden: states [rows, depth].
        high: the largest logit so far.
        picked: the target's logit.
        factor: the final factor of the exponentials.
        total: sum of exponentials.
        label: the target; -1: ignored, -2: no class.
    """

    hidden: np.ndarray
    high: np.ndarray
    picked: np.ndarray
    factor: np.ndarray
    total: np.ndarray
    label: np.ndarray


@dataclass(frozen=True)
class _Block:
    """Some classes of a chunk.

    Attributes:
        x: logits [rows, classes].
        factors: their gradients as factors of products: x itself, or narrow copies.
        start: the first class.
        high: for each row, the number that was subtracted before exponentials.
        w, bias, dw, dbias: of these classes; bias and dbias are empty where there is none, dw is None if not wanted.
    """

    x: np.ndarray
    factors: np.ndarray
    start: int
    high: np.ndarray
    w: np.ndarray
    bias: np.ndarray
    dw: np.ndarray | None
    dbias: np.ndarray


@dataclass(frozen=True)
class _Chunk:
    """The calls of a chunk.

    Attributes:
        dh: gradient of its hidden states, in float32.
        adds: whether earlier chunks have begun the gradients of the weights.
    """

    rows: _Rows
    state: np.ndarray
    dh: np.ndarray
    products: Products
    scratch: np.ndarray
    threads: int
    adds: bool

    def ranged(self, function: Callable[..., object], block: _Block, *arguments: object) -> Run:
        """A compiled loop over the rows."""
        return ranged(function, len(block.x), GRAIN // block.x.shape[1], self.threads, block.x, *arguments)

    def forward(self, block: _Block) -> Iterator[Run]:
        """Compute logits and their exponentials."""
        rows = self.rows
        yield self.products.bind(rows.hidden, block.w.T, block.x, self.scratch)
        numbers = (rows.label, block.start, rows.high, rows.total, rows.picked, block.high)
        yield self.ranged(_exponentials, block, block.bias, *numbers)

    def backward(self, block: _Block) -> Iterator[Run]:
        """Compute gradients of the logits, and from them all others."""
        rows, multiply = self.rows, self.products.bind
        numbers = (rows.label, block.start, rows.high, rows.factor, block.high)
        yield self.ranged(_gradients, block, bits(block.factors), *numbers, self.state)
        if block.dw is not None:
            yield multiply(block.factors.T, rows.hidden, block.dw, self.scratch, add=self.adds)
        yield multiply(block.factors, block.w, self.dh, self.scratch, add=block.start > 0)
        if block.dbias.size:
            yield partial(_sum_rows, block.x, block.dbias, self.adds)


@looped
def _begin(target: np.ndarray, ignored: int, mean: bool, state: np.ndarray) -> None:
    """state = (weight of an item, 0)."""
    count = 0
    for i in range(target.size):
        count += target[i] != ignored
    state[0] = 1 / max(1, count) if mean else 1
    state[1] = 0


@looped
def _start(
    target: np.ndarray, ignored: int, classes: int, high: np.ndarray, total: np.ndarray, label: np.ndarray
) -> None:
    for i in range(target.size):
        at = np.int64(target[i])
        label[i] = -1 if at == ignored else at if 0 <= at < classes else -2
        high[i], total[i] = LOWEST, 0


@looped(fastmath=SUMS)
def _exponentials(
    start: int, stop: int, x: np.ndarray, bias: np.ndarray, label: np.ndarray, first: int,
    high: np.ndarray, total: np.ndarray, picked: np.ndarray, block_high: np.ndarray,
) -> None:  # fmt: skip
    """Turn logits into exp(logit - largest so far), flushed, and add them to the row's total."""
    n = x.shape[1]
    for i in range(start, stop):
        row = x[i]
        for k in range(bias.size):
            row[k] += bias[k]
        if first <= label[i] < first + n:
            picked[i] = row[label[i] - first]
        most = largest(row, n)
        most = high[i] if high[i] > most else most
        summed = ZERO
        for k in range(n):
            p = probability(row[k] - most)
            row[k] = p
            summed += p
        total[i] = total[i] * np.exp(np.float64(high[i]) - np.float64(most)) + summed
        high[i] = block_high[i] = most


@looped
def _finish(
    high: np.ndarray, picked: np.ndarray, total: np.ndarray, label: np.ndarray, factor: np.ndarray, state: np.ndarray
) -> None:
    """The losses of a chunk, and the factor of each row."""
    for i in range(label.size):
        if label[i] == -1:
            factor[i] = 0
        elif label[i] == -2:
            factor[i] = np.nan
            state[1] = np.nan
        else:
            factor[i] = state[0] / total[i]
            state[1] += np.log(total[i]) + (np.float64(high[i]) - np.float64(picked[i]))


@looped(fastmath=FLOAT)
def _gradients(
    start: int, stop: int, x: np.ndarray, factors: np.ndarray, label: np.ndarray, first: int,
    high: np.ndarray, factor: np.ndarray, block_high: np.ndarray, state: np.ndarray,
) -> None:  # fmt: skip
    """Turn exponentials into weight · (probability - 1 if it is the target's), flushed."""
    n = x.shape[1]
    for i in range(start, stop):
        row = x[i]
        scale = np.float32(factor[i] * np.exp(np.float64(block_high[i]) - np.float64(high[i])))
        for k in range(n):
            p = row[k] * scale
            row[k] = ZERO if p < FLUSH else p
        if first <= label[i] < first + n:
            row[label[i] - first] -= np.float32(state[0])
        settled(factors[i], row)


@looped
def _round(start: int, stop: int, sums: np.ndarray, target: np.ndarray) -> None:
    """Rows of float32 as narrow ones."""
    for i in range(start, stop):
        written(sums[i], target[i])


@looped(fastmath=FLOAT)
def _sum_rows(x: np.ndarray, out: np.ndarray, adds: bool) -> None:
    """out = or += the sum of the rows."""
    if not adds:
        out[:] = 0
    for i in range(x.shape[0]):
        row = x[i]
        for k in range(out.size):
            out[k] += row[k]


@looped
def _end(state: np.ndarray, loss: np.ndarray) -> None:
    loss[0] = state[1] * state[0]

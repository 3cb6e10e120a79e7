"""Cross-entropy fused with the product that makes the logits, which never exist all at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from foreplan.base.errors import ShapeError, UnsupportedError
from foreplan.graph import Array, Builder, Cost, Fill, Op, TensorType, Value, register
from foreplan.graph.op import Arrays, Cotangents, Types, Values
from foreplan.graph.types import types_of
from foreplan.graph.value import Kind
from foreplan.ops.attention.blocks import widened
from foreplan.ops.blocks import Piece, carve, carve_bytes, flush
from foreplan.ops.expr import call, maximum, where
from foreplan.ops.loss import BOOL, IGNORE, CrossEntropy, CrossEntropyGrad, item_blocks, item_pieces
from foreplan.ops.map import convert, elementwise
from foreplan.ops.matmul import MatMul, matmul
from foreplan.ops.reduce import reduce

LOGITS_BYTES = 56 * 2**20  # a chunk of logits has at most as many bytes
PRODUCT_BYTES = 2 * 2**20  # likewise the product that is added to the weights' gradient


@register
@dataclass(frozen=True)
class LinearCrossEntropy(Op):
    """(loss, dh, dw) of the mean cross-entropy of logits h·wᵀ (+ bias), without all logits at once.

    Inputs h[rows, depth], w[classes, depth], target[rows], and optionally bias[classes], whose gradient then is a
    fourth output. The loss is the mean over the items whose target is not `ignore_index` (0 if there are none); the
    other outputs are its gradients. Of narrow h and w, the loss is wide, and the bias may be. Each chunk of rows makes
    its logits, turns them into their gradient in place, and adds its share to dh and dw, so nothing is computed twice.

    Attributes:
        chunk: rows whose logits exist at once, chunk · classes elements of workspace.
        ignore_index: the target of items that do not count.
        mean: the loss is the items' mean; else it is their sum.
        wide: the gradient of narrow w is wide (see `DType.wide`).
        frozen: nobody wants the gradients of w and the bias: loss and dh are the only outputs.
    """

    name: ClassVar[str] = "linear_cross_entropy"
    narrow: ClassVar[int] = 2
    chunk: int = 256
    ignore_index: int = IGNORE
    mean: bool = True
    wide: bool = False
    frozen: bool = False

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """A scalar, and the types of h and w, and of the bias."""
        h, w, target, *bias = inputs
        if h.rank != 2 or w.rank != 2 or h.dtype != w.dtype or not h.dtype.is_float or h.shape[1] != w.shape[1]:
            raise ShapeError(f"needs h[rows, depth] and w[classes, depth] of one element type, and got {h} and {w}")
        if target.shape != h.shape[:1] or target.dtype.category not in ("int", "uint"):
            raise ShapeError(f"the target must be {h.shape[0]} integers, and is {target}")
        if h.shape[0] and not w.shape[0]:
            raise ShapeError(f"w needs at least one class, and is {w}")
        if self.chunk < 1:
            raise ShapeError(f"a chunk must have at least one row, and has {self.chunk}")
        wide, of_w = h.dtype.wide, w.with_dtype(w.dtype.wide) if self.wide else w
        vector = w.with_shape(w.shape[:1])
        if len(bias) > 1 or any(type not in (vector, vector.with_dtype(wide)) for type in bias):
            raise ShapeError(f"the bias of {w.shape[0]} classes must be {vector}, and is {bias[0]}")
        return TensorType(wide, ()), h, *(() if self.frozen else (of_w, *bias))

    def vjp(self, b: Builder, inputs: Values, outputs: Values, cotangents: Cotangents) -> Cotangents:
        """The gradients times the loss's cotangent; themselves where that is the constant 1."""
        g, *others = cotangents
        if any(other is not None for other in others):
            raise UnsupportedError("the gradients that linear_cross_entropy returns have no derivative themselves")
        flows: list[Value | None] = [None] * len(inputs)
        if self.frozen and any(b.wants(value) for value in (inputs[1], *inputs[3:])):
            raise UnsupportedError("it gives no gradients of frozen weights")
        if g is None:
            return flows
        for i, gradient in reversed(list(zip((0, 1, 3), outputs[1:]))):
            if _is_one(g):
                flows[i] = convert(b, gradient, inputs[i].dtype)
            elif b.wants(inputs[i]):
                flows[i] = elementwise(b, lambda d, g: d * g, gradient, g, dtype=inputs[i].dtype)
        return flows

    def overwrites(self, inputs: Types, outputs: Types) -> tuple[tuple[int, int], ...]:
        """dh takes the bytes of h: the last read of a chunk comes before its gradient is written."""
        return ((1, 0),)

    def accepts_strides(self, index: int, input: TensorType, strides: tuple[int, ...]) -> bool:
        """The matrices as BLAS takes them."""
        return index < 2 and MatMul().accepts_strides(index, input, strides)

    def valid_range(self, index: int, inputs: Types) -> tuple[int, ...] | None:
        """Class indices, and `ignore_index`."""
        return (0, inputs[1].shape[0] - 1, self.ignore_index) if index == 2 else None

    def cost(self, inputs: Types, outputs: Types) -> Cost:
        """Three matrix products, five scalar operations a logit, and two more for the bias and its gradient; fewer
        where w is frozen.
        """
        (rows, depth), classes = inputs[0].shape, inputs[1].shape[0]
        chunks = -(-rows // self.chunk)
        passes, products, additions = (1, 2, 1) if self.frozen else (3, 3, 2)
        moved = sum(type.nbytes for type in (*inputs, *outputs)) + passes * max(0, chunks - 1) * inputs[1].nbytes
        return Cost((2 * products * depth + 5 + additions * (len(inputs) > 3)) * rows * classes, moved)

    def workspace(self, inputs: Types, outputs: Types) -> int:
        """The logits of a chunk, a part of a product that is added to dw, a sum a class, and numbers an item.

        Of narrow h and w, a chunk of both and of dh, widened, and the gradients that are rounded at the end.
        """
        h, w = inputs[:2]
        pieces = self._pieces(h.shape[0], w.shape, h.dtype.wide.numpy, len(inputs) > 3)
        return carve_bytes(*pieces, *self._wide_pieces(inputs))

    def _wide_pieces(self, inputs: Types) -> list[Piece]:
        """Rows of h, rows of dh twice, some classes' rows of w, dw and dbias; only tensors that are narrow."""
        (h, w, _, *bias), wide = inputs[:4], inputs[0].dtype.wide.numpy
        narrow = h.dtype.is_narrow
        rows, depth = min(self.chunk, h.shape[0]) * narrow, h.shape[1]
        sums = w.size if narrow and not self.wide and not self.frozen else 0
        biases = [type.size for type in bias if type.dtype.is_narrow and not self.frozen]
        sizes = (rows * depth, 2 * rows * depth, min(w.shape[0], self._classes(w)) * depth * narrow, sums, sum(biases))
        return [((size,), wide) for size in sizes]

    def _classes(self, w: TensorType) -> int:
        """How many rows of w are widened at once."""
        return max(64, PRODUCT_BYTES // max(1, w.shape[1] * w.dtype.wide.itemsize))

    def _pieces(self, rows: int, weights: tuple[int, ...], dtype: np.dtype, biased: bool) -> list[Piece]:
        classes, depth = weights
        chunk = min(self.chunk, rows)
        adds = min(classes, max(64, PRODUCT_BYTES // max(1, depth * dtype.itemsize)))
        adds, biased = adds * (chunk < rows and not self.frozen), biased and not self.frozen
        pieces: list[Piece] = [((chunk, classes), dtype), ((adds, depth), dtype), ((classes * biased,), dtype)]
        pieces += [((chunk, 1), dtype), ((chunk,), BOOL)]
        return pieces + item_pieces((chunk, classes, 1), dtype)

    def compute(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray) -> None:
        """One chunk of rows after the other."""
        (h, w, target, *bias), (loss, dh, *of_weights) = inputs, outputs
        dw, *dbias = of_weights or (None,)
        types = types_of(*inputs)
        pieces = self._pieces(h.shape[0], w.shape, loss.dtype, bool(bias))
        logits, product, summed, losses, counted, *rest = carve(workspace, *pieces, *self._wide_pieces(types))
        scratch, (wide_h, wide_dh, wide_w, sums, biases) = rest[:-5], rest[-5:]
        dw_sum = sums.reshape(w.shape) if sums.size else dw
        dbias_sum = [biases] if biases.size else dbias
        some = min(len(w), self._classes(types[1]))
        products = _Products(w, wide_w.reshape(some, w.shape[1]) if types[0].dtype.is_narrow else None)
        starts = range(0, len(h), self.chunk)
        count = 0
        for start in starts:
            here = target[start : start + self.chunk]
            count += int(np.count_nonzero(np.not_equal(here, self.ignore_index, out=counted[: len(here)])))
        weight, total = 1.0 / max(1, count) if self.mean else 1.0, 0.0
        for array in (dw_sum, *dbias_sum) if not h.size else dbias_sum:
            if array is not None:
                array.fill(0)
        for start in starts:
            rows = slice(start, min(len(h), start + self.chunk))
            x, states = logits[: rows.stop - start], widened(h[rows], wide_h)
            products.forward(states, x)
            if bias:
                x += bias[0]
            self._to_gradient(x, target[rows], weight, losses, scratch)
            total += float(np.sum(losses[: len(x)], dtype=np.float64))
            if dw_sum is not None and start == 0:
                np.matmul(x.T, states, out=dw_sum)
            elif dw_sum is not None:
                _add_product(x.T, states, dw_sum, product)
            if dbias:
                dbias_sum[0] += np.add.reduce(x, axis=0, out=summed)
            products.backward(x, dh[rows], wide_dh.reshape(2, -1))
        loss[...] = total * weight
        for array, sum_ in zip(of_weights, (dw_sum, *dbias_sum)):
            if array is not sum_ and sum_ is not None:
                np.copyto(array, sum_, casting="unsafe")

    def _to_gradient(
        self, x: np.ndarray, target: np.ndarray, weight: float, losses: np.ndarray, scratch: Arrays
    ) -> None:
        """Turn logits [rows, classes] into the gradient of their weighted loss, and write each row's own loss."""
        flat = x.reshape(-1)
        for block in item_blocks((*x.shape, 1), target[:, None], self.ignore_index, scratch):
            part, loss, number, picked = x[block.rows], losses[block.rows], block.number, block.picked
            np.maximum.reduce(part, axis=1, keepdims=True, out=number)
            part -= number
            np.take(flat, block.index, out=picked, mode="clip")
            np.exp(part, out=part)
            flush(part)
            np.add.reduce(part, axis=1, keepdims=True, out=number)
            np.log(number, out=loss)
            loss -= picked
            block.mark(loss)
            picked.fill(weight)
            block.mark(picked)
            np.divide(picked, number, out=number)
            part *= number
            np.copyto(number, picked)
            np.take(flat, block.index, out=picked, mode="clip")
            picked -= number
            np.put(flat, block.index, picked)

    def decompose(self, b: Builder, inputs: Values) -> Values:
        """All logits, their cross-entropy and its gradient."""
        (h, w, target, *bias), wide = inputs, inputs[0].dtype.wide
        logits = b.apply(MatMul(transpose_b=True, wide=True), h, w)
        if bias:
            logits = elementwise(b, lambda x, c: x + c, logits, convert(b, bias[0], wide))
        losses, lse = b.node(CrossEntropy(1, self.ignore_index), logits, target)
        counts = elementwise(b, lambda t: where(call("ne", t, self.ignore_index), 1.0, 0.0), target, dtype=wide)
        loss = reduce(b, "sum", losses)
        if self.mean:
            total = elementwise(b, lambda n: maximum(n, 1.0), reduce(b, "sum", counts))
            loss, counts = (elementwise(b, lambda x, n: x / n, x, total) for x in (loss, counts))
        dx = b.apply(CrossEntropyGrad(1, self.ignore_index), logits, target, lse, counts)
        dh = convert(b, matmul(b, dx, convert(b, w, wide)), h.dtype)
        if self.frozen:
            return [loss, dh]
        dw = matmul(b, dx, convert(b, h, wide), transpose_a=True)
        found = [loss, dh, dw if self.wide else convert(b, dw, w.dtype)]
        return [*found, *(convert(b, reduce(b, "sum", dx, 0), each.dtype) for each in bias)]


@dataclass(frozen=True)
class _Products:
    """Products with w: with all of it, or, if it is narrow, with some classes at a time.

    Attributes:
        scratch: some rows of w are widened here; its length is their number. None: w is wide.
    """

    w: np.ndarray
    scratch: np.ndarray | None

    def forward(self, h: np.ndarray, logits: np.ndarray) -> None:
        """logits = h·wᵀ."""
        if self.scratch is None:
            np.matmul(h, self.w.T, out=logits)
            return
        for classes, part in self._parts(self.scratch):
            np.matmul(h, part.T, out=logits[:, classes])

    def backward(self, gradient: np.ndarray, dh: np.ndarray, scratch: np.ndarray) -> None:
        """dh = gradient·w, rounded once."""
        if self.scratch is None:
            np.matmul(gradient, self.w, out=dh)
            return
        wide, product = scratch[:, : dh.size].reshape(2, *dh.shape)
        wide.fill(0)
        for classes, part in self._parts(self.scratch):
            _add_product(gradient[:, classes], part, wide, product)
        np.copyto(dh, wide, casting="unsafe")

    def _parts(self, scratch: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
        for start in range(0, len(self.w), len(scratch)):
            part = self.w[start : start + len(scratch)]
            yield slice(start, start + len(part)), widened(part, scratch.reshape(-1))


def _is_one(value: Value) -> bool:
    if value.kind is not Kind.CONSTANT:
        return False
    init = value.init
    return init == Fill(1.0) or (isinstance(init, Array) and bool((init.array == 1).all()))


def _add_product(a: np.ndarray, b: np.ndarray, out: np.ndarray, product: np.ndarray) -> None:
    """out += a·b, a few rows at a time."""
    for start in range(0, len(a), len(product)):
        part = product[: min(len(product), len(a) - start)]
        np.matmul(a[start : start + len(part)], b, out=part)
        out[start : start + len(part)] += part


def linear_cross_entropy(
    b: Builder,
    h: Value,
    w: Value,
    target: Value,
    bias: Value | None = None,
    *,
    ignore_index: int = IGNORE,
    chunk: int = 256,
    mean: bool = True,
    frozen: bool = False,
    name: str = "",
) -> Value:
    """The mean cross-entropy of logits h·wᵀ + bias, h[rows, depth] and w[classes, depth], in at most 64 MiB of
    workspace.

    Args:
        b: where nodes are added.
        h: hidden states.
        w: output matrix.
        target: integers [rows].
        bias: [classes].
        ignore_index: the target of items that do not count.
        chunk: rows whose logits exist at once; fewer are taken where their logits would need too much memory.
        mean: give the mean over the items that count; else the sum.
        frozen: nobody wants the gradients of w and the bias.
        name: of the node.
    """
    op = LinearCrossEntropy(fitting_chunk(w.type, chunk), ignore_index, mean, frozen=frozen)
    return b.node(op, h, w, target, *([] if bias is None else [bias]), name=name)[0]


def fitting_chunk(w: TensorType, chunk: int = 256) -> int:
    """Rows whose logits for the output matrix w[classes, depth] stay within `LOGITS_BYTES`: `chunk`, or fewer."""
    return max(1, min(chunk, LOGITS_BYTES // max(1, w.shape[0] * w.dtype.wide.itemsize)))

"""Cross-entropy of logits against class indices: an item at a time, and fused with the matrix that makes the logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from foreplan.errors import ShapeError, UnsupportedError
from foreplan.graph import Array, Builder, Cost, Fill, Op, TensorType, Value, register
from foreplan.graph.ir import Kind
from foreplan.graph.op import Arrays, Types
from foreplan.ops.blocks import (
    Folded,
    Piece,
    block_extents,
    blocks,
    can_reshape,
    carve,
    carve_bytes,
    flush,
    fold,
    folded_shape,
    iota,
)
from foreplan.ops.expr import exp
from foreplan.ops.map import elementwise
from foreplan.ops.matmul import MatMul
from foreplan.ops.reduce import normalize_axes
from foreplan.ops.shape import reshape

IGNORE = -100  # the usual mark of an item without a target
LOGITS_BYTES = 56 * 2**20  # a chunk of logits in `linear_cross_entropy` has at most as many bytes
PRODUCT_BYTES = 2 * 2**20  # likewise the product that is added to the weights' gradient

INT64, BOOL = np.dtype(np.int64), np.dtype(np.bool_)


@dataclass(frozen=True)
class _Items:
    """The items of one block of logits; arrays are [outer, inner]."""

    rows: slice
    columns: slice
    index: np.ndarray  # of each item's target logit among all logits in C order
    ignored: np.ndarray
    wrong: np.ndarray  # the target is no class, which shows as NaN (what users give is checked before a step begins)
    number: np.ndarray  # scratch, a number an item
    picked: np.ndarray  # likewise

    def mark(self, numbers: np.ndarray) -> None:
        """Write NaN for items with a wrong target, 0 for those to be ignored."""
        np.copyto(numbers, np.nan, where=self.wrong)
        np.copyto(numbers, 0, where=self.ignored)


def _item_pieces(folded: Folded, dtype: np.dtype) -> list[Piece]:
    rows, columns = block_extents(folded)
    items = (rows * columns,)
    return [
        ((rows,), INT64),
        ((folded[2],), INT64),
        (items, INT64),
        (items, BOOL),
        (items, BOOL),
        *[(items, dtype)] * 2,
    ]


def _item_blocks(folded: Folded, target: np.ndarray, ignore_index: int, scratch: Arrays) -> Iterator[_Items]:
    """Blocks of logits [outer, classes, inner] with the places of their targets [outer, inner]."""
    _, classes, inner = folded
    row, column, *arrays = scratch
    iota(row)
    row *= classes
    iota(column)
    for rows, columns in blocks(folded) if target.size else ():
        shape = (rows.stop - rows.start, columns.stop - columns.start)
        index, ignored, wrong, number, picked = (x[: shape[0] * shape[1]].reshape(shape) for x in arrays)
        here = target[rows, columns]
        np.clip(here, 0, classes - 1, out=index, casting="unsafe")
        np.not_equal(here, index, out=wrong)
        np.equal(here, ignore_index, out=ignored)
        index += row[: shape[0], None]
        index += rows.start * classes
        index *= inner
        index += column[columns]
        yield _Items(rows, columns, index, ignored, wrong, number, picked)


@dataclass(frozen=True)
class _ItemOp(Op):
    """What cross-entropy and its gradient share: inputs 0 and 1 are logits and target.

    Attributes:
        axis: of the classes, not negative.
        ignore_index: the target of items that do not count.
    """

    axis: int
    ignore_index: int = IGNORE

    def item_type(self, inputs: Types) -> TensorType:
        """The type of the loss: the logits' without the axis of the classes."""
        logits, target = inputs[:2]
        if not 0 <= self.axis < logits.rank or not logits.dtype.is_float:
            raise ShapeError(f"logits {logits} must be floating-point and have an axis {self.axis} of classes")
        items = (*logits.shape[: self.axis], *logits.shape[self.axis + 1 :])
        if target.shape != items or target.dtype.category not in ("int", "uint"):
            raise ShapeError(f"the target of logits {logits} must be integers of shape {list(items)}, and is {target}")
        return logits.with_shape(items)

    def valid_range(self, index: int, inputs: Types) -> tuple[int, ...] | None:
        """Class indices, and `ignore_index`."""
        return (0, inputs[0].shape[self.axis] - 1, self.ignore_index) if index == 1 else None


@register
@dataclass(frozen=True)
class CrossEntropy(_ItemOp):
    """(loss, lse) an item: lse = log Σ exp(logits) along the classes, loss = lse - logits[target].

    The loss is 0 where the target is `ignore_index`, and NaN where it is neither that nor a class.
    """

    name: ClassVar[str] = "cross_entropy"

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """Two tensors of the logits' shape without the classes."""
        return (self.item_type(inputs),) * 2

    def vjp(
        self, b: Builder, inputs: Sequence[Value], outputs: Sequence[Value], cotangents: Sequence[Value | None]
    ) -> Sequence[Value | None]:
        """(softmax - one-hot) · g, recomputed from logits and lse."""
        (logits, target), (_, lse), (g, g_lse) = inputs, outputs, cotangents
        gradient = None
        if g is not None:
            gradient = b.apply(CrossEntropyGrad(self.axis, self.ignore_index), logits, target, lse, g)
        if g_lse is not None:
            kept = (*lse.shape[: self.axis], 1, *lse.shape[self.axis :])
            spread = [reshape(b, x, kept) for x in (lse, g_lse)]
            if gradient is None:
                gradient = elementwise(b, lambda x, s, g: exp(x - s) * g, logits, *spread)
            else:
                gradient = elementwise(b, lambda d, x, s, g: d + exp(x - s) * g, gradient, logits, *spread)
        return [gradient, None]

    def cost(self, inputs: Types, outputs: Types) -> Cost:
        """Maximum, difference, exponential and sum an element of the logits."""
        return Cost(4 * inputs[0].size, sum(type.nbytes for type in (*inputs, *outputs)))

    def workspace(self, inputs: Types, outputs: Types) -> int:
        """One block of logits and a few numbers an item of it."""
        return carve_bytes(*self._pieces(folded_shape(inputs[0].shape, self.axis), inputs[0].dtype.numpy))

    def _pieces(self, folded: Folded, dtype: np.dtype) -> list[Piece]:
        rows, columns = block_extents(folded)
        return [((rows * folded[1] * columns,), dtype), *_item_pieces(folded, dtype)]

    def compute(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray) -> None:
        """In blocks of items, each with all its classes."""
        logits = fold(inputs[0], self.axis)
        folded = folded_shape(inputs[0].shape, self.axis)
        target, loss, lse = (x.reshape(folded[0], folded[2]) for x in (inputs[1], *outputs))
        whole, *scratch = carve(workspace, *self._pieces(folded, logits.dtype))
        flat = logits.reshape(-1)
        for block in _item_blocks(folded, target, self.ignore_index, scratch):
            x = logits[block.rows, :, block.columns]
            high, out = lse[block.rows, block.columns], loss[block.rows, block.columns]
            e = whole[: x.size].reshape(x.shape)
            np.maximum.reduce(x, axis=1, out=high)
            np.subtract(x, high[:, None, :], out=e)
            np.exp(e, out=e)
            np.add.reduce(e, axis=1, out=block.number)
            np.log(block.number, out=block.number)
            # (high - logit) + log Σ exp(x - high): close to 0 without cancellation where the target is the maximum.
            np.take(flat, block.index, out=block.picked, mode="clip")
            np.subtract(high, block.picked, out=out)
            out += block.number
            high += block.number
            block.mark(out)


@register
@dataclass(frozen=True)
class CrossEntropyGrad(_ItemOp):
    """dlogits = (exp(logits - lse) - one-hot(target)) · g from logits, target, lse and g, the last two an item.

    Rows of items to be ignored are 0.
    """

    name: ClassVar[str] = "cross_entropy_grad"

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """The logits' type."""
        item = self.item_type(inputs)
        if inputs[2] != item or inputs[3] != item:
            raise ShapeError(f"lse and cotangent must be {item}, and are {inputs[2]} and {inputs[3]}")
        return (inputs[0],)

    def overwrites(self, inputs: Types, outputs: Types) -> tuple[tuple[int, int], ...]:
        """The gradient takes the logits' bytes."""
        return ((0, 0),)

    def accepts_strides(self, index: int, input: TensorType, strides: tuple[int, ...]) -> bool:
        """The cotangent, which usually is one number for all items."""
        outer, _, inner = folded_shape((*input.shape[: self.axis], 1, *input.shape[self.axis :]), self.axis)
        return index == 3 and can_reshape(input, strides, (outer, inner))

    def cost(self, inputs: Types, outputs: Types) -> Cost:
        """Difference, exponential and product an element."""
        return Cost(3 * inputs[0].size, sum(type.nbytes for type in (*inputs, *outputs)))

    def workspace(self, inputs: Types, outputs: Types) -> int:
        """A few numbers an item of one block."""
        return carve_bytes(*_item_pieces(folded_shape(inputs[0].shape, self.axis), inputs[0].dtype.numpy))

    def compute(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray) -> None:
        """In blocks of items; the target's element is corrected last."""
        logits, out = fold(inputs[0], self.axis), fold(outputs[0], self.axis)
        folded = folded_shape(inputs[0].shape, self.axis)
        target, lse, g = (np.reshape(x, (folded[0], folded[2]), copy=False) for x in inputs[1:])
        flat = out.reshape(-1)
        for block in _item_blocks(
            folded, target, self.ignore_index, carve(workspace, *_item_pieces(folded, out.dtype))
        ):
            d = out[block.rows, :, block.columns]
            np.subtract(logits[block.rows, :, block.columns], lse[block.rows, None, block.columns], out=d)
            np.exp(d, out=d)
            np.copyto(block.number, g[block.rows, block.columns])
            block.mark(block.number)
            d *= block.number[:, None, :]
            np.take(flat, block.index, out=block.picked, mode="clip")
            np.subtract(block.picked, block.number, out=block.picked)
            np.put(flat, block.index, block.picked)


@register
@dataclass(frozen=True)
class LinearCrossEntropy(Op):
    """(loss, dh, dw) of the mean cross-entropy of logits h·wᵀ, without the logits ever being whole.

    Inputs h[rows, depth], w[classes, depth], target[rows]. The loss is the mean over the items whose target is not
    `ignore_index` (0 if there are none), dh and dw are its gradients. Each chunk of rows makes its logits, turns them
    into their gradient in place, and adds its share to dh and dw, so nothing is computed twice.

    Attributes:
        chunk: rows whose logits exist at once, chunk · classes elements of workspace.
        ignore_index: the target of items that do not count.
    """

    name: ClassVar[str] = "linear_cross_entropy"
    chunk: int = 256
    ignore_index: int = IGNORE

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """A scalar, and the types of h and w."""
        h, w, target = inputs
        if h.rank != 2 or w.rank != 2 or h.dtype != w.dtype or not h.dtype.is_float or h.shape[1] != w.shape[1]:
            raise ShapeError(f"needs h[rows, depth] and w[classes, depth] of one element type, and got {h} and {w}")
        if target.shape != h.shape[:1] or target.dtype.category not in ("int", "uint"):
            raise ShapeError(f"the target must be {h.shape[0]} integers, and is {target}")
        if self.chunk < 1:
            raise ShapeError(f"a chunk must have at least one row, and has {self.chunk}")
        return h.with_shape(()), h, w

    def vjp(
        self, b: Builder, inputs: Sequence[Value], outputs: Sequence[Value], cotangents: Sequence[Value | None]
    ) -> Sequence[Value | None]:
        """dh and dw times the loss's cotangent; themselves where that is the constant 1."""
        g, *others = cotangents
        if any(other is not None for other in others):
            raise UnsupportedError("the gradients that linear_cross_entropy returns have no derivative themselves")
        if g is None:
            return [None, None, None]
        if _is_one(g):
            return [outputs[1], outputs[2], None]
        dw = elementwise(b, lambda d, g: d * g, outputs[2], g) if b.wants(inputs[1]) else None
        dh = elementwise(b, lambda d, g: d * g, outputs[1], g) if b.wants(inputs[0]) else None
        return [dh, dw, None]

    def overwrites(self, inputs: Types, outputs: Types) -> tuple[tuple[int, int], ...]:
        """dh takes the bytes of h, a chunk of which is read for the last time before its gradient is written."""
        return ((1, 0),)

    def accepts_strides(self, index: int, input: TensorType, strides: tuple[int, ...]) -> bool:
        """The matrices as BLAS takes them."""
        return index < 2 and MatMul().accepts_strides(index, input, strides)

    def valid_range(self, index: int, inputs: Types) -> tuple[int, ...] | None:
        """Class indices, and `ignore_index`."""
        return (0, inputs[1].shape[0] - 1, self.ignore_index) if index == 2 else None

    def cost(self, inputs: Types, outputs: Types) -> Cost:
        """Three matrix products, and five scalar operations a logit."""
        (rows, depth), classes = inputs[0].shape, inputs[1].shape[0]
        chunks = -(-rows // self.chunk)
        moved = sum(type.nbytes for type in (*inputs, *outputs)) + 3 * max(0, chunks - 1) * inputs[1].nbytes
        return Cost((6 * depth + 5) * rows * classes, moved)

    def workspace(self, inputs: Types, outputs: Types) -> int:
        """The logits of a chunk, a part of a product that is added to dw, and numbers an item."""
        h, w, _ = inputs
        return carve_bytes(*self._pieces(h.shape[0], w.shape, h.dtype.numpy))

    def _pieces(self, rows: int, weights: tuple[int, ...], dtype: np.dtype) -> list[Piece]:
        classes, depth = weights
        chunk = min(self.chunk, rows)
        adds = min(classes, max(64, PRODUCT_BYTES // max(1, depth * dtype.itemsize))) if chunk < rows else 0
        pieces: list[Piece] = [((chunk, classes), dtype), ((adds, depth), dtype), ((chunk, 1), dtype), ((chunk,), BOOL)]
        return pieces + _item_pieces((chunk, classes, 1), dtype)

    def compute(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray) -> None:
        """One chunk of rows after the other."""
        (h, w, target), (loss, dh, dw) = inputs, outputs
        pieces = self._pieces(h.shape[0], w.shape, h.dtype)
        logits, product, losses, counted, *scratch = carve(workspace, *pieces)
        starts = range(0, len(h), self.chunk)
        count = 0
        for start in starts:
            here = target[start : start + self.chunk]
            count += int(np.count_nonzero(np.not_equal(here, self.ignore_index, out=counted[: len(here)])))
        weight, total = 1.0 / max(1, count), 0.0
        if not h.size:
            dw.fill(0)
        for start in starts:
            rows = slice(start, min(len(h), start + self.chunk))
            x = logits[: rows.stop - start]
            np.matmul(h[rows], w.T, out=x)
            self._to_gradient(x, target[rows], weight, losses, scratch)
            total += float(np.add.reduce(losses[: len(x)], axis=None, dtype=np.float64))
            if start == 0:
                np.matmul(x.T, h[rows], out=dw)
            else:
                _add_product(x.T, h[rows], dw, product)
            np.matmul(x, w, out=dh[rows])
        loss[...] = total * weight

    def _to_gradient(
        self, x: np.ndarray, target: np.ndarray, weight: float, losses: np.ndarray, scratch: Arrays
    ) -> None:
        """Turn logits [rows, classes] into the gradient of their mean loss, and write each row's own loss."""
        flat = x.reshape(-1)
        for block in _item_blocks((*x.shape, 1), target[:, None], self.ignore_index, scratch):
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


def cross_entropy(b: Builder, logits: Value, target: Value, axis: int = -1, ignore_index: int = IGNORE) -> Value:
    """The loss of each item: log Σ exp(logits) - logits[target] along an axis; 0 where target is `ignore_index`.

    Args:
        b: where nodes are added.
        logits: floating-point.
        target: integers, the logits' shape without the axis.
        axis: of the classes; negative ones count from the end.
        ignore_index: the target of items that do not count.
    """
    (found,) = normalize_axes(axis, len(logits.shape))
    loss, _ = b.node(CrossEntropy(found, ignore_index), logits, target)
    return loss


def linear_cross_entropy(
    b: Builder, h: Value, w: Value, target: Value, *, ignore_index: int = IGNORE, chunk: int = 256
) -> Value:
    """The mean cross-entropy of logits h·wᵀ, h[rows, depth] and w[classes, depth], in at most 64 MiB of workspace.

    Args:
        b: where nodes are added.
        h: hidden states.
        w: output matrix.
        target: integers [rows].
        ignore_index: the target of items that do not count.
        chunk: rows whose logits exist at once; fewer are taken where their logits would need too much memory.
    """
    fitting = LOGITS_BYTES // max(1, w.shape[0] * w.dtype.itemsize)
    loss, _, _ = b.node(LinearCrossEntropy(max(1, min(chunk, fitting)), ignore_index), h, w, target)
    return loss

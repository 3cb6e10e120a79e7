"""Cross-entropy of logits against class indices, a loss for each item."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from foreplan.base.errors import ShapeError
from foreplan.graph import Builder, DType, Op, TensorType, Value, as_dtype, register
from foreplan.graph.axes import Axes, Factors
from foreplan.graph.op import Arrays, Cotangents, Types, Values
from foreplan.ops.blocks import (
    Folded,
    Piece,
    block_extents,
    blocks,
    can_reshape,
    carve,
    carve_bytes,
    fold,
    folded_shape,
    iota,
)
from foreplan.ops.expr import Expr, call, exp, where
from foreplan.ops.index import one_hot
from foreplan.ops.map import elementwise
from foreplan.ops.pullback import by_parts
from foreplan.ops.reduce import normalize_axes
from foreplan.ops.shape import reshape

IGNORE = -100  # the usual mark of an item without a target
INT64, BOOL = np.dtype(np.int64), np.dtype(np.bool_)


@dataclass(frozen=True)
class Items:
    """The items of one block of logits; arrays are [outer, inner]."""

    rows: slice
    columns: slice
    index: np.ndarray  # of each item's target logit among all logits in C order
    ignored: np.ndarray
    wrong: np.ndarray  # the target is no class, so the loss is NaN (users' targets are checked before a step begins)
    number: np.ndarray  # scratch, a number an item
    picked: np.ndarray  # likewise

    def mark(self, numbers: np.ndarray) -> None:
        """Write NaN for items with a wrong target, 0 for those to be ignored."""
        np.copyto(numbers, np.nan, where=self.wrong)
        np.copyto(numbers, 0, where=self.ignored)


def item_pieces(folded: Folded, dtype: np.dtype) -> list[Piece]:
    """Scratch of `item_blocks`."""
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


def item_blocks(folded: Folded, target: np.ndarray, ignore_index: int, scratch: Arrays) -> Iterator[Items]:
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
        yield Items(rows, columns, index, ignored, wrong, number, picked)


@dataclass(frozen=True)
class _ItemOp(Op):
    """The common part of cross-entropy and its gradient: inputs 0 and 1 are logits and target.

    Attributes:
        axis: of the classes, not negative.
        ignore_index: the target of items that do not count.
    """

    axis: int
    ignore_index: int = IGNORE

    def item_type(self, inputs: Types) -> TensorType:
        """The type of the loss: the logits' without the axis of the classes, wide if they are narrow."""
        logits, target = inputs[:2]
        if not 0 <= self.axis < logits.rank or not logits.dtype.is_float:
            raise ShapeError(f"the logits must be floating-point with an axis {self.axis} of classes, and are {logits}")
        items = (*logits.shape[: self.axis], *logits.shape[self.axis + 1 :])
        if target.shape != items or target.dtype.category not in ("int", "uint"):
            raise ShapeError(f"the target of logits {logits} must be integers of shape {list(items)}, and is {target}")
        if target.size and not logits.shape[self.axis]:
            raise ShapeError(f"the logits need at least one class, and are {logits}")
        return TensorType(logits.dtype.wide, items)

    def valid_range(self, index: int, inputs: Types) -> tuple[int, ...] | None:
        """Class indices, and `ignore_index`."""
        return (0, inputs[0].shape[self.axis] - 1, self.ignore_index) if index == 1 else None


@register
@dataclass(frozen=True)
class CrossEntropy(_ItemOp):
    """(loss, lse) an item: lse = log Σ exp(logits) along the classes, loss = lse - logits[target].

    The loss is 0 if the target is `ignore_index`, and NaN if the target is no class otherwise. Loss and lse are wide if
    the logits are narrow.
    """

    name: ClassVar[str] = "cross_entropy"
    narrow: ClassVar[int] = 1

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """Two tensors of the logits' shape without the classes."""
        self.check_count(inputs, 2)
        return (self.item_type(inputs),) * 2

    def indexing(self, inputs: Types, outputs: Types) -> Axes:
        """Items, each with all of its classes."""
        f = Factors()
        x = f.row("a", inputs[0].shape)
        items = (*x[: self.axis], *x[self.axis + 1 :])
        return f.axes([x, items], [items, items], sums={f"a{self.axis}": "entropies"})

    def vjp(self, b: Builder, inputs: Values, outputs: Values, cotangents: Cotangents) -> Cotangents:
        """(softmax - one-hot) · g, recomputed from logits and lse."""
        (logits, target), (_, lse), (g, g_lse) = inputs, outputs, cotangents
        gradient = None
        if g is not None:
            gradient = b.apply(CrossEntropyGrad(self.axis, self.ignore_index), logits, target, lse, g)
        if g_lse is not None:
            kept = (*lse.shape[: self.axis], 1, *lse.shape[self.axis :])
            spread = [reshape(b, x, kept) for x in (lse, g_lse)]
            if gradient is None:
                gradient = elementwise(b, lambda x, s, g: exp(x - s) * g, logits, *spread, dtype=logits.dtype)
            else:
                of = (gradient, logits, *spread)
                gradient = elementwise(b, lambda d, x, s, g: d + exp(x - s) * g, *of, dtype=logits.dtype)
        return [gradient, None]

    def flops(self, inputs: Types, outputs: Types) -> int:
        """Maximum, difference, exponential and sum an element of the logits."""
        return 4 * inputs[0].size

    def workspace(self, inputs: Types, outputs: Types) -> int:
        """One block of logits and a few numbers an item of it."""
        return carve_bytes(*self._pieces(folded_shape(inputs[0].shape, self.axis), inputs[0].dtype.wide.numpy))

    def _pieces(self, folded: Folded, dtype: np.dtype) -> list[Piece]:
        rows, columns = block_extents(folded)
        return [((rows * folded[1] * columns,), dtype), *item_pieces(folded, dtype)]

    def compute(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray) -> None:
        """In blocks of items, each with all its classes."""
        logits = fold(inputs[0], self.axis)
        folded = folded_shape(inputs[0].shape, self.axis)
        target, loss, lse = (x.reshape(folded[0], folded[2]) for x in (inputs[1], *outputs))
        whole, *scratch = carve(workspace, *self._pieces(folded, lse.dtype))
        flat = logits.reshape(-1)
        for block in item_blocks(folded, target, self.ignore_index, scratch):
            x = logits[block.rows, :, block.columns]
            high, out = lse[block.rows, block.columns], loss[block.rows, block.columns]
            e = whole[: x.size].reshape(x.shape)
            np.maximum.reduce(x, axis=1, out=high)
            np.subtract(x, high[:, None, :], out=e)
            np.exp(e, out=e)
            np.add.reduce(e, axis=1, out=block.number)
            np.log(block.number, out=block.number)
            # (high - logit) + log Σ exp(x - high): close to 0 without cancellation where the target is the maximum.
            _take(flat, block)
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
        self.check_count(inputs, 4)
        item = self.item_type(inputs)
        if inputs[2] != item or inputs[3] != item:
            raise ShapeError(f"lse and cotangent must be {item}, and are {inputs[2]} and {inputs[3]}")
        return (inputs[0],)

    def indexing(self, inputs: Types, outputs: Types) -> Axes:
        """Items, each with all of its classes."""
        f = Factors()
        x = f.row("a", inputs[0].shape)
        items = (*x[: self.axis], *x[self.axis + 1 :])
        return f.axes([x, items, items, items], [x], [f"a{self.axis}"])

    def vjp(self, b: Builder, inputs: Values, outputs: Values, cotangents: Cotangents) -> Cotangents:
        """Of the parts."""
        return by_parts(self, b, inputs, cotangents)

    def overwrites(self, inputs: Types, outputs: Types) -> tuple[tuple[int, int], ...]:
        """The gradient takes the logits' bytes."""
        return ((0, 0),)

    def accepts_strides(self, index: int, input: TensorType, strides: tuple[int, ...]) -> bool:
        """The cotangent, which usually is one number for all items."""
        outer, _, inner = folded_shape((*input.shape[: self.axis], 1, *input.shape[self.axis :]), self.axis)
        return index == 3 and can_reshape(input, strides, (outer, inner))

    def flops(self, inputs: Types, outputs: Types) -> int:
        """Difference, exponential and product an element."""
        return 3 * inputs[0].size

    def workspace(self, inputs: Types, outputs: Types) -> int:
        """A few numbers an item of one block, and the block if it is rounded at the end."""
        return carve_bytes(*self._pieces(folded_shape(inputs[0].shape, self.axis), inputs[0].dtype))

    def _pieces(self, folded: Folded, dtype: DType) -> list[Piece]:
        rows, columns = block_extents(folded)
        block = rows * folded[1] * columns if dtype.is_narrow else 0
        return [*item_pieces(folded, dtype.wide.numpy), ((block,), dtype.wide.numpy)]

    def compute(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray) -> None:
        """In blocks of items; the target's element is corrected last."""
        logits, out = fold(inputs[0], self.axis), fold(outputs[0], self.axis)
        folded = folded_shape(inputs[0].shape, self.axis)
        target, lse, g = (np.reshape(x, (folded[0], folded[2]), copy=False) for x in inputs[1:])
        flat = out.reshape(-1)
        *scratch, whole = carve(workspace, *self._pieces(folded, as_dtype(out.dtype)))
        for block in item_blocks(folded, target, self.ignore_index, scratch):
            result = out[block.rows, :, block.columns]
            d = whole[: result.size].reshape(result.shape) if whole.size else result
            np.subtract(logits[block.rows, :, block.columns], lse[block.rows, None, block.columns], out=d)
            np.exp(d, out=d)
            np.copyto(block.number, g[block.rows, block.columns])
            block.mark(block.number)
            d *= block.number[:, None, :]
            if whole.size:  # the target's element is computed by itself, before the logits may be overwritten
                _take(logits.reshape(-1), block)
                np.subtract(block.picked, lse[block.rows, block.columns], out=block.picked)
                np.exp(block.picked, out=block.picked)
                np.multiply(block.picked, block.number, out=block.picked)
                np.copyto(result, d, casting="unsafe")
            else:
                _take(flat, block)
            np.subtract(block.picked, block.number, out=block.picked)
            np.put(flat, block.index, block.picked)

    def decompose(self, b: Builder, inputs: Values) -> Values:
        """Maps of the logits and of a one-hot target."""
        logits, target, lse, g = inputs
        kept = (*lse.shape[: self.axis], 1, *lse.shape[self.axis :])
        classes = logits.shape[self.axis]

        def count(target: Expr) -> Expr:
            there = call("and", target >= 0, target < classes)
            return where(call("eq", target, self.ignore_index), 0.0, where(there, 1.0, math.nan))

        counts = elementwise(b, count, target, dtype=g.dtype)
        hot = one_hot(b, target, classes, self.axis, lse.dtype)
        items = [reshape(b, x, kept) for x in (lse, g, counts)]
        return [elementwise(b, lambda x, h, s, g, n: (exp(x - s) - h) * g * n, logits, hot, *items, dtype=logits.dtype)]


def _take(flat: np.ndarray, block: Items) -> None:
    """Copy each item's target element, counted in C order over all, to `picked`."""
    if flat.dtype == block.picked.dtype:
        np.take(flat, block.index, out=block.picked, mode="clip")
    else:
        np.copyto(block.picked, np.take(flat, block.index, mode="clip"))


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

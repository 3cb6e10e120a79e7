"""Cross-entropy fused with the matrix that makes the logits, a chunk of rows at a time: products, rows, products."""

from __future__ import annotations

from dataclasses import dataclass

from foreplan.gpu.device import Device
from foreplan.gpu.expressions import stored
from foreplan.gpu.launch import (
    Address,
    Defines,
    Instruction,
    Launch,
    LaunchKernel,
    Refused,
    Scratch,
    Source,
    Windows,
    Word,
    input_at,
    launch,
    output_at,
)
from foreplan.gpu.map import Tensor, map_launches
from foreplan.gpu.product import Plain, Product, product_launch
from foreplan.gpu.reduce import Axis, Terms, reduction
from foreplan.gpu.rows import Rows, teams
from foreplan.graph import DType, Op, Window
from foreplan.graph.layouts import lie_alike
from foreplan.ops.expr import Arg
from foreplan.ops.linear_cross_entropy import LinearCrossEntropy

THREADS = 256


@dataclass(frozen=True)
class _Chunk:
    """Some rows of the work.

    Attributes:
        first: of the rows.
        count: of rows.
        logits: where they are made, [count, classes] of the wide type.
    """

    first: int
    count: int
    logits: Address


@dataclass(frozen=True)
class _Work:
    """The tensors, and where their parts lie."""

    op: LinearCrossEntropy
    inputs: tuple[Window, ...]
    outputs: tuple[Window, ...]
    losses: Address
    weight: Address
    dw: Address
    dbias: Address

    @property
    def wide(self) -> DType:
        """The type of logits and sums."""
        return self.inputs[0].type.dtype.wide

    @property
    def extents(self) -> tuple[int, int, int]:
        """Rows, depth, classes."""
        (rows, depth), classes = self.inputs[0].shape, self.inputs[1].shape[0]
        return rows, depth, classes

    def rows(self, entry: str, first: int, count: int, logits: Address) -> Launch:
        """A launch of cuda/linear_cross_entropy.cu."""
        _, _, classes = self.extents
        item, target = self.wide.itemsize, self.inputs[2].type.dtype
        rows, work = Rows(logits, item, (Axis(count, classes * item),)), teams(count, classes, self.wide, True)
        defines: Defines = (
            ("ELEMENT", stored(self.wide)),
            ("TARGET", stored(target)),
            ("MEAN", int(self.op.mean)),
            *work.defines(1),
        )
        words: list[Word] = [count, classes, self.op.ignore_index, *rows.words(1)]
        words += [input_at(2, first * target.itemsize), _behind(self.losses, first * item), self.weight]
        blocks = 1 if entry == "weight_of_items" else work.blocks
        return launch(Source("linear_cross_entropy.cu", defines), entry, blocks, THREADS, words)

    def logits(self, chunk: _Chunk) -> Launch:
        """Rows of h times w, and the bias."""
        _, depth, classes = self.extents
        h, w, _, *bias = self.inputs
        item = self.wide.itemsize
        added = None
        if bias:
            step = bias[0].strides[0]
            added = Plain(input_at(3), bias[0].type.dtype, (Axis(1, 0),), (Axis(classes, step),))
        return product_launch(
            Product(
                rows=chunk.count,
                columns=classes,
                terms=depth,
                a=_matrix(input_at(0, chunk.first * h.strides[0]), h, chunk.count),
                b=_matrix(input_at(1), w, classes),
                results=Plain(chunk.logits, self.wide, (Axis(chunk.count, classes * item),), (Axis(classes, item),)),
                added=added,
                batch=(),
                nbytes=chunk.count * classes * item,
            )
        )

    def of_weights(self, chunk: _Chunk, dtype: DType) -> Launch:
        """The chunk's share of dw, of an element type, added to those before."""
        _, depth, classes = self.extents
        h, item = self.inputs[0], self.wide.itemsize
        step = dtype.itemsize
        results = Plain(self.dw, dtype, (Axis(classes, depth * step),), (Axis(depth, step),))
        return product_launch(
            Product(
                rows=classes,
                columns=depth,
                terms=chunk.count,
                a=Plain(chunk.logits, self.wide, (Axis(classes, item),), (Axis(chunk.count, classes * item),)),
                b=_turned(input_at(0, chunk.first * h.strides[0]), h, chunk.count),
                results=results,
                added=results if chunk.first else None,
                batch=(),
                nbytes=classes * depth * step,
            )
        )

    def of_rows(self, chunk: _Chunk) -> Launch:
        """The chunk's rows of dh."""
        _, depth, classes = self.extents
        w, dh, item = self.inputs[1], self.outputs[1], self.wide.itemsize
        return product_launch(
            Product(
                rows=chunk.count,
                columns=depth,
                terms=classes,
                a=Plain(chunk.logits, self.wide, (Axis(chunk.count, classes * item),), (Axis(classes, item),)),
                b=_turned(input_at(1), w, classes),
                results=_matrix(output_at(1, chunk.first * dh.strides[0]), dh, chunk.count),
                added=None,
                batch=(),
                nbytes=chunk.count * depth * dh.type.dtype.itemsize,
            )
        )


def linear_cross_entropy(op: Op, inputs: Windows, outputs: Windows, device: Device) -> LaunchKernel:
    """Four launches a chunk, or five with a bias; then what chunks have is added up."""
    assert isinstance(op, LinearCrossEntropy)
    h, w = inputs[:2]
    rows, classes, wide = h.shape[0], w.shape[0], h.type.dtype.wide
    if not h.type.size or not w.type.size:
        raise Refused("nothing to multiply")
    chunks, scratch, biased = range(0, rows, op.chunk), Scratch(), len(inputs) > 3
    logits = scratch.take(min(op.chunk, rows) * classes * wide.itemsize)
    losses, weight = scratch.take(rows * wide.itemsize), scratch.take(wide.itemsize)
    dbias = scratch.take(len(chunks) * classes * wide.itemsize) if biased else weight
    dw, narrow = output_at(2), outputs[2].type.dtype != wide
    if narrow:
        dw = scratch.take(w.type.size * wide.itemsize)
    work = _Work(op, tuple(inputs), tuple(outputs), losses, weight, dw, dbias)
    found: list[Instruction] = [work.rows("weight_of_items", 0, rows, logits)]
    row = classes * wide.itemsize
    for i, first in enumerate(chunks):
        chunk = _Chunk(first, min(op.chunk, rows - first), logits)
        found += [work.logits(chunk), work.rows("logits_to_gradient", first, chunk.count, logits)]
        found.append(work.of_weights(chunk, wide))
        if biased:
            terms = Terms(logits, wide, (Axis(classes, wide.itemsize),), (Axis(chunk.count, row),))
            found.append(reduction("sum", terms, _behind(dbias, i * row), wide, 1, None))
        found.append(work.of_rows(chunk))
    if biased:
        terms = Terms(dbias, wide, (Axis(classes, wide.itemsize),), (Axis(len(chunks), row),))
        found.append(reduction("sum", terms, output_at(3), outputs[3].type.dtype, 1, None))
    if narrow:
        made, y = Tensor(dw, wide, Window.dense(w.type.with_dtype(wide)).strides), outputs[2]
        found += map_launches([Arg(0)], y.shape, [made], [Tensor(output_at(2), y.type.dtype, y.strides)])
    total = Terms(losses, wide, (Axis(1, 0),), (Axis(rows, wide.itemsize),))
    found.append(reduction("sum", total, output_at(0), outputs[0].type.dtype, 1, None))
    overwrites = ((1, 0),) if lie_alike(h, outputs[1]) else ()
    return LaunchKernel(tuple(found), scratch.nbytes, overwrites)


def _behind(start: Address, nbytes: int) -> Address:
    return Address(start.of, start.index, start.offset + nbytes)


def _matrix(start: Address, x: Window, rows: int) -> Plain:
    """Rows along the result, columns along the sum or the result's columns."""
    return Plain(start, x.type.dtype, (Axis(rows, x.strides[0]),), (Axis(x.shape[1], x.strides[1]),))


def _turned(start: Address, x: Window, rows: int) -> Plain:
    """Columns along the result, rows along the sum."""
    return Plain(start, x.type.dtype, (Axis(x.shape[1], x.strides[1]),), (Axis(rows, x.strides[0]),))


def reads(op: Op, index: int, window: Window) -> Window:
    """As it lies; targets in C order."""
    return Window.dense(window.type) if index == 2 else window

"""Cross-entropy fused with the matrix that makes the logits, a chunk of rows at a time: products, rows, products."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from foreplan.base.units import align_up
from foreplan.graph import DType, Op, Window
from foreplan.graph.layouts import lie_alike
from foreplan.graph.op import Windows
from foreplan.ops.expr import Arg, parse_expr
from foreplan.ops.linear_cross_entropy import LinearCrossEntropy
from foreplan.runtime.cuda.device import Device
from foreplan.runtime.cuda.kernels import lt
from foreplan.runtime.cuda.kernels.map import Tensor, broadcast, map_launches
from foreplan.runtime.cuda.kernels.multiply import Operands, calls_of, turned
from foreplan.runtime.cuda.kernels.product import Plain, Product, product_launch
from foreplan.runtime.cuda.kernels.reduce import Axis, Terms, reduction
from foreplan.runtime.cuda.kernels.rows import Rows, teams
from foreplan.runtime.cuda.launch import (
    Address,
    Defines,
    Instruction,
    Launch,
    LaunchKernel,
    Multiply,
    Scratch,
    Word,
    input_at,
    launch,
    output_at,
)
from foreplan.runtime.kernel import Refused

PITCH = 128  # elements: rows for libraries begin at multiples of this
# If rows are no multiple of 16 bytes and there are at least LEAST_CLASSES classes, libraries multiply a multiple of
# TOGETHER classes, and then the last few: sums over these are rounded before the others are added.
TOGETHER, LEAST_CLASSES = 64, 1024
MOST_CHUNKS = 4  # a chunk is doubled so often for cuBLASLt, whose products of few rows leave a card idle


@dataclass(frozen=True)
class _Rows:
    """Logits of a chunk, or their gradient: a row for each of its items, `step` bytes from one to the next."""

    start: Address
    dtype: DType
    step: int

    def tensor(self) -> Tensor:
        return Tensor(self.start, self.dtype, (self.step, self.dtype.itemsize))

    def words(self, count: int) -> list[Word]:
        """As a kernel takes them."""
        return Rows(self.start, self.dtype.itemsize, (Axis(count, self.step),)).words(1)


@dataclass(frozen=True)
class _Work:
    """The tensors, and where their parts lie.

    Attributes:
        chunk: rows at a time.
        logits: of a chunk.
        gradient: of the logits, which lies in their place if it is of their type.
        losses: of the items, weighted; `weight` of each of them.
        dw: the gradient of w of the wide type, the output itself if that is wide, and nothing if it is not wanted.
        dbias: the bias's gradient of each chunk.
        library: whether a library makes the products; a launch of its own then adds the bias.
    """

    op: LinearCrossEntropy
    inputs: tuple[Window, ...]
    outputs: tuple[Window, ...]
    chunk: int
    logits: _Rows
    gradient: _Rows
    losses: Address
    weight: Address
    dw: Address
    dbias: Address
    library: bool

    @property
    def wide(self) -> DType:
        """The type of sums, and of all that a kernel of ours computes."""
        return self.inputs[0].type.dtype.wide

    @property
    def extents(self) -> tuple[int, int, int]:
        """Rows, depth, classes."""
        (rows, depth), classes = self.inputs[0].shape, self.inputs[1].shape[0]
        return rows, depth, classes

    @property
    def parts(self) -> list[tuple[int, int]]:
        """The first class and the number of classes of each product. On an H100, cuBLASLt multiplied 50,257 classes of
        bfloat16 at a sixth of the speed of 50,240.
        """
        classes = self.extents[2]
        whole = classes // TOGETHER * TOGETHER
        if not self.library or classes < LEAST_CLASSES or classes * self.inputs[0].type.dtype.itemsize % 16 == 0:
            return [(0, classes)]
        return [(0, whole), (whole, classes - whole)]

    def instructions(self) -> Iterator[Instruction | Operands]:
        """All work in order; products are given as their operands."""
        rows, _, classes = self.extents
        wide, item, biased = self.wide, self.wide.itemsize, len(self.outputs) > 3
        row, firsts = classes * item, range(0, rows, self.chunk)
        yield self._rows("weight_of_items", 0, rows)
        for i, first in enumerate(firsts):
            count = min(self.chunk, rows - first)
            yield from self._logits(first, count)
            yield self._rows("logits_to_gradient", first, count)
            if not self.op.frozen:
                yield from self._of_weights(first, count)
            if biased:
                g = self.gradient
                terms = Terms(g.start, g.dtype, (Axis(classes, g.dtype.itemsize),), (Axis(count, g.step),))
                yield reduction("sum", terms, self.dbias.behind(i * row), wide, 1, None)
            yield from self._of_rows(first, count)
        if biased:
            terms = Terms(self.dbias, wide, (Axis(classes, item),), (Axis(len(firsts), row),))
            yield reduction("sum", terms, output_at(3), self.outputs[3].type.dtype, 1, None)
        for y in self.outputs[2:3]:
            if y.type.dtype != wide:
                made = Tensor(self.dw, wide, Window.dense(y.type.with_dtype(wide)).strides)
                yield from map_launches([Arg(0)], y.shape, [made], [Tensor(output_at(2), y.type.dtype, y.strides)])
        total = Terms(self.losses, wide, (Axis(1, 0),), (Axis(rows, item),))
        yield reduction("sum", total, output_at(0), self.outputs[0].type.dtype, 1, None)

    def _rows(self, entry: str, first: int, count: int) -> Launch:
        """A launch of cuda/linear_cross_entropy.cu."""
        _, _, classes = self.extents
        item, target = self.wide.itemsize, self.inputs[2].type.dtype
        work = teams(count, classes, self.logits.dtype, True)
        defines: Defines = (
            ("ELEMENT", self.logits.dtype),
            ("GRADIENT", self.gradient.dtype),
            ("TARGET", target),
            ("MEAN", int(self.op.mean)),
            *work.defines(1),
        )
        words: list[Word] = [count, classes, self.op.ignore_index]
        words += [*self.logits.words(count), *self.gradient.words(count)]
        words += [input_at(2, first * target.itemsize), self.losses.behind(first * item), self.weight]
        blocks = 1 if entry == "weight_of_items" else work.blocks
        return launch("linear_cross_entropy.cu", entry, blocks, words, defines)

    def _logits(self, first: int, count: int) -> Iterator[Instruction | Operands]:
        """Rows of h times w, and the bias."""
        _, depth, classes = self.extents
        h, w, _, *bias = self.inputs
        a, b = broadcast(input_at(0, first * h.strides[0]), h, h.shape), turned(broadcast(input_at(1), w, w.shape))
        logits = self.logits.tensor()
        added = Tensor(input_at(3), bias[0].type.dtype, (0, bias[0].strides[0])) if bias else None
        for begin, some in self.parts:
            c = None if self.library or added is None else _columns(added, begin)
            yield Operands((count, some), depth, a, _columns(b, begin), c, _columns(logits, begin))
        if added and self.library:
            yield from map_launches([parse_expr("(a0 + a1)")], (count, classes), [logits, added], [logits])

    def _of_weights(self, first: int, count: int) -> Iterator[Operands]:
        """The chunk's share of dw, added to those before."""
        _, depth, _ = self.extents
        h, item = self.inputs[0], self.wide.itemsize
        b = broadcast(input_at(0, first * h.strides[0]), h, h.shape)
        for begin, some in self.parts:
            dw = Tensor(self.dw.behind(begin * depth * item), self.wide, (depth * item, item))
            a = turned(_columns(self.gradient.tensor(), begin))
            yield Operands((some, depth), count, a, b, dw if first else None, dw)

    def _of_rows(self, first: int, count: int) -> Iterator[Operands]:
        """The chunk's rows of dh: the sums over the fewest classes first, so that the others are rounded once."""
        _, depth, _ = self.extents
        w, dh = self.inputs[1], self.outputs[1]
        d = broadcast(output_at(1, first * dh.strides[0]), dh, dh.shape)
        c = None
        for begin, some in reversed(self.parts):
            a, b = _columns(self.gradient.tensor(), begin), broadcast(input_at(1, begin * w.strides[0]), w, w.shape)
            yield Operands((count, depth), some, a, b, c, d)
            c = d


def _columns(x: Tensor, begin: int) -> Tensor:
    """A matrix from some column on."""
    return replace(x, start=x.start.behind(begin * x.strides[-1]))


def linear_cross_entropy(op: Op, inputs: Windows, outputs: Windows, device: Device) -> LaunchKernel:
    """Four launches a chunk, or five with a bias; then what chunks have is added up."""
    assert isinstance(op, LinearCrossEntropy)
    scratch = Scratch()
    found = _work(op, inputs, outputs, op.chunk, scratch, library=False).instructions()
    made = tuple(_launched(each) if isinstance(each, Operands) else each for each in found)
    return LaunchKernel(made, scratch.nbytes, _in_place(inputs, outputs))


def lt_kernels(
    op: Op, inputs: Windows, outputs: Windows, device: Device, *, tf32: bool = False
) -> Mapping[str, LaunchKernel]:
    """With products by cuBLASLt, of the op's chunks and of larger ones, by name; none where it has no words for them.

    For narrow tensors, logits without a bias are rounded to their type, like those of a separate product, and so is the
    gradient of all logits before its products.
    """
    if not isinstance(op, LinearCrossEntropy):
        return {}
    found: dict[str, LaunchKernel] = {}
    chunk = op.chunk
    for _ in range(MOST_CHUNKS):
        try:
            rounded, kernel = _with_library(op, inputs, outputs, chunk, device, tf32)
        except Refused:
            return {}
        found[f"{lt.CUBLASLT}{' tf32' * rounded} {chunk}"] = kernel
        chunk *= 2
        if chunk >= 2 * inputs[0].shape[0]:
            break
    return found


def _with_library(
    op: LinearCrossEntropy, inputs: Windows, outputs: Windows, chunk: int, device: Device, tf32: bool
) -> tuple[bool, LaunchKernel]:
    """Whether factors are rounded to TensorFloat-32, and the kernel that takes `chunk` rows at a time."""
    scratch = Scratch()
    work = _work(op, inputs, outputs, chunk, scratch, library=True)
    found: list[Instruction] = []
    for each in work.instructions():
        found += calls_of(each, device, tf32) if isinstance(each, Operands) else [each]
    calls = [each for each in found if isinstance(each, Multiply)]
    planned = {call: lt.planned(call, device) for call in calls}
    room = max(nbytes for nbytes, _ in planned.values())
    at = scratch.take(room)
    made = tuple(
        replace(each, workspace=at, nbytes=planned[each][0]) if isinstance(each, Multiply) else each for each in found
    )
    rows, _, classes = work.extents
    # The logits are read twice and their gradient is written; the bias is added in one more pass.
    item = work.logits.dtype.itemsize
    passes = 2 * item + work.gradient.dtype.itemsize + 2 * item * (len(inputs) > 3)
    products = sum(planned[call][1] for call in calls)
    price = round(products + rows * classes * passes / device.bytes_per_second * 1e9)
    kernel = LaunchKernel(made, scratch.nbytes, _in_place(inputs, outputs), nanoseconds=price)
    return any(call.tf32 for call in calls), kernel


def _work(
    op: LinearCrossEntropy, inputs: Windows, outputs: Windows, chunk: int, scratch: Scratch, *, library: bool
) -> _Work:
    """Where everything lies.

    Args:
        library: a library makes the products: rows begin at its alignment, and factors are of one type.
    """
    h, w = inputs[:2]
    rows, classes, wide = h.shape[0], w.shape[0], h.type.dtype.wide
    if not h.type.size or not w.type.size:
        raise Refused("nothing to multiply")
    count, biased = min(chunk, rows), len(inputs) > 3
    pitch = align_up(classes, PITCH) if library else classes

    def taken(dtype: DType) -> _Rows:
        return _Rows(scratch.take(count * pitch * dtype.itemsize), dtype, pitch * dtype.itemsize)

    gradient = taken(h.type.dtype if library else wide)
    # Narrow logits are rounded once: with a bias, which a pass of its own adds, they are wide before it.
    logits = taken(wide) if biased and gradient.dtype != wide else gradient
    losses, weight = scratch.take(rows * wide.itemsize), scratch.take(wide.itemsize)
    summed = biased and not op.frozen
    dbias = scratch.take(len(range(0, rows, chunk)) * classes * wide.itemsize) if summed else weight
    is_output = op.frozen or outputs[2].type.dtype == wide
    dw = output_at(2) if is_output else scratch.take(w.type.size * wide.itemsize)
    given = (tuple(inputs), tuple(outputs), chunk, logits, gradient, losses, weight, dw, dbias)
    return _Work(op, *given, library=library)


def _launched(operands: Operands) -> Launch:
    """A product by foreplan's own kernel."""
    a, b, c, d = operands.a, operands.b, operands.c, operands.d
    (m, n), k = operands.shape, operands.terms

    def result(x: Tensor) -> Plain:
        return Plain(x.start, x.dtype, (Axis(m, x.strides[0]),), (Axis(n, x.strides[1]),))

    return product_launch(
        Product(
            rows=m,
            columns=n,
            terms=k,
            a=Plain(a.start, a.dtype, (Axis(m, a.strides[0]),), (Axis(k, a.strides[1]),)),
            b=Plain(b.start, b.dtype, (Axis(n, b.strides[1]),), (Axis(k, b.strides[0]),)),
            results=result(d),
            added=None if c is None else result(c),
            batch=(),
            nbytes=m * n * d.dtype.itemsize,
        )
    )


def _in_place(inputs: Windows, outputs: Windows) -> tuple[tuple[int, int], ...]:
    return ((1, 0),) if lie_alike(inputs[0], outputs[1]) else ()


def reads(op: Op, index: int, window: Window) -> Window:
    """As it lies; targets in C order."""
    return Window.dense(window.type) if index == 2 else window

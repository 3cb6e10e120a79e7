"""Matrix products as calls of cuBLASLt, for layouts that BLAS can describe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

from foreplan.graph import Op, Window
from foreplan.graph.op import Windows
from foreplan.graph.types import Shape
from foreplan.ops.map import merged_axes
from foreplan.ops.matmul import MatMul
from foreplan.ops.matmul_map import MatMulMap
from foreplan.runtime.cuda.device import Device
from foreplan.runtime.cuda.kernels.biased import terms_of
from foreplan.runtime.cuda.kernels.map import Tensor, broadcast
from foreplan.runtime.cuda.launch import Address, Instruction, Matrix, Multiply, input_at, output_at, workspace_at
from foreplan.runtime.kernel import Refused

MOST_CALLS = 16  # of one op
Axis = tuple[int, tuple[int, ...]]  # extent, and bytes from one to the next in a, b, c and d


@dataclass(frozen=True)
class _Side:
    """A matrix of a product: near and far, its axes as the rows and columns of BLAS's op(matrix).

    Attributes:
        index: which of the operands a, b, c and d.
        near, far: extents.
        near_step, far_step: bytes.
    """

    index: int
    tensor: Tensor
    near: int
    far: int
    near_step: int
    far_step: int

    def lying(self, turned: bool, batch: Axis, place: Sequence[tuple[int, Axis]]) -> Matrix | None:
        """The matrix at a place of the outer batch axes, if it or its transpose lies column by column."""
        item, steps = self.tensor.dtype.itemsize, batch[1]
        rows, columns, row, column = self.near, self.far, self.near_step, self.far_step
        if turned:
            rows, columns, row, column = columns, rows, column, row
        side_by_side = rows == 1 or row == item
        apart = columns == 1 or (column >= rows * item and column % item == 0)
        if not side_by_side or not apart:
            return None
        if steps[self.index] < 0 or steps[self.index] % item:
            raise Refused("matrices of a batch that lie backwards")
        leading = column // item if columns > 1 else rows
        offset = sum(i * axis[1][self.index] for i, axis in place)
        start = self.tensor.start.behind(offset)
        return Matrix(start, self.tensor.dtype, rows, columns, leading, steps[self.index] // item)


@dataclass(frozen=True)
class Operands:
    """A product's tensors: d[…, m, n] = Σ a[…, m, k] · b[…, k, n] + c[…, m, n], each with strides along these axes.

    Attributes:
        shape: […, m, n].
        terms: k.
        c: None without a summand.
    """

    shape: Shape
    terms: int
    a: Tensor
    b: Tensor
    c: Tensor | None
    d: Tensor


@dataclass(frozen=True)
class Work:
    """Calls of cuBLASLt, and the instructions before and after them.

    Attributes:
        nbytes: of workspace for these instructions.
        moved: bytes that they read and write.
    """

    calls: tuple[Multiply, ...]
    before: tuple[Instruction, ...] = ()
    after: tuple[Instruction, ...] = ()
    nbytes: int = 0
    moved: int = 0


def multiplications(op: Op, inputs: Windows, outputs: Windows, device: Device, tf32: bool) -> tuple[Multiply, ...]:
    """A product as cuBLASLt's calls, without scratch memory: one for each place of the batch axes but one.

    In BLAS the elements of a column lie side by side; in a result in C order, those of a row. So BLAS computes the
    transposed result, b's transpose times a's: its a is this b.

    Args:
        op: MatMul, or one with a bias.
        tf32: whether float32 may be rounded to TensorFloat-32, where the card does that.

    Raises:
        Refused: BLAS cannot describe it.
    """
    if isinstance(op, MatMul):
        return calls_of(_of_matrices(op, inputs, outputs), device, tf32)
    if isinstance(op, MatMulMap):
        return _with_bias(op, inputs, outputs, device, tf32)
    raise Refused(f"{op.name} is no matrix product")


def _with_bias(op: MatMulMap, inputs: Windows, outputs: Windows, device: Device, tf32: bool) -> tuple[Multiply, ...]:
    """A product with a bias, which lies where `bias_of` puts it, and perhaps with a further summand."""
    terms = terms_of(op, inputs, outputs)
    plain = _of_matrices(op.matmul, inputs[:2], outputs)
    c = None
    if terms.added is not None:
        c = broadcast(input_at(terms.added), inputs[terms.added], outputs[0].shape)
    calls = calls_of(replace(plain, c=c), device, tf32)
    if len(calls) > 1 or calls[0].batch > 1:
        raise Refused("several products with a bias")
    return (replace(calls[0], bias=workspace_at()),)


def product_at(
    op: MatMulMap, inputs: Windows, product: Window, start: Address, device: Device, tf32: bool
) -> tuple[Multiply, ...]:
    """Only the product, written to a given place.

    Raises:
        Refused: there are no words for it.
    """
    plain = _of_matrices(op.matmul, inputs[:2], [product])
    return calls_of(replace(plain, d=replace(plain.d, start=start)), device, tf32)


def calls_of(operands: Operands, device: Device, tf32: bool) -> tuple[Multiply, ...]:
    """As `multiplications`, of a product that is described by its operands.

    Raises:
        Refused: there are no words for it.
    """
    a, b, c, d = operands.a, operands.b, operands.c or operands.d, operands.d
    dtype, peaks = a.dtype, dict(device.peaks)
    if dtype.name not in ("float32", "bfloat16", "float16") or dtype.name not in peaks or b.dtype != dtype:
        raise Refused(f"a product of {dtype} and {b.dtype} on {device.title}")
    if c.dtype != d.dtype or d.dtype not in (dtype, dtype.wide):
        raise Refused(f"{c.dtype} that is added to a product of {dtype} in {d.dtype}")
    n, terms = operands.shape[-1], operands.terms
    (m, row), batch = _rows_and_batch(operands.shape, (a, b, c, d))
    if not prod(operands.shape) or not terms or max(m, n, terms, batch[-1][0]) >= 1 << 31:
        raise Refused(f"a product of {m} x {n} x {terms}")
    sides = (
        _Side(1, b, n, terms, b.strides[-1], b.strides[-2]),
        _Side(0, a, terms, m, a.strides[-1], row[0]),
        _Side(2, c, n, m, c.strides[-1], row[2]),
        _Side(3, d, n, m, d.strides[-1], row[3]),
    )
    rounded = tf32 and dtype.name == "float32" and "tensorfloat32" in peaks
    return tuple(_calls(sides, batch, operands.c is not None, rounded))


def _of_matrices(op: MatMul, inputs: Windows, outputs: Windows) -> Operands:
    (y,) = outputs
    shapes = [*((*y.shape[:-2], *x.shape[-2:]) for x in inputs[:2]), y.shape]
    a, b, *added = (broadcast(input_at(i), x, shape) for i, (x, shape) in enumerate(zip(inputs, shapes)))
    terms = inputs[0].shape[-2 if op.transpose_a else -1]
    a, b = (turned(x) if turn else x for x, turn in ((a, op.transpose_a), (b, op.transpose_b)))
    return Operands(y.shape, terms, a, b, added[0] if added else None, broadcast(output_at(0), y, y.shape))


def turned(x: Tensor) -> Tensor:
    """The last two axes of a tensor exchanged."""
    *lead, row, column = x.strides
    return replace(x, strides=(*lead, column, row))


def _rows_and_batch(shape: Sequence[int], operands: Sequence[Tensor]) -> tuple[Axis, list[Axis]]:
    """The axis of rows, and those of the batch, the longest last. If all share b, every axis is one of rows: neighbours
    are merged, and the longest counts, if whole rows lie side by side.
    """
    lead, strides = tuple(shape[:-2]), [x.strides for x in operands]
    batch = merged_axes(lead, [steps[:-2] for steps in strides])
    lines = [steps[-2] for steps in strides]
    lines[1] = 0  # b has none of the rows
    if all(steps[1] == 0 for _, steps in batch):
        axes = merged_axes((*lead, shape[-2]), [(*steps[:-2], line) for steps, line in zip(strides, lines)])
        rows = axes[-1]
        if all(x.strides[-1] == x.dtype.itemsize for x in (operands[0], operands[3])):  # rows may lie anyhow
            rows = max(axes, key=lambda axis: axis[0])
        others = [axis for axis in axes if axis is not rows]
        if not others or all(rows[1][i] for i in (0, 2, 3)):
            return rows, sorted(others or [(1, (0, 0, 0, 0))], key=lambda axis: axis[0])
    return (shape[-2], tuple(lines)), sorted(batch, key=lambda axis: axis[0])


def _calls(sides: Sequence[_Side], batch: Sequence[Axis], adds: bool, tf32: bool) -> Iterator[Multiply]:
    *outer, inner = batch
    if prod(extent for extent, _ in outer) > MOST_CALLS:
        raise Refused(f"a batch of {[extent for extent, _ in batch]} matrices that lie far apart")
    for place in product(*(range(extent) for extent, _ in outer)):
        at = list(zip(place, outer))
        plain = [side.lying(False, inner, at) for side in sides]
        turned = [plain[i] or sides[i].lying(True, inner, at) for i in (0, 1)]
        a, b, c, d = *turned, plain[2], plain[3]
        if a is None or b is None or c is None or d is None:
            raise Refused("matrices whose elements do not lie side by side")
        yield Multiply(
            a=a,
            b=b,
            c=c,
            d=d,
            transpose_a=plain[0] is None,
            transpose_b=plain[1] is None,
            adds=adds,
            batch=inner[0],
            tf32=tf32,
            workspace=workspace_at(),
            nbytes=0,
        )

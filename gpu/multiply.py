"""Matrix products as calls of cuBLASLt: what lies so that BLAS has words for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from foreplan.gpu.device import Device
from foreplan.gpu.launch import (
    Address,
    Matrix,
    Multiply,
    Refused,
    Windows,
    input_at,
    output_at,
    workspace_at,
)
from foreplan.gpu.map import Tensor, broadcast
from foreplan.graph import Op
from foreplan.ops.map import merged_axes
from foreplan.ops.matmul import MatMul

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
        """The matrix at a place of the outer batch axes, if it or what it is turned into lies column by column."""
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
        start = Address(self.tensor.start.of, self.tensor.start.index, self.tensor.start.offset + offset)
        return Matrix(start, self.tensor.dtype, rows, columns, leading, steps[self.index] // item)


def multiplications(op: Op, inputs: Windows, outputs: Windows, device: Device, tf32: bool) -> tuple[Multiply, ...]:
    """A product as cuBLASLt's calls, without scratch memory: one for each place of the batch axes but one.

    BLAS has the elements of a column side by side, and a result in C order has those of a row: what it is asked for is
    the result turned around, b's transposed times a's. So its a is the op's b.

    Args:
        tf32: whether float32 may be rounded to TensorFloat-32, where the card does that.

    Raises:
        Refused: it has no words for it.
    """
    if not isinstance(op, MatMul):
        raise Refused(f"{op.name} is no matrix product")
    (y,), dtype, peaks = outputs, inputs[0].type.dtype, dict(device.peaks)
    n, terms = y.shape[-1], inputs[0].shape[-2 if op.transpose_a else -1]
    if dtype.name not in ("float32", "bfloat16", "float16") or dtype.name not in peaks:
        raise Refused(f"a product of {dtype} on {device.title}")
    shapes = [*((*y.shape[:-2], *x.shape[-2:]) for x in inputs[:2]), y.shape]
    a, b, *added = (broadcast(input_at(i), x, shape) for i, (x, shape) in enumerate(zip(inputs, shapes)))
    d = broadcast(output_at(0), y, y.shape)
    c = added[0] if added else d
    a_row, a_term = (-1, -2) if op.transpose_a else (-2, -1)
    b_column, b_term = (-2, -1) if op.transpose_b else (-1, -2)
    (m, row), batch = _rows_and_batch(y.shape, (a, b, c, d), a_row)
    if not y.type.size or not terms or max(m, n, terms, batch[-1][0]) >= 1 << 31:
        raise Refused(f"a product of {m} x {n} x {terms}")
    sides = (
        _Side(1, b, n, terms, b.strides[b_column], b.strides[b_term]),
        _Side(0, a, terms, m, a.strides[a_term], row[0]),
        _Side(2, c, n, m, c.strides[-1], row[2]),
        _Side(3, d, n, m, d.strides[-1], row[3]),
    )
    return tuple(_calls(sides, batch, bool(added), tf32 and dtype.name == "float32" and "tensorfloat32" in peaks))


def _rows_and_batch(shape: Sequence[int], operands: Sequence[Tensor], a_row: int) -> tuple[Axis, list[Axis]]:
    """The axis of rows, and those of the batch, the longest last; where all share b, that of rows may take them in."""
    lead, strides = tuple(shape[:-2]), [x.strides for x in operands]
    batch = merged_axes(lead, [steps[:-2] for steps in strides])
    lines = [steps[at] for steps, at in zip(strides, (a_row, -2, -2, -2))]
    lines[1] = 0  # b has none of the rows
    if all(steps[1] == 0 for _, steps in batch):
        rows = merged_axes((*lead, shape[-2]), [(*steps[:-2], line) for steps, line in zip(strides, lines)])
        if len(rows) == 1:
            return rows[0], [(1, (0, 0, 0, 0))]
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

"""Kernels that go over tensors row by row: softmax, its logarithm and gradients, and cross-entropy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foreplan.base.units import ceil_div
from foreplan.graph import DType, Op, Window
from foreplan.graph.layouts import lie_alike
from foreplan.graph.op import Types, Windows
from foreplan.ops.loss import CrossEntropy, CrossEntropyGrad
from foreplan.ops.map import merged_axes
from foreplan.ops.softmax import LogSoftmax, LogSoftmaxGrad, Softmax, SoftmaxGrad
from foreplan.runtime.cuda.device import Device
from foreplan.runtime.cuda.kernels.map import index_type
from foreplan.runtime.cuda.kernels.reduce import Axis, power_of_2
from foreplan.runtime.cuda.launch import THREADS, Address, Defines, LaunchKernel, Word, input_at, launch, output_at
from foreplan.runtime.kernel import Refused

EACH = 4  # times that a thread takes elements of a row, unless a block does not suffice
BYTES = 16  # of elements side by side, that a thread moves at a time


@dataclass(frozen=True)
class Rows:
    """A tensor as rows.

    Attributes:
        start: where it begins.
        step: bytes from one element of a row to the next.
        axes: that number the rows, in C order.
    """

    start: Address
    step: int
    axes: tuple[Axis, ...]

    def words(self, rank: int) -> list[Word]:
        """The members of `Rows` in cuda/rows.cuh, with `rank` axes."""
        axes = (Axis(1, 0),) * (rank - len(self.axes)) + self.axes
        return [self.start, self.step, *(axis.extent for axis in axes), *(axis.stride for axis in axes)]


def rows_along(start: Address, x: Window, axis: int | None) -> Rows:
    """A tensor as rows along an axis; None: as rows of one element each."""
    others = [i for i in range(len(x.shape)) if i != axis]
    axes = tuple(Axis(n, steps[0]) for n, steps in merged_axes(x.shape, [x.strides], others))
    return Rows(start, 0 if axis is None else x.strides[axis], axes)


def rank_of(rows: Sequence[Rows]) -> int:
    """Axes that number the rows of all."""
    return max(len(each.axes) for each in rows)


@dataclass(frozen=True)
class Teams:
    """The shares of threads in rows.

    Attributes:
        rows: how many.
        count: elements of each.
        vector: neighbouring elements that a thread takes at a time.
    """

    rows: int
    count: int
    vector: int

    @property
    def threads(self) -> int:
        """For a row: some of a warp, some warps, or a whole block."""
        return power_of_2(ceil_div(ceil_div(self.count, self.vector), EACH), 1, THREADS)

    @property
    def held(self) -> int:
        """Times that a thread takes elements of a row, where these are few enough to be held in registers; else 0."""
        times = ceil_div(self.count, self.vector * self.threads)
        return times if times <= EACH else 0

    @property
    def blocks(self) -> int:
        """For all rows."""
        return ceil_div(self.rows, THREADS // self.threads)

    def defines(self, rank: int) -> Defines:
        """What cuda/rows.cuh is compiled with: rows are numbered by `rank` axes."""
        sizes = (("TEAM", self.threads), ("VECTOR", self.vector), ("RANK", rank))
        return (*sizes, ("INDEX", index_type(self.rows)))


def teams(rows: int, count: int, dtype: DType, side_by_side: bool) -> Teams:
    """For rows of elements of a type, which are moved together if those of every row lie side by side."""
    return Teams(rows, count, power_of_2(count, 1, BYTES // dtype.itemsize) if side_by_side else 1)


def softmax(op: Op, inputs: Windows, outputs: Windows, device: Device) -> LaunchKernel:
    """Softmax, its logarithm, or a gradient of one."""
    assert isinstance(op, Softmax | SoftmaxGrad | LogSoftmax | LogSoftmaxGrad)
    (y,) = outputs
    if not y.type.size:
        return LaunchKernel(())
    count = y.shape[op.axis]
    operands = [rows_along(input_at(i), x, op.axis) for i, x in enumerate(inputs)]
    operands = [operands[0], operands[-1], rows_along(output_at(0), y, op.axis)]
    side_by_side = all(each.step == y.type.dtype.itemsize for each in operands)
    work, rank = teams(y.type.size // count, count, y.type.dtype, side_by_side), rank_of(operands)
    defines: Defines = (
        ("ELEMENT", y.type.dtype),
        ("LOGARITHM", int(isinstance(op, LogSoftmax | LogSoftmaxGrad))),
        ("GRADIENT", int(len(inputs) == 2)),
        *work.defines(rank),
    )
    words = [work.rows, count, *(word for each in operands for word in each.words(rank))]
    overwrites = tuple((0, i) for i, x in enumerate(inputs) if lie_alike(x, y))
    only = launch("softmax.cu", "softmax", work.blocks, words, defines)
    return LaunchKernel((only,), overwrites=overwrites)


def like_first(op: Op, inputs: Windows, outputs: Types) -> list[Window]:
    """Outputs of the first input's type have its layout, if it has no gaps; all else is in C order."""
    x = inputs[0]
    return [Window(x.type, x.strides) if y == x.type and x.is_compact else Window.dense(y) for y in outputs]


def cross_entropy(op: Op, inputs: Windows, outputs: Windows, device: Device) -> LaunchKernel:
    """Losses and logarithms of sums, an item each."""
    assert isinstance(op, CrossEntropy)
    logits, target = inputs
    loss, log_sum = (rows_along(output_at(i), y, None) for i, y in enumerate(outputs))
    operands = [rows_along(input_at(0), logits, op.axis), rows_along(input_at(1), target, None), loss, log_sum]
    return _entropy(op, "cross_entropy", [*operands, loss], logits, target, outputs[0])


def cross_entropy_grad(op: Op, inputs: Windows, outputs: Windows, device: Device) -> LaunchKernel:
    """The gradient of the logits, from the logarithms of sums and cotangents of losses."""
    assert isinstance(op, CrossEntropyGrad)
    logits, target, log_sum, g = inputs
    operands = [rows_along(input_at(0), logits, op.axis)]
    operands += [rows_along(input_at(i), x, None) for i, x in ((1, target), (3, g), (2, log_sum))]
    operands.append(rows_along(output_at(0), outputs[0], op.axis))
    made = _entropy(op, "cross_entropy_grad", operands, logits, target, g)
    return LaunchKernel(made.instructions, overwrites=((0, 0),) if lie_alike(logits, outputs[0]) else ())


def _entropy(
    op: CrossEntropy | CrossEntropyGrad,
    entry: str,
    operands: Sequence[Rows],
    logits: Window,
    target: Window,
    item: Window,
) -> LaunchKernel:
    count = logits.shape[op.axis]
    if not item.type.size:
        return LaunchKernel(())
    if not count:
        raise Refused("items without classes")
    lines = operands[:1] if isinstance(op, CrossEntropy) else (operands[0], operands[-1])
    side_by_side = all(each.step == logits.type.dtype.itemsize for each in lines)
    work, rank = teams(item.type.size, count, logits.type.dtype, side_by_side), rank_of(operands)
    defines: Defines = (
        ("ELEMENT", logits.type.dtype),
        ("TARGET", target.type.dtype),
        ("STATISTIC", item.type.dtype),
        *work.defines(rank),
    )
    words = [work.rows, count, op.ignore_index, *(word for each in operands for word in each.words(rank))]
    return LaunchKernel((launch("cross_entropy.cu", entry, work.blocks, words, defines),))

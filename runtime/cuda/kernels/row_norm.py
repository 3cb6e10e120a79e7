"""Normalisation of rows, and its gradients: of parameters by sums over parts of the rows."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from foreplan.base.units import ceil_div
from foreplan.graph import DType, Op, Window
from foreplan.graph.layouts import lie_alike
from foreplan.graph.op import Windows
from foreplan.ops.map import merged_axes
from foreplan.ops.norm.rows import LayerNorm, LayerNormGrad, RMSNorm, RMSNormGrad
from foreplan.runtime.cuda.device import Device
from foreplan.runtime.cuda.kernels.reduce import Axis, Terms, reduction
from foreplan.runtime.cuda.kernels.rows import Rows, Teams, rank_of, teams
from foreplan.runtime.cuda.launch import (
    Address,
    Defines,
    Launch,
    LaunchKernel,
    Scratch,
    Word,
    input_at,
    launch,
    output_at,
)

ACROSS = 8  # threads for neighbouring columns, of a block that sums over rows
LEAST = 128  # rows of a part
MOST_PARTS = 256


@dataclass(frozen=True)
class _Work:
    """The tensors of the kernels of cuda/row_norm.cu.

    Attributes:
        added: the tensor that the gradient of x is added to; None: none.
        scale, bias: the beginnings of parameters, and bytes from one number to the next; None without them.
        sums: of columns, a pair of rows for each of some parts.
    """

    rows: int
    width: int
    dtype: DType
    x: Rows
    g: Rows
    added: Rows | None
    result: Rows
    scale: tuple[Address, int] | None
    bias: tuple[Address, int] | None
    parameter: DType
    centred: bool
    mean: Address
    deviation: Address
    sums: Address
    rows_a_part: int = 0
    epsilon: float = 0.0

    @property
    def operands(self) -> tuple[Rows, ...]:
        """Tensors as large as x, in the kernels' order."""
        return self.x, self.g, self.added or self.g, self.result

    @property
    def side_by_side(self) -> bool:
        """Whether elements of every row are neighbours, and those of the parameters."""
        rows = all(each.step == self.dtype.itemsize for each in self.operands)
        given = (parameter for parameter in (self.scale, self.bias) if parameter is not None)
        return rows and all(step == self.parameter.itemsize for _, step in given)

    @property
    def whole(self) -> bool:
        """Whether every row is made of whole vectors and begins as the first one does."""
        vector = self.teams.vector
        steps = [axis.stride for each in self.operands for axis in each.axes]
        return all(step % (vector * self.dtype.itemsize) == 0 for step in steps) and self.width % vector == 0

    @property
    def teams(self) -> Teams:
        """How rows are shared out."""
        return teams(self.rows, self.width, self.dtype, self.side_by_side)

    def launch(self, entry: str, grid: int | tuple[int, int, int]) -> Launch:
        """One launch."""
        rank = rank_of(self.operands)
        defines: Defines = (
            ("ELEMENT", self.dtype),
            ("PARAMETER", self.parameter),
            ("CENTRED", int(self.centred)),
            ("SCALED", int(self.scale is not None)),
            ("BIASED", int(self.bias is not None)),
            ("ADDED", int(self.added is not None)),
            ("WHOLE", int(self.whole)),
            ("HELD", self.teams.held if self.whole else 0),
            *self.teams.defines(rank),
        )
        words: list[Word] = [self.rows, self.width, self.rows_a_part, float(self.epsilon)]
        for each in self.operands:
            words += each.words(rank)
        for parameter in (self.scale, self.bias):
            words += parameter or (self.deviation, 0)
        words += [self.mean, self.deviation, self.sums]
        return launch("row_norm.cu", entry, grid, words, defines)


def normal(op: Op, inputs: Windows, outputs: Windows, device: Device) -> LaunchKernel:
    """One launch."""
    assert isinstance(op, LayerNorm | RMSNorm)
    x, *parameters = inputs
    y, deviation = outputs[0], output_at(len(outputs) - 1)
    vectors = [(input_at(1 + i), _step(vector, 0)) for i, vector in enumerate(parameters)]
    rows, result = (_rows(at, each, op.axis) for at, each in ((input_at(0), x), (output_at(0), y)))
    width = math.prod(x.shape[op.axis :])
    work = _Work(
        rows=x.type.size // width,
        width=width,
        dtype=x.type.dtype,
        x=rows,
        g=rows,
        added=None,
        result=result,
        scale=vectors[0] if vectors else None,
        bias=vectors[1] if len(vectors) > 1 else None,
        parameter=inputs[-1].type.dtype,
        centred=op.centred,
        mean=output_at(1),
        deviation=deviation,
        sums=deviation,
        epsilon=op.epsilon,
    )
    overwrites = ((0, 0),) if lie_alike(x, y) else ()
    return LaunchKernel((work.launch("row_norm", work.teams.blocks),), overwrites=overwrites)


def gradient(op: Op, inputs: Windows, outputs: Windows, device: Device) -> LaunchKernel:
    """If there are parameters, sums of columns by parts, and of the parts; then the rows."""
    assert isinstance(op, LayerNormGrad | RMSNormGrad)
    x = inputs[0]
    dx, *parameters = outputs
    scratch, width = Scratch(), math.prod(x.shape[op.axis :])
    rows = x.type.size // width
    wide = x.type.dtype.wide
    work = _Work(
        rows=rows,
        width=width,
        dtype=x.type.dtype,
        x=_rows(input_at(0), x, op.axis),
        g=_rows(input_at(op.g), inputs[op.g], op.axis),
        added=_rows(input_at(op.accumulates), inputs[-1], op.axis) if len(inputs) > op.accumulates else None,
        result=_rows(output_at(0), dx, op.axis),
        scale=(input_at(1), _step(inputs[1], 0)) if op.scaled else None,
        bias=None,
        parameter=inputs[1].type.dtype if op.scaled else wide,
        centred=op.centred,
        mean=input_at(op.g - 2 if op.centred else op.g - 1),
        deviation=input_at(op.g - 1),
        sums=input_at(0),
    )
    across = ACROSS * work.teams.vector
    wanted = ceil_div(4 * device.multiprocessors, ceil_div(width, across))
    parts = max(1, min(wanted, rows // LEAST, MOST_PARTS))
    sums = scratch.take(parts * 2 * width * wide.itemsize) if parameters else input_at(0)
    work = replace(work, sums=sums, rows_a_part=ceil_div(rows, parts))
    found: list[Launch] = []
    if parameters:
        found.append(work.launch("row_norm_columns", (ceil_div(width, across), parts, 1)))
    item = wide.itemsize
    for i, parameter in enumerate(parameters):
        start = sums.behind(i * width * item)
        terms = Terms(start, wide, (Axis(width, item),), (Axis(parts, 2 * width * item),))
        found.append(reduction("sum", terms, output_at(1 + i), parameter.type.dtype, 1, None))
    found.append(work.launch("row_norm_grad", work.teams.blocks))
    overwrites = tuple((0, i) for i in (*reversed(range(op.g, len(inputs))), 0) if lie_alike(inputs[i], dx))
    return LaunchKernel(tuple(found), scratch.nbytes, overwrites)


def _rows(start: Address, x: Window, axis: int) -> Rows:
    others = merged_axes(x.shape, [x.strides], range(axis))
    return Rows(start, _step(x, axis), tuple(Axis(n, steps[0]) for n, steps in others))


def _step(x: Window, axis: int) -> int:
    """Bytes from one element to the next along the axes from one on, which are one."""
    ((_, (step,)),) = merged_axes(x.shape, [x.strides], range(axis, len(x.shape)))
    return step


def reads(op: Op, index: int, window: Window) -> Window:
    """As it lies, if the normalised axes merge into one; statistics in C order."""
    assert isinstance(op, LayerNorm | RMSNorm | LayerNormGrad | RMSNormGrad)
    statistic = len(window.shape) == op.axis and index > 0
    as_x = index == 0 or (isinstance(op, LayerNormGrad | RMSNormGrad) and index >= op.g)
    first = op.axis if as_x else 0
    whole = len(merged_axes(window.shape, [window.strides], range(first, len(window.shape)))) == 1
    return window if whole and not statistic else Window.dense(window.type)

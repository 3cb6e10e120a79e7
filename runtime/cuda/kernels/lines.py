"""Kernels on lines along one axis: cumulative sums, places of extremes, sorting, elements at indices, unstacking."""

from __future__ import annotations

from foreplan.graph import DType, Op
from foreplan.graph.op import Windows
from foreplan.graph.types import DTYPES
from foreplan.ops.index_elements import GatherElements, ScatterElementsAdd
from foreplan.ops.scan import CumSum
from foreplan.ops.sort import ArgReduce, TopK
from foreplan.ops.unstack import Unstack
from foreplan.runtime.cuda.device import Device
from foreplan.runtime.cuda.kernels.map import copies, index_type
from foreplan.runtime.cuda.kernels.rows import Rows, rank_of, rows_along
from foreplan.runtime.cuda.launch import Clear, Defines, Instruction, LaunchKernel, Word, for_each, input_at, output_at

_NO_PLACES = DTYPES["int64"]


def cumsum(op: Op, inputs: Windows, outputs: Windows, device: Device) -> LaunchKernel:
    """One launch, a thread a line."""
    assert isinstance(op, CumSum)
    (x,), (y,) = inputs, outputs
    if not x.type.size:
        return LaunchKernel(())
    lines = [rows_along(start, window, op.axis) for start, window in ((input_at(0), x), (output_at(0), y))]
    choices = (("REVERSE", int(op.reverse)), ("EXCLUSIVE", int(op.exclusive)))
    count = x.shape[op.axis]
    return _kernel("cumsum", x.type.dtype, [lines[0], lines[1], lines[1]], x.type.size // count, (count, 0), choices)


def arg_reduce(op: Op, inputs: Windows, outputs: Windows, device: Device) -> LaunchKernel:
    """One launch, a thread a line."""
    assert isinstance(op, ArgReduce)
    (x,), (y,) = inputs, outputs
    if not y.type.size:
        return LaunchKernel(())
    source, places = rows_along(input_at(0), x, op.axis), rows_along(output_at(0), y, None)
    choices = (("LARGEST", int(op.how == "max")), ("LAST", int(op.last)))
    return _kernel("arg_reduce", x.type.dtype, [source, places, source], y.type.size, (x.shape[op.axis], 1), choices)


def top_k(op: Op, inputs: Windows, outputs: Windows, device: Device) -> LaunchKernel:
    """One launch, a thread an element."""
    assert isinstance(op, TopK)
    (x,), (values, places) = inputs, outputs
    if not values.type.size:
        return LaunchKernel(())
    windows = ((input_at(0), x), (output_at(1), places), (output_at(0), values))
    lines, count = [rows_along(start, window, op.axis) for start, window in windows], x.shape[op.axis]
    rows, choices = x.type.size // count, (("LARGEST", int(op.largest)),)
    return _kernel("top_k", x.type.dtype, lines, rows, (count, op.k), choices, threads=x.type.size)


def gather_elements(op: Op, inputs: Windows, outputs: Windows, device: Device) -> LaunchKernel:
    """One launch, a thread an element."""
    assert isinstance(op, GatherElements)
    (data, indices), (y,) = inputs, outputs
    if not y.type.size:
        return LaunchKernel(())
    windows = ((input_at(0), data), (input_at(1), indices), (output_at(0), y))
    lines, taken = [rows_along(start, window, op.axis) for start, window in windows], y.shape[op.axis]
    counts, rows = (data.shape[op.axis], taken), y.type.size // taken
    return _kernel("gather_elements", y.type.dtype, lines, rows, counts, place=indices.type.dtype, threads=y.type.size)


def scatter_elements_add(op: Op, inputs: Windows, outputs: Windows, device: Device) -> LaunchKernel:
    """Zeros, and one launch, a thread a line."""
    assert isinstance(op, ScatterElementsAdd)
    (indices, updates), (y,) = inputs, outputs
    found: tuple[Instruction, ...] = (Clear(output_at(0), y.type.nbytes),) if y.type.size else ()
    if updates.type.size:
        windows = ((input_at(1), updates), (input_at(0), indices), (output_at(0), y))
        lines, taken = [rows_along(start, window, op.axis) for start, window in windows], updates.shape[op.axis]
        counts, rows = (y.shape[op.axis], taken), updates.type.size // taken
        made = _kernel("scatter_elements_add", y.type.dtype, lines, rows, counts, place=indices.type.dtype)
        found += made.instructions
    return LaunchKernel(found)


def unstack(op: Op, inputs: Windows, outputs: Windows, device: Device) -> LaunchKernel:
    """A copy for each output."""
    assert isinstance(op, Unstack)
    (x,) = inputs
    found: tuple[Instruction, ...] = ()
    for i, y in enumerate(outputs):
        part = x.viewed(x.shape[1:], x.strides[1:])
        found += copies(input_at(0, i * x.strides[0]), part, output_at(i), y)
    return LaunchKernel(found)


def _kernel(
    entry: str,
    dtype: DType,
    lines: list[Rows],
    rows: int,
    counts: tuple[int, int],
    choices: Defines = (),
    place: DType = _NO_PLACES,
    threads: int = 0,
) -> LaunchKernel:
    """The one launch of a kernel of cuda/lines.cu, a thread a row unless there are more."""
    rank, threads = rank_of(lines), threads or rows
    every = {"REVERSE": 0, "EXCLUSIVE": 0, "LARGEST": 0, "LAST": 0} | dict(choices)
    defines: Defines = (
        ("ELEMENT", dtype),
        ("PLACE", place),
        ("RANK", rank),
        ("INDEX", index_type(threads)),
        *every.items(),
    )
    words: list[Word] = [rows, *counts]
    for each in lines:
        words += each.words(rank)
    return LaunchKernel((for_each("lines.cu", entry, threads, words, defines),))

"""Reductions of tensors in any layout; long ones in parts, which are reduced once more."""

from __future__ import annotations

import math
from dataclasses import dataclass

from foreplan.base.units import ceil_div
from foreplan.graph import DType, Op
from foreplan.graph.op import Windows
from foreplan.graph.types import BOOL
from foreplan.ops.map import merged_axes
from foreplan.ops.reduce import Reduce
from foreplan.runtime.cuda.device import Device
from foreplan.runtime.cuda.kernels.expressions import literal, wide
from foreplan.runtime.cuda.kernels.map import index_type
from foreplan.runtime.cuda.launch import (
    THREADS,
    Address,
    Launch,
    LaunchKernel,
    Word,
    input_at,
    launch,
    output_at,
    side_by_side,
    workspace_at,
)
from foreplan.runtime.kernel import Refused

WARP = 32
RUN = 8  # terms that a thread adds up before they join its total
MOST_PARTS = 512
BYTES = 16  # of outputs side by side, that a thread moves at a time
LINE = 8  # threads whose outputs are neighbours, where each thread moves several outputs
_COMBINE = {"sum": "add", "mean": "add", "prod": "multiply", "max": "maximum", "min": "minimum"}


@dataclass(frozen=True)
class Axis:
    """An axis of what is reduced: extent, and bytes from one element to the next."""

    extent: int
    stride: int


@dataclass(frozen=True)
class Terms:
    """The terms of a reduction.

    Attributes:
        source: their first element.
        dtype: of the elements.
        kept: axes of the outputs, in C order.
        reduced: axes of each output's terms.
    """

    source: Address
    dtype: DType
    kept: tuple[Axis, ...]
    reduced: tuple[Axis, ...]

    @property
    def outputs(self) -> int:
        """How many."""
        return math.prod(axis.extent for axis in self.kept)

    @property
    def count(self) -> int:
        """Terms of an output."""
        return math.prod(axis.extent for axis in self.reduced)


def reduce(op: Op, inputs: Windows, outputs: Windows, device: Device) -> LaunchKernel:
    """One launch, or one for the parts and one for their results."""
    assert isinstance(op, Reduce)
    (x,), (y,) = inputs, outputs
    dtype = x.type.dtype
    axes = [i for i in range(len(x.shape)) if i not in op.axes], list(op.axes)
    kept, reduced = (
        tuple(Axis(n, steps[0]) for n, steps in merged_axes(x.shape, [x.strides], which)) for which in axes
    )
    terms = Terms(input_at(0), dtype, kept, reduced)
    if not terms.outputs:
        return LaunchKernel(())
    if (op.how == "mean" and not dtype.is_float) or (not terms.count and op.how in ("max", "min")):
        raise Refused(f"{op} of {x.type}")
    parts = _parts(terms, device)
    factor = None if op.how != "mean" else 1 / terms.count if terms.count else math.nan
    if parts == 1:
        return LaunchKernel((reduction(op.how, terms, output_at(0), y.type.dtype, 1, factor),))
    partial, item = dtype.wide, dtype.wide.itemsize
    first = reduction(op.how, terms, workspace_at(), partial, parts, None)
    again = Terms(workspace_at(), partial, (Axis(terms.outputs, item),), (Axis(parts, terms.outputs * item),))
    second = reduction(op.how, again, output_at(0), y.type.dtype, 1, factor)
    return LaunchKernel((first, second), parts * terms.outputs * item)


def reduction(how: str, terms: Terms, target: Address, result: DType, parts: int, factor: float | None) -> Launch:
    """The launch that reduces terms in `parts` parts.

    Args:
        target: of [parts, outputs].
        factor: of the results.
    """
    shared = _shared(terms, ceil_div(terms.count, parts))
    defines = (
        ("ELEMENT", terms.dtype),
        ("RESULT", result),
        ("COMBINE", f"scalar::{_COMBINE[how]}<{wide(terms.dtype)}>"),
        ("NEUTRAL", neutral(how, terms.dtype)),
        ("LANES", shared.lanes),
        ("VECTOR", shared.vector),
        ("TERMS_SIDE_BY_SIDE", int(shared.side_by_side)),
        ("SCALED", int(factor is not None)),
        ("KEPT", len(terms.kept)),
        ("REDUCED", len(terms.reduced)),
        ("INDEX", index_type(max(terms.outputs, terms.count))),
    )
    part = ceil_div(terms.count, parts)
    words: list[Word] = [terms.source, target, terms.outputs, terms.count, part, factor or 1.0]
    for axes in (terms.kept, terms.reduced):
        words += [axis.extent for axis in axes] + [axis.stride for axis in axes]
    return launch("reduce.cu", "reduce", (shared.blocks(terms), parts, 1), words, defines)


@dataclass(frozen=True)
class _Shared:
    """The shares of threads in the terms.

    Attributes:
        side_by_side: whether neighbouring threads take neighbouring terms; else they have neighbouring outputs.
        lanes: threads for an output.
        vector: neighbouring outputs of a thread.
    """

    side_by_side: bool
    lanes: int
    vector: int

    def blocks(self, terms: Terms) -> int:
        """For all outputs."""
        return ceil_div(terms.outputs, THREADS // self.lanes * self.vector)


def _shared(terms: Terms, count: int) -> _Shared:
    """How threads share the terms of each output, `count` of them."""
    if terms.reduced[-1].stride == terms.dtype.itemsize or terms.kept[-1].stride != terms.dtype.itemsize:
        return _Shared(True, power_of_2(ceil_div(count, 2 * RUN), 1, THREADS), 1)
    vector = _vector(terms)
    across = power_of_2(terms.outputs // vector, 1, LINE if vector > 1 else WARP)
    return _Shared(False, min(THREADS // across, power_of_2(ceil_div(count, RUN), 1, THREADS)), vector)


def _vector(terms: Terms) -> int:
    """Outputs a thread, if their terms lie side by side: a number that divides rows and their distances."""
    item, (*others, last) = terms.dtype.itemsize, terms.kept
    steps = [axis.stride for axis in (*others, *terms.reduced)]
    most = 1 if terms.dtype == BOOL else BYTES // item if item > 1 else BYTES // 2  # bools would need a stack
    return side_by_side(most, last.extent, [(item, item, steps)])


def _parts(terms: Terms, device: Device) -> int:
    """The number of parts that keeps every multiprocessor busy, none of them short."""
    shared = _shared(terms, terms.count)
    # Loads of whole vectors keep a multiprocessor busy with fewer threads.
    blocks, short = (2, RUN) if shared.vector > 1 else (4, 4 * RUN)
    wanted = ceil_div(blocks * device.multiprocessors, shared.blocks(terms))
    return max(1, min(wanted, terms.count // (short * shared.lanes), MOST_PARTS))


def power_of_2(count: int, least: int, most: int) -> int:
    """The least power of two that is not below a count, within bounds that are such powers."""
    return min(most, max(least, 1 << max(0, count - 1).bit_length()))


def neutral(how: str, dtype: DType) -> str:
    """The neutral element of a reduction, in the type of arithmetic on such elements."""
    if how in ("sum", "mean", "prod"):
        return f"static_cast<{wide(dtype)}>({int(how == 'prod')})"
    lowest = how == "max"
    if dtype.is_float:
        return literal(-math.inf if lowest else math.inf, dtype)
    bits = 8 * dtype.itemsize
    if dtype.category == "int":
        return literal(-(1 << bits - 1) if lowest else (1 << bits - 1) - 1, dtype)
    return literal(0 if lowest else (1 if dtype.category == "bool" else (1 << bits) - 1), dtype)

"""Tensors put into larger ones or taken apart, as copies of any layout; a part that already lies in its place stays
there.
"""

from __future__ import annotations

import itertools
from functools import partial

from foreplan.graph import Op, Window
from foreplan.graph.op import Arrays, Windows
from foreplan.ops.join import Concat, Pad, Unslice
from foreplan.ops.shape import slices
from foreplan.ops.unstack import Unstack
from foreplan.runtime.cpu.kernel import LoopKernel
from foreplan.runtime.cpu.kernels.copies import clear, copy
from foreplan.runtime.cpu.kernels.rows import same_place
from foreplan.runtime.kernel import Run, one_after_another


def concat(op: Op, inputs: Windows, outputs: Windows) -> LoopKernel:
    """The kernel of `Concat`: one copy an input."""
    assert isinstance(op, Concat)
    (y,), start, parts = outputs, 0, []
    for i, x in enumerate(inputs):
        # A stretch of the output without gaps, in the same order: its axes that count have the same strides.
        alike = all(extent == 1 or a == b for extent, a, b in zip(x.shape, x.strides, y.strides))
        if alike and x.is_compact:
            parts.append((0, i, start * y.strides[op.axis]))
        start += x.shape[op.axis]

    def loops(inputs: Arrays, outputs: Arrays, scratch: Arrays) -> Run:
        starts = itertools.accumulate((x.shape[op.axis] for x in inputs), initial=0)
        before: tuple[slice, ...] = (slice(None),) * op.axis
        places = [outputs[0][(*before, slice(start, start + x.shape[op.axis]))] for x, start in zip(inputs, starts)]
        return one_after_another(*(copy(place, x) for place, x in zip(places, inputs) if not same_place(place, x)))

    return LoopKernel(loops, parts=tuple(parts))


def padded(op: Op, inputs: Windows, outputs: Windows) -> LoopKernel:
    """The kernel of `Pad` and `Unslice`: the output is filled, then the input is copied into it."""
    assert isinstance(op, Pad | Unslice)

    def loops(inputs: Arrays, outputs: Arrays, scratch: Arrays) -> Run:
        (x,), (y,) = inputs, outputs
        if isinstance(op, Unslice):
            return one_after_another(clear(y), copy(y[slices(op.starts, x.shape, op.steps)], x))
        runs: list[Run] = []
        for stretches in itertools.product(*map(op.stretches, op.pads, x.shape)):
            target = y[tuple(there for there, _ in stretches)]
            sources = [source for _, source in stretches if source is not None]
            whole = len(sources) == len(stretches)
            runs.append(copy(target, x[tuple(sources)]) if whole else partial(target.fill, op.value))
        return one_after_another(*runs)

    return LoopKernel(loops)


def unstack(op: Op, inputs: Windows, outputs: Windows) -> LoopKernel:
    """The kernel of `Unstack`: one copy an output."""
    assert isinstance(op, Unstack)

    def loops(inputs: Arrays, outputs: Arrays, scratch: Arrays) -> Run:
        return one_after_another(*(copy(y, inputs[0][t, ...]) for t, y in enumerate(outputs)))

    return LoopKernel(loops)


def reads(op: Op, index: int, window: Window) -> Window:
    """As it lies, in any layout."""
    return window

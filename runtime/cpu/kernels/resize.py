"""Resizing one or two axes, and its gradient, by compiled loops over the tables of what each element reads.

Parts of the work are planes: what lies behind one place of the axes before the first one that changes. Between two axes
a plane is of float32.
"""

from __future__ import annotations

import numpy as np

from foreplan.graph import Op
from foreplan.graph.op import Arrays, Windows
from foreplan.ops.interpolation import Table
from foreplan.ops.resize import Resize, ResizeGrad
from foreplan.runtime.cpu.codegen.elements import as_in, check_elements, number
from foreplan.runtime.cpu.codegen.jit import compiled, inlined
from foreplan.runtime.cpu.kernel import LoopKernel
from foreplan.runtime.cpu.kernels.rows import flat, flat_input
from foreplan.runtime.cpu.threads import current_threads, ranged
from foreplan.runtime.kernel import Refused, Run

GRAIN = 1 << 15  # elements that are worth a thread of their own


@inlined
def _along(x, y, lead, inputs, outputs, trail, indices, weights):  # type: ignore[no-untyped-def]
    """One axis of a plane: [lead, inputs, trail] → [lead, outputs, trail], terms in the order of the table."""
    for i in range(lead):
        for o in range(outputs):
            for k in range(trail):
                total = number(x[(i * inputs + indices[0, o]) * trail + k]) * weights[0, o]
                for t in range(1, len(indices)):
                    total += number(x[(i * inputs + indices[t, o]) * trail + k]) * weights[t, o]
                y[(i * outputs + o) * trail + k] = as_in(y, total)


@compiled
def _one_axis(start, stop, x, y, extents, indices, weights):  # type: ignore[no-untyped-def]
    lead, inputs, outputs, trail = extents
    before, after = lead * inputs * trail, lead * outputs * trail
    for p in range(start, stop):
        here, there = x[p * before : (p + 1) * before], y[p * after : (p + 1) * after]
        _along(here, there, lead, inputs, outputs, trail, indices, weights)


@compiled
def _two_axes(  # type: ignore[no-untyped-def]
    start, stop, x, y, extents, indices, weights, then, then_indices, then_weights, plane
):
    lead, inputs, outputs, trail = extents
    then_lead, then_inputs, then_outputs, then_trail = then
    before, after = lead * inputs * trail, then_lead * then_outputs * then_trail
    for p in range(start, stop):
        here, there = x[p * before : (p + 1) * before], y[p * after : (p + 1) * after]
        _along(here, plane, lead, inputs, outputs, trail, indices, weights)
        _along(plane, there, then_lead, then_inputs, then_outputs, then_trail, then_indices, then_weights)


def _terms(table: Table) -> tuple[np.ndarray, np.ndarray]:
    """The indices, and the weights in float32."""
    weights = np.ones(table.indices.shape) if table.weights is None else table.weights
    return table.indices, weights.astype(np.float32)


def resize(op: Op, inputs: Windows, outputs: Windows) -> LoopKernel:
    """The kernel of `Resize` and `ResizeGrad`, by ranges of planes."""
    assert isinstance(op, Resize | ResizeGrad)
    check_elements(inputs[0])
    steps = op.steps(inputs[0].shape)
    if len(steps) not in (1, 2):
        raise Refused(f"{len(steps)} axes")
    threads, between = current_threads(), steps[0].size if len(steps) == 2 else 0
    grain = max(1, GRAIN // max(step.size for step in steps))

    def loops(inputs: Arrays, outputs: Arrays, scratch: Arrays) -> Run:
        given: list[object] = [flat_input(inputs[0]), flat(outputs[0])]
        for step in steps:
            given += [(step.lead, step.inputs, step.outputs, step.trail), *_terms(step.table)]
        function, own = (_two_axes, scratch[0]) if between else (_one_axis, None)
        return ranged(function, steps[0].planes, grain, threads, *given, own=own)

    return LoopKernel(loops, (((threads, between), np.dtype(np.float32)),))

"""Tensors put into larger ones, as copies however they lie; a part that lies in its place already is left there."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from foreplan.graph import Op, Window
from foreplan.graph.op import Windows
from foreplan.ops.join import Concat, Pad, Unslice
from foreplan.ops.shape import slices
from foreplan.runtime.cpu.kernel import one_after_another
from foreplan.runtime.cpu.kernels.copies import clear, copy
from foreplan.runtime.cpu.kernels.rows import same_place
from foreplan.runtime.kernel import Run


@dataclass(frozen=True)
class Joined:
    """`Concat`.

    Attributes:
        parts: (0, input, byte) of each input that lies as its place within the output does.
    """

    axis: int
    parts: tuple[tuple[int, int, int], ...]

    workspace = 0
    overwrites = ()

    def bind(self, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], workspace: np.ndarray) -> Run:
        """One copy an input."""
        starts = itertools.accumulate((x.shape[self.axis] for x in inputs), initial=0)
        before: tuple[slice, ...] = (slice(None),) * self.axis
        places = [outputs[0][(*before, slice(start, start + x.shape[self.axis]))] for x, start in zip(inputs, starts)]
        copies = [copy(place, x) for place, x in zip(places, inputs) if not same_place(place, x)]
        return one_after_another(*copies)


@dataclass(frozen=True)
class Padded:
    """`Pad` or `Unslice`."""

    op: Pad | Unslice

    workspace = 0
    overwrites = ()

    def bind(self, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], workspace: np.ndarray) -> Run:
        """What is filled first, and then copied over."""
        (x,), (y,), op = inputs, outputs, self.op
        if isinstance(op, Unslice):
            place = y[slices(op.starts, x.shape, op.steps)]
            return one_after_another(clear(y), copy(place, x))
        runs: list[Run] = []
        for stretches in itertools.product(*map(op.stretches, op.pads, x.shape)):
            target = y[tuple(there for there, _ in stretches)]
            sources = [source for _, source in stretches if source is not None]
            whole = len(sources) == len(stretches)
            runs.append(copy(target, x[tuple(sources)]) if whole else partial(target.fill, op.value))
        return one_after_another(*runs)


def concat(op: Op, inputs: Windows, outputs: Windows) -> Joined:
    """The kernel of `Concat`."""
    assert isinstance(op, Concat)
    (y,), start, parts = outputs, 0, []
    for i, x in enumerate(inputs):
        # A stretch of the output without gaps, in the same order: its axes that count have the same strides.
        alike = all(extent == 1 or a == b for extent, a, b in zip(x.shape, x.strides, y.strides))
        if alike and x.is_compact:
            parts.append((0, i, start * y.strides[op.axis]))
        start += x.shape[op.axis]
    return Joined(op.axis, tuple(parts))


def padded(op: Op, inputs: Windows, outputs: Windows) -> Padded:
    """The kernel of `Pad` and `Unslice`."""
    assert isinstance(op, Pad | Unslice)
    return Padded(op)


def reads(op: Op, index: int, window: Window) -> Window:
    """As it lies, whatever that is."""
    return window

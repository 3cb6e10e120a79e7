"""Resizing and its gradient: tables of what each place of an axis reads, then a thread an element or a few."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from foreplan.base.units import ceil_div
from foreplan.graph import Op, Window
from foreplan.graph.layouts import like_most_inputs
from foreplan.graph.op import Windows
from foreplan.ops.interpolation import MODES, ROUNDINGS, Interpolation
from foreplan.ops.map import merged_axes
from foreplan.ops.resize import Resize, ResizeGrad
from foreplan.runtime.cuda.device import Device
from foreplan.runtime.cuda.kernels.map import copies, index_type
from foreplan.runtime.cuda.launch import (
    THREADS,
    Address,
    Defines,
    Instruction,
    Launch,
    LaunchKernel,
    Scratch,
    Word,
    for_each,
    input_at,
    output_at,
)
from foreplan.runtime.kernel import Refused

BYTES = 16  # a thread moves at a time
MOST_TERMS = 512  # terms that one thread adds up; with more, one axis is resized after the other
SPAN_BYTES = 8


@dataclass(frozen=True)
class _Line:
    """An axis that changes, with its table.

    Attributes:
        places: of the result.
        limit: extent of what is read.
        most: places that one place reads.
        spans, weights: where the table lies.
    """

    axis: Interpolation
    places: int
    limit: int
    most: int
    spans: Address
    weights: Address

    @property
    def taps(self) -> list[Word]:
        """The members of `Taps` in cuda/resize.cu."""
        return [self.spans, self.weights, self.most]

    @property
    def words(self) -> list[Word]:
        """The members of `Line`."""
        axis, at = self.axis, self.axis.coordinates
        numbers = [at.shift, at.factor, at.divisor, at.extra, axis.shrink]
        return [axis.before, axis.after, axis.first, axis.terms, *map(float, numbers), *self.taps]


@dataclass(frozen=True)
class _Walk:
    """An axis of the result, or several that are one.

    Attributes:
        extent: of the result.
        limit: of what is read.
        steps: bytes from one element to the next of the result, and of what is read.
        line: where it changes.
    """

    extent: int
    limit: int
    steps: tuple[int, int]
    line: _Line | None = None


def resize(op: Op, inputs: Windows, outputs: Windows, device: Device) -> LaunchKernel:
    """A launch for the tables, and one for all axes; or one an axis, with intermediate results in the wide type."""
    assert isinstance(op, Resize | ResizeGrad)
    (x,), (y,), gradient = inputs, outputs, isinstance(op, ResizeGrad)
    axes = op.axes((y if gradient else x).shape)
    if not axes:
        return LaunchKernel(copies(input_at(0), x, output_at(0), y))
    if any(axis.coordinates.factor < 0 for axis in axes.values()):
        raise Refused("coordinates that fall")
    scratch, wide = Scratch(), x.type.dtype.wide
    lines = {i: _line(axis, gradient, wide.itemsize, scratch) for i, axis in axes.items()}
    choices: Defines = (
        ("MODE", MODES.index(op.mode)),
        ("ROUNDING", ROUNDINGS.index(op.rounding)),
        ("EXCLUDED", int(op.exclude_outside)),
        ("NORMALISED", int(op.exclude_outside or op.antialias)),
        ("TRANSPOSED", int(gradient)),
        ("LINES", len(lines)),
    )
    passes: list[Launch] = []
    start, source, shape, groups = input_at(0), x, list(x.shape), _groups(lines)
    for i, group in enumerate(groups):
        for axis in group:
            shape[axis] = lines[axis].places
        to, target = output_at(0), y
        if i < len(groups) - 1:
            (target,) = like_most_inputs(op, [y], [y.type.with_shape(tuple(shape)).with_dtype(wide)])
            to = scratch.take(target.type.nbytes)
        passes.append(_pass(choices, {axis: lines[axis] for axis in group}, (start, source), (to, target)))
        start, source = to, target
    most = max(line.places for line in lines.values())
    words = [float(op.cubic_a), *(word for line in lines.values() for word in line.words)]
    grid = (ceil_div(most, THREADS), len(lines), 1)
    tables = replace(passes[0], entry="taps", grid=grid, arguments=tuple(words))
    found: tuple[Instruction, ...] = (tables, *passes)
    return LaunchKernel(found, scratch.nbytes)


def _line(axis: Interpolation, gradient: bool, item: int, scratch: Scratch) -> _Line:
    places, limit = (axis.before, axis.after) if gradient else (axis.after, axis.before)
    most = axis.most_readers if gradient else axis.terms
    spans, weights = scratch.take(SPAN_BYTES * places), 0 if axis.mode == "nearest" else item * most * places
    return _Line(axis, places, limit, most, spans, scratch.take(weights))


def _groups(lines: dict[int, _Line]) -> list[list[int]]:
    """Axes that are resized together; if one by one, axes that shrink come first, which leaves less for the others."""
    if math.prod(line.most for line in lines.values()) <= MOST_TERMS:
        return [list(lines)]
    return [[axis] for axis in sorted(lines, key=lambda axis: (lines[axis].places / lines[axis].limit, axis))]


def _pass(
    choices: Defines, lines: dict[int, _Line], source: tuple[Address, Window], target: tuple[Address, Window]
) -> Launch:
    """Some axes resized."""
    (_, x), (_, y) = source, target
    walks = _walks(x, y, lines)
    last, items = walks[-1], (y.type.dtype.itemsize, x.type.dtype.itemsize)
    vector = 1 if last.line or last.steps != items else BYTES // max(items)
    while vector > last.extent:
        vector //= 2
    extents = [*(walk.extent for walk in walks[:-1]), ceil_div(last.extent, vector)]
    units = math.prod(extents)
    defines: Defines = (
        ("SOURCE", x.type.dtype),
        ("TARGET", y.type.dtype),
        *choices,
        ("RANK", len(walks)),
        ("RESIZED", sum(1 << i for i, walk in enumerate(walks) if walk.line)),
        ("VECTOR", vector),
        ("INDEX", index_type(units)),
    )
    words: list[Word] = [units, source[0], target[0], *extents]
    words += [walk.steps[i] for i in (0, 1) for walk in walks] + [walk.limit for walk in walks]
    for walk in walks:
        words += walk.line.taps if walk.line else [0, 0, 0]
    return for_each("resize.cu", "resize", units, words, defines)


def _walks(x: Window, y: Window, lines: dict[int, _Line]) -> Sequence[_Walk]:
    """The axes in the order of the result's memory; neighbours that do not change are merged."""
    order = sorted(range(len(y.shape)), key=lambda axis: -abs(y.strides[axis]))
    found = []
    for changes, axes in groupby(order, lambda axis: axis in lines):
        if changes:
            found += [_Walk(y.shape[i], x.shape[i], (y.strides[i], x.strides[i]), lines[i]) for i in axes]
        else:
            merged = merged_axes(y.shape, [y.strides, x.strides], axes)
            found += [_Walk(n, n, (steps[0], steps[1])) for n, steps in merged if n > 1]
    return found

"""Resizing along any axes: nearest, linear and cubic interpolation as ONNX defines them, and the gradient.

Interpolation is separable and linear: along an axis, every output element is a weighted sum of a few input elements.
A table of indices and weights says which; the gradient uses the same kernel with the transposed table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from foreplan.base.errors import ShapeError, UnsupportedError
from foreplan.base.units import align_up
from foreplan.graph import Builder, Op, TensorType, Value, register
from foreplan.graph.axes import ONE, Axes, Factors, Part
from foreplan.graph.op import Arrays, Cotangents, Types, Values, attributes, only
from foreplan.graph.types import Shape
from foreplan.ops.index import MOST_POSITIONS
from foreplan.ops.interpolation import COORDINATES, MODES, ROUNDINGS, Interpolation, Table

BLOCK = 1 << 16  # elements of the planes that are worked on together


@dataclass(frozen=True)
class _Interpolation(Op):
    """Attributes of resizing and its gradient.

    Attributes:
        shape: of the resized tensor, all axes.
        mode: nearest, linear or cubic.
        coordinate: the rule from an output index to a coordinate among the inputs; one of COORDINATES.
        scales: output extent over input extent as coordinates take it, an entry an axis; the shapes' ratio if empty.
        rounding: how `nearest` rounds a coordinate; one of ROUNDINGS.
        cubic_a: the free coefficient of the cubic kernel (Keys 1981).
        exclude_outside: neighbours outside the tensor have weight 0 (and the others more), instead of the edge's value.
        antialias: where an axis shrinks, stretch the linear or cubic kernel over all skipped elements.
    """

    shape: Shape
    mode: str = "linear"
    coordinate: str = "half_pixel"
    scales: tuple[float, ...] = ()
    rounding: str = "round_prefer_floor"
    cubic_a: float = -0.75
    exclude_outside: bool = False
    antialias: bool = False

    def __post_init__(self) -> None:
        for name, known in (("mode", MODES), ("coordinate", COORDINATES), ("rounding", ROUNDINGS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, and is {getattr(self, name)!r}")

    def check(self, x: TensorType) -> None:
        """Raise unless x can be resized to the shape."""
        scales = len(self.scales) in (0, x.rank) and min(self.scales, default=1) > 0
        if x.rank != len(self.shape) or not scales or min(*self.shape, *x.shape, 1) < 1:
            raise ShapeError(
                f"{x} cannot be resized to {list(self.shape)} with scales {self.scales}: each axis needs an extent of "
                "at least 1 and, if scales are given, one above 0"
            )
        if not x.dtype.is_float and self.mode != "nearest":
            raise ShapeError(f"{self.mode} interpolation needs floating-point elements, and got {x}; convert it first")

    def axes(self, extents: Shape) -> dict[int, Interpolation]:
        """The interpolation of each axis that changes."""
        found = {}
        for axis, (before, after) in enumerate(zip(extents, self.shape)):
            scale = self.scales[axis] if self.scales else after / before
            if before != after or scale != 1:
                found[axis] = Interpolation(
                    before,
                    after,
                    scale,
                    self.mode,
                    self.coordinate,
                    self.rounding,
                    self.cubic_a,
                    self.exclude_outside,
                    self.antialias,
                )
        return found

    def tables(self, extents: Shape) -> dict[int, Table]:
        """For each axis that changes, the inputs that each output reads."""
        return {axis: found.table for axis, found in self.axes(extents).items()}

    def steps(self, shape: Shape) -> tuple[_Step, ...]:
        """The steps from an input of a shape to the output, axis by axis."""
        raise NotImplementedError

    def flops(self, inputs: Types, outputs: Types) -> int:
        """A product and an addition a weight, axis by axis."""
        return _flops(self.steps(inputs[0].shape))

    def workspace(self, inputs: Types, outputs: Types) -> int:
        """Planes between two axes, and a term of the sum."""
        return _workspace(inputs[0], self.steps(inputs[0].shape))

    def compute(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray) -> None:
        """Axis by axis, a few planes at a time."""
        _interpolate(inputs[0], outputs[0], self.steps(inputs[0].shape), workspace)


@register
@dataclass(frozen=True)
class Resize(_Interpolation):
    """x interpolated to `shape`."""

    name: ClassVar[str] = "resize"

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """The shape stated."""
        self.check(inputs[0])
        return (inputs[0].with_shape(self.shape),)

    def indexing(self, inputs: Types, outputs: Types) -> Axes:
        """All along the axes that change."""
        f, changed = Factors(), [*self.axes(inputs[0].shape)]
        y = f.row("a", self.shape)
        given = tuple(ONE if i in changed else dim for i, dim in enumerate(y))
        return f.axes([given], [y], whole=[f"a{i}" for i in changed])

    def part(self, part: Part) -> Op | None:
        """To the part's shape."""
        return replace(self, shape=part.outputs[0])

    def vjp(self, b: Builder, inputs: Values, outputs: Values, cotangents: Cotangents) -> Cotangents:
        """It is linear: the transposed tables."""
        (x,), g = inputs, only(cotangents)
        grad = ResizeGrad(**attributes(self, _Interpolation), extents=x.shape)
        return [b.apply(grad, g) if b.wants(x) else None]

    def steps(self, shape: Shape) -> tuple[_Step, ...]:
        """By the tables."""
        return _steps(shape, self.tables(shape))


@register
@dataclass(frozen=True)
class ResizeGrad(_Interpolation):
    """The adjoint of `Resize`: g of the resized shape → dx.

    Attributes:
        extents: shape of dx.
    """

    name: ClassVar[str] = "resize_grad"
    extents: Shape = ()

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """The shape of what was resized."""
        (g,) = inputs
        dx = g.with_shape(self.extents)
        self.check(dx)
        if g.shape != self.shape or not g.dtype.is_float:
            raise ShapeError(f"the gradient must be floating-point {list(self.shape)}, and is {g}")
        return (dx,)

    def indexing(self, inputs: Types, outputs: Types) -> Axes:
        """All along the axes that change."""
        f, changed = Factors(), [*self.axes(self.extents)]
        y = f.row("a", self.extents)
        given = tuple(ONE if i in changed else dim for i, dim in enumerate(y))
        return f.axes([given], [y], whole=[f"a{i}" for i in changed])

    def part(self, part: Part) -> Op:
        """To the part's shape."""
        return replace(self, shape=part.inputs[0], extents=part.outputs[0])

    def vjp(self, b: Builder, inputs: Values, outputs: Values, cotangents: Cotangents) -> Cotangents:
        """It is linear, and resizing is its adjoint."""
        (g,), t = inputs, only(cotangents)
        return [b.apply(Resize(**attributes(self, _Interpolation)), t) if b.wants(g) else None]

    def steps(self, shape: Shape) -> tuple[_Step, ...]:
        """By the transposed tables, applied from the resized shape."""
        return _steps(shape, {axis: table.transposed for axis, table in self.tables(self.extents).items()})


@dataclass(frozen=True, eq=False)
class _Step:
    """One axis resized: [lead, inputs, trail] → [lead, outputs, trail] of each plane.

    Attributes:
        planes: of the whole tensor: extents before the first axis that changes.
    """

    table: Table
    planes: int
    lead: int
    inputs: int
    outputs: int
    trail: int

    @property
    def size(self) -> int:
        """Elements of a plane after the step."""
        return self.lead * self.outputs * self.trail


def _steps(shape: Shape, tables: dict[int, Table]) -> tuple[_Step, ...]:
    """One step an axis that changes, last axis first where it shrinks, since that leaves less for the others."""
    first = min(tables, default=0)
    planes = math.prod(shape[:first])
    order = sorted(tables, key=lambda axis: (tables[axis].indices.shape[1] / tables[axis].inputs, axis))
    now, steps = list(shape), []
    for axis in order:
        before, now[axis] = now[axis], tables[axis].indices.shape[1]
        lead, trail = math.prod(now[first:axis]), math.prod(now[axis + 1 :])
        steps.append(_Step(tables[axis], planes, lead, before, now[axis], trail))
    return tuple(steps)


def _flops(steps: Sequence[_Step]) -> int:
    terms = ((0 if step.table.weights is None else 2 * len(step.table.indices)) * step.size for step in steps)
    return sum(terms) * (steps[0].planes if steps else 0)


def _plane_count(steps: Sequence[_Step]) -> int:
    """Planes that are worked on together."""
    return max(1, min(steps[0].planes, BLOCK // max(step.size for step in steps)))


def _parts(steps: Sequence[_Step], itemsize: int) -> list[int]:
    """Bytes of the two results between steps and of a term, for one block of planes."""
    if not steps:
        return [0, 0, 0]
    count = _plane_count(steps) * itemsize
    between = [step.size for step in steps[:-1]]
    terms = [step.size for step in steps if len(step.table.indices) > 1]
    return [align_up(count * max(sizes, default=0), 64) for sizes in (between[0::2], between[1::2], terms)]


def _workspace(x: TensorType, steps: Sequence[_Step]) -> int:
    return sum(_parts(steps, x.dtype.itemsize))


def _interpolate(x: np.ndarray, y: np.ndarray, steps: Sequence[_Step], workspace: np.ndarray) -> None:
    if not steps:
        np.copyto(y, x)
        return
    even, odd, _ = _parts(steps, x.itemsize)
    between = [workspace[:even].view(x.dtype), workspace[even : even + odd].view(x.dtype)]
    term = workspace[even + odd :].view(x.dtype)
    planes, count = steps[0].planes, _plane_count(steps)
    before, after = x.reshape(planes, -1), y.reshape(planes, -1)
    for start in range(0, planes, count):
        source, rows = before[start : start + count], min(count, planes - start)
        for i, step in enumerate(steps):
            last = i == len(steps) - 1
            target = after[start : start + rows] if last else between[i % 2][: rows * step.size]
            shape = (rows * step.lead, step.outputs, step.trail)
            _apply(step, source.reshape(rows * step.lead, step.inputs, step.trail), target.reshape(shape), term)
            source = target


def _apply(step: _Step, source: np.ndarray, target: np.ndarray, memory: np.ndarray) -> None:
    # mode="clip" lets take write straight into its target; every index is in range.
    indices, weights = step.table.indices, step.table.weights
    np.take(source, indices[0], axis=1, out=target, mode="clip")
    if weights is None:
        return
    factors = weights.astype(target.dtype)[:, :, None]
    target *= factors[0]
    for index, factor in zip(indices[1:], factors[1:]):
        term = memory[: target.size].reshape(target.shape)
        np.take(source, index, axis=1, out=term, mode="clip")
        term *= factor
        target += term


def resize(
    b: Builder,
    x: Value,
    shape: Sequence[int],
    *,
    mode: str = "linear",
    coordinate: str = "half_pixel",
    scales: Sequence[float] = (),
    rounding: str = "round_prefer_floor",
    cubic_a: float = -0.75,
    exclude_outside: bool = False,
    antialias: bool = False,
) -> Value:
    """`x` interpolated to `shape` (all axes); see `Resize` for the rest.

    Raises:
        ShapeError: an attribute is unknown, or x cannot be resized so.
        UnsupportedError: an axis is too long for its table to fit a graph.
    """
    try:
        op = Resize(
            tuple(shape), mode, coordinate, tuple(scales), rounding, cubic_a, bool(exclude_outside), bool(antialias)
        )
    except ValueError as error:
        raise ShapeError(f"resize: {error}") from None
    for before, after in zip(x.shape, op.shape):
        if before != after and max(before, after) > MOST_POSITIONS:
            raise UnsupportedError(
                f"resize: an axis of {before:,} elements becomes one of {after:,}; "
                f"foreplan resizes axes of {MOST_POSITIONS:,} elements at most"
            )
    return b.apply(op, x)

"""Ops that view the same bytes in another shape: reshape, transpose, slice, broadcast. They cost nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from foreplan.base.errors import ShapeError
from foreplan.graph import Builder, Cost, Op, TensorType, Value, View, op_named, register
from foreplan.graph.axes import Axes, Dim, Factors, Part, in_c_order
from foreplan.graph.op import Arrays, Cotangents, Types, Values, only
from foreplan.graph.types import Shape, broadcast_shapes


@dataclass(frozen=True)
class ViewOp(Op):
    """An op whose output is a window onto its input. Lowering runs no kernel for it; `compute` serves folding."""

    is_view: ClassVar[bool] = True

    def cost(self, inputs: Types, outputs: Types) -> Cost:
        """Nothing: no byte is moved."""
        return Cost(0, 0)


@register
@dataclass(frozen=True)
class Reshape(ViewOp):
    """The same elements in C order, in another shape.

    Attributes:
        shape: as many elements as the input has.
    """

    name: ClassVar[str] = "reshape"
    shape: Shape

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """The new shape, if it holds as many elements."""
        (x,) = inputs
        if math.prod(self.shape) != x.size:
            raise ShapeError(
                f"{x} has {x.size} elements and does not fit the shape {list(self.shape)} of {math.prod(self.shape)}"
            )
        return (x.with_shape(self.shape),)

    def indexing(self, inputs: Types, outputs: Types) -> Axes | None:
        """What both shapes have in common."""
        return in_c_order(inputs[0].shape, self.shape) if inputs[0].size else None

    def part(self, part: Part) -> Op | None:
        """To the part's shape."""
        return Reshape(part.outputs[0])

    def vjp(self, b: Builder, inputs: Values, outputs: Values, cotangents: Cotangents) -> Cotangents:
        """Back to the input's shape."""
        return [reshape(b, only(cotangents), inputs[0].shape)]

    def view(self, input: TensorType, strides: tuple[int, ...]) -> View | None:
        """Always for dense inputs; for strided ones, if axes are only split, or contiguous axes are merged."""
        window = np.lib.stride_tricks.as_strided(np.empty(0, input.dtype.numpy), input.shape, strides)
        try:
            window = np.reshape(window, self.shape, copy=False)
        except ValueError:
            return None
        return View(0, window.strides)

    def compute(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray) -> None:
        """Copy."""
        np.copyto(outputs[0], inputs[0].reshape(self.shape))


@register
@dataclass(frozen=True)
class Transpose(ViewOp):
    """Axes in another order.

    Attributes:
        perm: axis i of the output is axis perm[i] of the input.
    """

    name: ClassVar[str] = "transpose"
    perm: tuple[int, ...]

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """The permuted shape."""
        (x,) = inputs
        if sorted(self.perm) != list(range(x.rank)):
            raise ShapeError(f"{list(self.perm)} is not a permutation of the axes of {x}")
        return (x.with_shape(tuple(x.shape[i] for i in self.perm)),)

    def indexing(self, inputs: Types, outputs: Types) -> Axes:
        """In another order."""
        f = Factors()
        x = f.row("a", inputs[0].shape)
        return f.axes([x], [tuple(x[i] for i in self.perm)])

    def vjp(self, b: Builder, inputs: Values, outputs: Values, cotangents: Cotangents) -> Cotangents:
        """The inverse permutation."""
        return [transpose(b, only(cotangents), tuple(int(i) for i in np.argsort(self.perm)))]

    def view(self, input: TensorType, strides: tuple[int, ...]) -> View | None:
        """Strides in the new order."""
        return View(0, tuple(strides[i] for i in self.perm))

    def compute(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray) -> None:
        """Copy."""
        np.copyto(outputs[0], inputs[0].transpose(self.perm))


@register
@dataclass(frozen=True)
class Slice(ViewOp):
    """y = x[starts[0] :: steps[0], …], `shape` elements along each axis.

    Attributes:
        starts: first index along each axis, not negative.
        shape: of the output.
        steps: index step along each axis; negative ones walk backward.
    """

    name: ClassVar[str] = "slice"
    starts: tuple[int, ...]
    shape: Shape
    steps: tuple[int, ...]

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """The shape stated, if every index exists."""
        (x,) = inputs
        if not len(self.starts) == len(self.shape) == len(self.steps) == x.rank or 0 in self.steps:
            raise ShapeError(
                f"starts {self.starts}, shape {self.shape} and steps {self.steps} need one entry for each axis of {x}, "
                "and no step may be 0"
            )
        for start, count, step, extent in zip(self.starts, self.shape, self.steps, x.shape):
            if count and not (0 <= start < extent and 0 <= start + (count - 1) * step < extent):
                raise ShapeError(f"{count} elements from {start} in steps of {step} leave an axis of {extent} in {x}")
        return (x.with_shape(self.shape),)

    def indexing(self, inputs: Types, outputs: Types) -> Axes:
        """The windows are single elements."""
        f = Factors()
        places = [*enumerate(zip(self.starts, self.shape, self.steps))]
        x = tuple(f.window(start, (f"a{i}", count, step)) for i, (start, count, step) in places)
        return f.axes([x], [tuple(Dim(((f"a{i}", 1),)) for i, _ in places)])

    def part(self, part: Part) -> Op | None:
        """From the part's stretch between the first and the last element."""
        steps = tuple(step * part.places.get(f"a{i}", (0, 0, 1))[2] for i, step in enumerate(self.steps))
        return Slice(tuple(part.windows[0, i][0] for i in range(len(steps))), part.outputs[0], steps)

    def vjp(self, b: Builder, inputs: Values, outputs: Values, cotangents: Cotangents) -> Cotangents:
        """The cotangent placed among zeros."""
        return [unslice(b, only(cotangents), inputs[0].shape, self.starts, self.steps)]

    def view(self, input: TensorType, strides: tuple[int, ...]) -> View | None:
        """An offset and longer steps."""
        offset = sum(start * stride for start, stride in zip(self.starts, strides)) if 0 not in self.shape else 0
        return View(offset, tuple(step * stride for step, stride in zip(self.steps, strides)))

    def compute(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray) -> None:
        """Copy."""
        np.copyto(outputs[0], inputs[0][slices(self.starts, self.shape, self.steps)])


@register
@dataclass(frozen=True)
class Broadcast(ViewOp):
    """x repeated along new leading axes and axes of extent 1, by NumPy's rule.

    Attributes:
        shape: of the output.
    """

    name: ClassVar[str] = "broadcast"
    shape: Shape

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """The shape stated, if the input broadcasts to it."""
        (x,) = inputs
        if broadcast_shapes(x.shape, self.shape) != self.shape:
            raise ShapeError(f"{x} does not broadcast to {list(self.shape)}: each extent must be the same or 1")
        return (x.with_shape(self.shape),)

    def indexing(self, inputs: Types, outputs: Types) -> Axes:
        """From the right."""
        f = Factors()
        return f.axes([f.spread("a", inputs[0].shape, len(self.shape))], [f.row("a", self.shape)])

    def part(self, part: Part) -> Op | None:
        """To the part's shape."""
        return Broadcast(part.outputs[0])

    def vjp(self, b: Builder, inputs: Values, outputs: Values, cotangents: Cotangents) -> Cotangents:
        """Sum over what was repeated."""
        return [sum_to_shape(b, only(cotangents), inputs[0].shape)]

    def view(self, input: TensorType, strides: tuple[int, ...]) -> View | None:
        """Steps of zero along repeated axes."""
        lead = len(self.shape) - input.rank
        return View(
            0,
            tuple(
                0 if i < lead or (input.shape[i - lead] == 1 and extent != 1) else strides[i - lead]
                for i, extent in enumerate(self.shape)
            ),
        )

    def compute(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray) -> None:
        """Copy."""
        np.copyto(outputs[0], inputs[0])


def slices(starts: Sequence[int], shape: Shape, steps: Sequence[int]) -> tuple[slice, ...]:
    """Python slices that pick `shape` elements from `starts` in `steps`."""
    ends = (start + count * step for start, count, step in zip(starts, shape, steps))
    return tuple(
        slice(start, None if end < 0 else end, step) if count else slice(0, 0)
        for start, end, step, count in zip(starts, ends, steps, shape)
    )


def reshape(b: Builder, x: Value, shape: Sequence[int]) -> Value:
    """`x` in another shape, one extent of which may be -1; `x` itself if it has that shape already."""
    known = math.prod(extent for extent in shape if extent != -1)
    full = tuple(x.type.size // known if extent == -1 and known else extent for extent in shape)
    return x if full == x.shape else b.apply(Reshape(full), x)


def transpose(b: Builder, x: Value, perm: Sequence[int]) -> Value:
    """`x` with its axes permuted."""
    return x if list(perm) == list(range(len(x.shape))) else b.apply(Transpose(tuple(perm)), x)


def broadcast_to(b: Builder, x: Value, shape: Shape) -> Value:
    """`x` repeated to a shape."""
    return x if x.shape == shape else b.apply(Broadcast(tuple(shape)), x)


def sum_to_shape(b: Builder, x: Value, shape: Shape, wide: bool = False) -> Value:
    """The adjoint of broadcasting: sum `x` over the axes along which `shape` was broadcast to it.

    Args:
        wide: whether sums have the wide type of x's elements.
    """
    lead = len(x.shape) - len(shape)
    axes = tuple(i for i, extent in enumerate(x.shape) if i < lead or (shape[i - lead] == 1 and extent != 1))
    if axes:
        x = b.apply(op_named("reduce", how="sum", axes=axes, wide=wide and x.dtype.is_narrow), x)
    return reshape(b, x, shape)


def slice_axis(b: Builder, x: Value, axis: int, start: int, count: int, step: int = 1) -> Value:
    """`count` elements of one axis."""
    starts, steps, shape = [0] * len(x.shape), [1] * len(x.shape), list(x.shape)
    starts[axis], steps[axis], shape[axis] = start, step, count
    return x if tuple(shape) == x.shape and step == 1 else b.apply(Slice(tuple(starts), tuple(shape), tuple(steps)), x)


def unslice(b: Builder, g: Value, shape: Shape, starts: Sequence[int], steps: Sequence[int]) -> Value:
    """`g` among zeros, at the places that a slice reads; `g` itself if the slice reads everything in order."""
    if g.shape == tuple(shape) and all(step == 1 for step in steps):
        return g
    return b.apply(op_named("unslice", shape=tuple(shape), starts=tuple(starts), steps=tuple(steps)), g)

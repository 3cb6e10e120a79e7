"""Ops that put tensors into larger ones: concat, pad, unslice; and `split`, which cuts a tensor into pieces."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from foreplan.base.errors import ShapeError
from foreplan.graph import Builder, Node, Op, TensorType, Value, register
from foreplan.graph.axes import ONE, Axes, Factors, Part
from foreplan.graph.op import Arrays, Cotangents, Types, Values, only
from foreplan.graph.types import Shape
from foreplan.ops.map import elementwise
from foreplan.ops.reduce import normalize_axes, reduce
from foreplan.ops.shape import Slice, slice_axis, slices, unslice

MODES = ("constant", "edge", "reflect", "wrap")


@dataclass(frozen=True)
class CopyOp(Op):
    """An op that only moves elements, from inputs with any strides."""

    any_strides: ClassVar[bool] = True
    moves: ClassVar[bool] = True

    def flops(self, inputs: Types, outputs: Types) -> int:
        """None."""
        return 0


@register
@dataclass(frozen=True)
class Concat(CopyOp):
    """y = the inputs one behind the other along one axis.

    Attributes:
        axis: not negative.
    """

    name: ClassVar[str] = "concat"
    axis: int

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """All inputs have one element type and equal extents along the other axes."""
        if not inputs:
            raise ShapeError("concat needs at least one input")
        first = inputs[0]
        if not 0 <= self.axis < first.rank:
            raise ShapeError(f"{first} has no axis {self.axis}")
        for type in inputs[1:]:
            alike = (type.dtype, type.rank) == (first.dtype, first.rank)
            if not alike or self._without(type.shape) != self._without(first.shape):
                raise ShapeError(f"{first} and {type} differ in more than axis {self.axis}; all else must be equal")
        total = sum(type.shape[self.axis] for type in inputs)
        return (first.with_shape((*first.shape[: self.axis], total, *first.shape[self.axis + 1 :])),)

    def indexing(self, inputs: Types, outputs: Types) -> Axes:
        """All along the axis."""
        f, at = Factors(), self.axis
        y = f.row("a", outputs[0].shape)
        return f.axes([(*y[:at], ONE, *y[at + 1 :])] * len(inputs), [y], whole=[f"a{at}"])

    def _without(self, shape: Shape) -> Shape:
        return (*shape[: self.axis], -1, *shape[self.axis + 1 :])

    def vjp(self, b: Builder, inputs: Values, outputs: Values, cotangents: Cotangents) -> Cotangents:
        """Each input gets its own part."""
        g = only(cotangents)
        gradients: list[Value | None] = []
        start = 0
        for x in inputs:
            count = x.shape[self.axis]
            gradients.append(slice_axis(b, g, self.axis, start, count) if b.wants(x) else None)
            start += count
        return gradients

    def parts(self, inputs: Types, outputs: Types) -> tuple[tuple[int, int, int], ...]:
        """All inputs, if each is one stretch of the output: every axis before this one has extent 1."""
        if any(extent != 1 for extent in outputs[0].shape[: self.axis]):
            return ()
        starts = itertools.accumulate((type.nbytes for type in inputs), initial=0)
        return tuple((0, i, start) for i, (_, start) in enumerate(zip(inputs, starts)))

    def compute(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray) -> None:
        """One copy an input, except for inputs that already lie in place."""
        before: tuple[slice, ...] = (slice(None),) * self.axis
        start = 0
        for x in inputs:
            end = start + x.shape[self.axis]
            place = outputs[0][(*before, slice(start, end))]
            if x.__array_interface__["data"] != place.__array_interface__["data"]:
                np.copyto(place, x)
            start = end


@register
@dataclass(frozen=True)
class Pad(CopyOp):
    """y = x with `pads[i] = (low, high)` elements added at both ends of axis i.

    Attributes:
        pads: one pair an axis, none negative (`pad` crops where users write negative ones).
        value: of the added elements in the mode `constant`.
        mode: constant; edge (the outermost element again); reflect (mirrored at the outermost element, which is not
            repeated); wrap (the other end continues).
    """

    name: ClassVar[str] = "pad"
    moves: ClassVar[bool] = False  # an element of the fill is a number
    keeps_precision: ClassVar[bool] = True
    pads: tuple[tuple[int, int], ...]
    value: float = 0.0
    mode: str = "constant"

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, and is {self.mode!r}")

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """The padded shape, if there is enough to mirror or wrap."""
        (x,) = inputs
        if len(self.pads) != x.rank or any(low < 0 or high < 0 for low, high in self.pads):
            raise ShapeError(f"pads must be one pair of numbers >= 0 for each axis of {x}, and are {self.pads}")
        spare = {"constant": None, "edge": None, "reflect": 1, "wrap": 0}[self.mode]
        for (low, high), extent in zip(self.pads, x.shape):
            if spare is not None and max(low, high) > max(0, extent - spare):
                raise ShapeError(f"mode {self.mode} cannot add {max(low, high)} elements to an axis of {extent} in {x}")
            if self.mode == "edge" and not extent and low + high:
                raise ShapeError(f"mode edge has no element to repeat in {x}")
        return (x.with_shape(tuple(low + extent + high for (low, high), extent in zip(self.pads, x.shape))),)

    def indexing(self, inputs: Types, outputs: Types) -> Axes:
        """All along the axes that get something."""
        f = Factors()
        y = f.row("a", outputs[0].shape)
        padded = [i for i, pair in enumerate(self.pads) if any(pair)]
        x = tuple(ONE if i in padded else dim for i, dim in enumerate(y))
        return f.axes([x], [y], whole=[f"a{i}" for i in padded])

    def vjp(self, b: Builder, inputs: Values, outputs: Values, cotangents: Cotangents) -> Cotangents:
        """The middle of the cotangent; the other modes also add the margins' cotangents where the margins were read."""
        (x,), g = inputs, only(cotangents)
        for axis, ((low, high), extent) in enumerate(zip(self.pads, x.shape)):
            middle = slice_axis(b, g, axis, low, extent)
            if self.mode != "constant":
                for start, count, end in ((0, low, "low"), (low + extent, high, "high")):
                    if count:
                        margin = slice_axis(b, g, axis, start, count)
                        back = self._margin_gradient(b, margin, axis, extent, end)
                        middle = elementwise(b, lambda m, s: m + s, middle, back)
            g = middle
        return [g]

    def _margin_gradient(self, b: Builder, g: Value, axis: int, extent: int, end: str) -> Value:
        """The cotangent of a margin, added up at the places that the margin was read from, among zeros."""
        count, shape = g.shape[axis], list(g.shape)
        starts, steps = [0] * len(shape), [1] * len(shape)
        shape[axis] = extent
        if self.mode == "edge":
            g = reduce(b, "sum", g, axis, keepdims=True)
            starts[axis] = 0 if end == "low" else extent - 1
        elif self.mode == "reflect":
            starts[axis] = count if end == "low" else extent - 2
            steps[axis] = -1
        else:
            starts[axis] = extent - count if end == "low" else 0
        return unslice(b, g, tuple(shape), starts, steps)

    def compute(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray) -> None:
        """One copy (or fill) for each combination of margin and middle along the axes."""
        (x,), (y,) = inputs, outputs
        for parts in itertools.product(*map(self.stretches, self.pads, x.shape)):
            target = y[tuple(part[0] for part in parts)]
            if all(part[1] is not None for part in parts):
                np.copyto(target, x[tuple(part[1] for part in parts)])
            else:
                target.fill(self.value)

    def stretches(self, pads: tuple[int, int], extent: int) -> Iterator[tuple[slice, slice | None]]:
        """(slice of y, slice of x that goes there, or None for the value) along one axis."""
        low, high = pads
        yield slice(low, low + extent), slice(0, extent)
        sources: tuple[slice | None, slice | None] = {
            "constant": (None, None),
            "edge": (slice(0, 1), slice(extent - 1, extent)),
            "reflect": (
                slice(low, 0, -1),
                slice(extent - 2, extent - 2 - high if extent - 2 - high >= 0 else None, -1),
            ),
            "wrap": (slice(extent - low, extent), slice(0, high)),
        }[self.mode]
        if low:
            yield slice(0, low), sources[0]
        if high:
            yield slice(low + extent, low + extent + high), sources[1]


@register
@dataclass(frozen=True)
class Unslice(CopyOp):
    """y = zeros of `shape`, with y[starts[0] :: steps[0], …] = x; the adjoint of `slice`.

    Attributes:
        shape: of the output.
        starts: index of the first element of x along each axis, not negative.
        steps: index step along each axis; negative ones walk backward.
    """

    name: ClassVar[str] = "unslice"
    moves: ClassVar[bool] = False  # an element of the fill is a number
    keeps_precision: ClassVar[bool] = True
    shape: Shape
    starts: tuple[int, ...]
    steps: tuple[int, ...]

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """The shape stated, if a slice of it has the input's shape."""
        (x,) = inputs
        whole = x.with_shape(self.shape)
        Slice(self.starts, x.shape, self.steps).infer([whole])
        return (whole,)

    def indexing(self, inputs: Types, outputs: Types) -> Axes:
        """All along the axes that get something."""
        f = Factors()
        y = f.row("a", self.shape)
        filled = [
            i
            for i, extent in enumerate(inputs[0].shape)
            if (extent, self.starts[i], self.steps[i]) != (self.shape[i], 0, 1)
        ]
        return f.axes([tuple(ONE if i in filled else dim for i, dim in enumerate(y))], [y], [f"a{i}" for i in filled])

    def part(self, part: Part) -> Op:
        """Of the part's shape."""
        return replace(self, shape=part.outputs[0])

    def vjp(self, b: Builder, inputs: Values, outputs: Values, cotangents: Cotangents) -> Cotangents:
        """The slice."""
        return [b.apply(Slice(self.starts, inputs[0].shape, self.steps), only(cotangents))]

    def compute(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray) -> None:
        """Zeros, then one copy."""
        (x,), (y,) = inputs, outputs
        y.fill(0)
        np.copyto(y[slices(self.starts, x.shape, self.steps)], x)


def concat(b: Builder, xs: Sequence[Value], axis: int = 0) -> Value:
    """Values one behind the other along an axis (negative ones count from the end); the only one as itself."""
    (found,) = normalize_axes(axis, len(xs[0].shape))
    return xs[0] if len(xs) == 1 else b.apply(Concat(found), *xs)


def pad(b: Builder, x: Value, pads: Sequence[tuple[int, int]], value: float = 0.0, mode: str = "constant") -> Value:
    """`x` with margins of (low, high) elements along each axis; a negative margin takes elements away.

    Raises:
        ShapeError: there are not enough elements to take away, mirror or wrap.
    """
    for axis, (low, high) in enumerate(pads):
        cut_low, cut_high = max(0, -low), max(0, -high)
        left = x.shape[axis] - cut_low - cut_high
        if left < 0:
            raise ShapeError(f"pads {list(pads)} take away more than axis {axis} of {x!r} has")
        if cut_low or cut_high:
            x = slice_axis(b, x, axis, cut_low, left)
    margins = tuple((max(0, low), max(0, high)) for low, high in pads)
    return b.apply(Pad(margins, value, mode), x) if any(low or high for low, high in margins) else x


def sum_of_unslices(b: Builder, nodes: Sequence[Node]) -> Value | None:
    """The sum of unslices that lie side by side, without adding zeros: their inputs concatenated.

    The cotangents of a split tensor's pieces are such a sum. None if the nodes are not unslices of one shape with steps
    of 1, or if they leave gaps or overlap.
    """
    places = [(node.op, node.inputs[0]) for node in nodes if isinstance(node.op, Unslice)]
    if len(places) != len(nodes) or any(step != 1 for op, _ in places for step in op.steps):
        return None
    first, rank = places[0][0], len(places[0][0].shape)
    for axis in range(rank):
        others = [i for i in range(rank) if i != axis]
        places.sort(key=lambda place: place[0].starts[axis])
        ends = [op.starts[axis] + x.shape[axis] for op, x in places]
        if (
            all(op.shape == first.shape and x.dtype == places[0][1].dtype for op, x in places)
            and len({tuple((op.starts[i], x.shape[i]) for i in others) for op, x in places}) == 1
            and all(end == op.starts[axis] for end, (op, _) in zip(ends, places[1:]))
        ):
            joined = concat(b, [x for _, x in places], axis)
            return unslice(b, joined, first.shape, places[0][0].starts, first.steps)
    return None


def split(b: Builder, x: Value, sizes: Sequence[int], axis: int = 0) -> list[Value]:
    """`x` cut along an axis into pieces of these sizes, all of them views.

    Raises:
        ShapeError: the sizes do not add up to the axis.
    """
    (found,) = normalize_axes(axis, len(x.shape))
    if sum(sizes) != x.shape[found] or any(size < 0 for size in sizes):
        raise ShapeError(f"the sizes {list(sizes)} must be 0 or more and add up to axis {found} of {x!r}")
    starts = itertools.accumulate(sizes, initial=0)
    return [slice_axis(b, x, found, start, size) for start, size in zip(starts, sizes)]

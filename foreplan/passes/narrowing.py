"""How ops compute a box of their results: the op that does, and the box that it reads of each input.

A box is a slice: a first index, an extent and a step along each axis. `Op.indexing` tells all of it: a range of an
axis of the result is ranges of factors, and these are ranges of the axes of all other tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from foreplan.graph import Node, Op
from foreplan.graph.axes import REDUCTIONS, Axes, Dim, Part, Place, dense_place, factor_places, named, window_place
from foreplan.graph.types import Shape
from foreplan.ops.shape import Slice


@dataclass(frozen=True)
class Narrowed:
    """What computes a box of a node's results.

    Attributes:
        op: takes the boxes of the inputs.
        inputs: the box of each; None: all of it.
        outputs: the box of each output, of which the first is the one that was asked for.
    """

    op: Op
    inputs: Sequence[Slice | None]
    outputs: Sequence[Slice]


def narrowed(node: Node, box: Slice) -> Narrowed | None:
    """What computes a box of a node's first output; None: nothing does, or its op does not say how."""
    walk = _walk(node)
    if walk.axes is None or 0 in box.shape or node.op.is_random:
        return None
    if box not in walk.boxes:
        walk.boxes[box] = walk.box(box)
    return walk.boxes[box]


def summed(node: Node, factor: str, start: int, count: int) -> Narrowed | None:
    """What computes the summand of a node's results that is of a range of one of `sums_of`; None: nothing does."""
    walk = _walk(node)
    return None if walk.axes is None else walk.part({factor: (start, count, 1)}, list(map(whole, walk.outputs)))


def axes_of(node: Node) -> Axes | None:
    """What a node's op says of the axes of its tensors."""
    return _walk(node).axes


def sums_of(node: Node) -> Mapping[str, tuple[int, str]]:
    """The extent of each factor that `summed` takes a range of, and how results of its ranges make the whole."""
    walk = _walk(node)
    if walk.axes is None:
        return {}
    return {name: (walk.axes.extents[name], walk.axes.sums[name]) for name in walk.summed}


def summed_axes(node: Node) -> dict[int, str]:
    """The factors that a node adds up, by the axis of its first input that is such a factor."""
    walk = _walk(node)
    if walk.axes is None or not walk.axes.inputs:
        return {}
    terms = {dim.terms: axis for axis, dim in enumerate(walk.axes.inputs[0]) if dim.dense}
    sums = [name for name in walk.summed if walk.axes.sums[name] == "sum"]
    return {terms[(name, 1),]: name for name in sums if ((name, 1),) in terms}


def box_of(places: Iterable[Place]) -> Slice:
    """The box of a first index, an extent and a step along each axis."""
    starts, extents, steps = tuple(zip(*places)) or ((), (), ())
    return Slice(starts, extents, steps)


def whole(shape: Shape) -> Slice:
    """The box that is all of a tensor."""
    return box_of((0, extent, 1) for extent in shape)


def touched(box: Slice, shape: Shape) -> list[int]:
    """The axes along which a box leaves something out or changes the order."""
    return [i for i, extent in enumerate(shape) if (box.starts[i], box.shape[i], box.steps[i]) != (0, extent, 1)]


@dataclass(frozen=True)
class _Walked:
    """An axis of a tensor of a node; outputs come behind inputs."""

    tensor: int
    axis: int
    dim: Dim
    extent: int


class _Walk:
    """The axes of a node, by factor, with what was found of it."""

    def __init__(self, node: Node) -> None:
        self.op = node.op
        self.inputs = [value.shape for value in node.inputs]
        self.outputs = [value.shape for value in node.outputs]
        axes = node.op.indexing([value.type for value in node.inputs], [value.type for value in node.outputs])
        self.axes = axes
        self.boxes: dict[Slice, Narrowed | None] = {}
        if axes is None:
            return
        by_factor: dict[str, list[_Walked]] = {}
        always = []
        for tensor, (dims, shape) in enumerate(zip((*axes.inputs, *axes.outputs), (*self.inputs, *self.outputs))):
            for axis, (dim, extent) in enumerate(zip(dims, shape, strict=True)):
                if not dim.dense and len(dim.terms) == 1:
                    always.append(_Walked(tensor, axis, dim, extent))
                for name in named([dim]) if dim.dense or len(dim.terms) > 1 else ():
                    by_factor.setdefault(name, []).append(_Walked(tensor, axis, dim, extent))
        self.by_factor = by_factor
        self.always = always  # windows of one element, which may leave something out
        self.kept = set.intersection(*map(named, axes.outputs)) - axes.whole
        outside = set().union(*map(named, axes.outputs)) | axes.whole
        self.summed = [
            name
            for name, how in axes.sums.items()
            if how in REDUCTIONS and name in axes.extents and name not in outside
        ]
        self.rewrites = type(node.op).part is not Op.part

    def box(self, box: Slice) -> Narrowed | None:
        """As `narrowed`."""
        assert self.axes is not None
        places: dict[str, Place] = {}
        for axis, extent in enumerate(self.outputs[0]):
            place = box.starts[axis], box.shape[axis], box.steps[axis]
            dim = self.axes.outputs[0][axis]
            if place != (0, extent, 1) and dim.terms:
                found = factor_places(dim, place) if len(dim.terms) > 1 else {dim.terms[0][0]: place}
                if found is None:
                    return None
                places.update(found)
        if not self.kept.issuperset(places):
            return None
        return self.part(places, [box, *map(whole, self.outputs[1:])])

    def part(self, places: Mapping[str, Place], outputs: list[Slice]) -> Narrowed | None:
        """What computes ranges of factors, given the boxes of outputs if no other output walks them."""
        assert self.axes is not None
        extents, first = self.axes.extents, len(self.inputs)
        cuts: dict[int, list[Place]] = {}
        windows: dict[tuple[int, int], tuple[int, int, int]] = {}
        for walks in (*(self.by_factor.get(name, ()) for name in places), self.always):
            for walked in walks:
                tensor, axis, dim, extent = walked.tensor, walked.axis, walked.dim, walked.extent
                place: Place | None
                if tensor == first:
                    continue
                if not dim.dense:
                    found = window_place(dim, extent, places, extents)
                    if found is None:
                        return None
                    place, windows[tensor, axis] = found
                elif len(dim.terms) == 1:
                    place = places[dim.terms[0][0]]
                else:
                    place = dense_place(dim, places, extents)
                if place is None:
                    return None
                if place != (0, extent, 1):
                    if tensor not in cuts:
                        shape = self.inputs[tensor] if tensor < first else self.outputs[tensor - first]
                        cuts[tensor] = [(0, extent, 1) for extent in shape]
                    cuts[tensor][axis] = place
        boxes = {tensor: box_of(cut) for tensor, cut in cuts.items()}
        made = [boxes.get(at, box) for at, box in enumerate(outputs, first)]
        op: Op | None = self.op
        if self.rewrites:
            given = [boxes[i].shape if i in boxes else shape for i, shape in enumerate(self.inputs)]
            op = self.op.part(Part(given, [box.shape for box in made], places, windows))
        return None if op is None else Narrowed(op, [boxes.get(i) for i in range(first)], made)


_WALKS: WeakKeyDictionary[Node, _Walk] = WeakKeyDictionary()


def _walk(node: Node) -> _Walk:
    walk = _WALKS.get(node)
    if walk is None:
        walk = _WALKS[node] = _Walk(node)
    return walk

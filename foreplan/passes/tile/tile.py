"""A stretch of a graph part by part: what only the stretch reads of its own is never whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from foreplan.base.units import format_bytes
from foreplan.graph import Builder, Graph, Node, TensorType, Value
from foreplan.ops.join import concat
from foreplan.ops.map import elementwise
from foreplan.ops.shape import Slice
from foreplan.passes.narrowing import Narrowed, box_of, summed_axes, touched, whole
from foreplan.passes.rewrite import rewrite

SUMS = ("matmul", "conv", "conv_data_grad")  # the ops whose ranges of a summed factor are taken


@dataclass(frozen=True)
class Tile:
    """What runs in parts: a stretch, an axis, and what each part of it computes.

    The parts of the last nodes' results are joined along the axis; or added up, where it is an axis that these nodes
    sum over.

    Attributes:
        targets: the last node; or all nodes that read one tensor and whose results of parts are added up.
        axis: of the last node's result; or of that tensor.
        sums: whether the parts' results are added up.
        members: by node that runs in parts, in the graph's order: what each part runs.
    """

    targets: tuple[Node, ...]
    axis: int
    sums: bool
    members: Mapping[Node, Sequence[Narrowed]]

    @property
    def count(self) -> int:
        """How many parts there are."""
        return len(self.members[self.targets[-1]])

    def ends(self, graph: Graph, node: Node) -> Iterator[tuple[Value, list[Slice]]]:
        """What others read of a member, with the boxes that are joined; what is added up has none."""
        if self.sums and node in self.targets:
            return
        for i, value in enumerate(node.outputs):
            if value in graph.returned or any(reader not in self.members for reader in graph.readers[value]):
                yield value, [way.outputs[i] for way in self.members[node]]

    def never_whole(self, graph: Graph) -> list[Value]:
        """What exists only in parts."""
        made = [value for node in self.members if not node.op.is_view for value in node.outputs]
        ends = {value for node in self.members for value, _ in self.ends(graph, node)}
        whole = {value for node in self.targets for value in node.outputs}
        return [value for value in made if value not in ends and value not in whole]

    def saved_bytes(self, graph: Graph) -> int:
        """Bytes of what exists only in parts."""
        return sum(value.type.nbytes for value in self.never_whole(graph))

    def widened(self) -> float:
        """The flops of all parts together, beside those of the whole: windows at the edges of parts overlap."""
        whole = split = 1
        for node, ways in self.members.items():
            whole += node.op.cost([x.type for x in node.inputs], [x.type for x in node.outputs]).flops
            split += sum(way.op.cost(*types_of(node, way)).flops for way in ways)
        return split / whole

    def __str__(self) -> str:
        """`3 operations up to 'h.0.mlp.c_proj/matmul' run in 4 parts, along axis 1 of its result`."""
        whole = "its first input, which are added up" if self.sums else "its result"
        what = f"{len(self.members)} operations up to {self.targets[-1].name!r}"
        return f"{what} run in {self.count} parts, along axis {self.axis} of {whole}"


def tiled(graph: Graph, tile: Tile, note: str | None = None) -> Graph:
    """The graph with a stretch in parts, each of which runs before the next one begins.

    Args:
        note: what the graph says about it; None: the usual words, "": nothing.
    """
    graph = _together(graph, tile)
    made: dict[Value, Value] = {}

    def replace(b: Builder, node: Node, inputs: tuple[Value, ...]) -> Sequence[Value] | None:
        if node not in tile.members:
            return None
        if not made:
            usual = f"{tile}: {format_bytes(tile.saved_bytes(graph))} of its activations are never whole"
            b.notes += [usual] if note is None else [note] if note else []
            made.update(_Emission(b, graph, tile).run())
        return [made.get(value, value) for value in node.outputs]

    return rewrite(graph, replace)


def types_of(node: Node, way: Narrowed) -> tuple[list[TensorType], list[TensorType]]:
    """The types of what a part of a node reads and writes."""
    read = [x.type if cut is None else x.type.with_shape(cut.shape) for x, cut in zip(node.inputs, way.inputs)]
    return read, [x.type.with_shape(box.shape) for x, box in zip(node.outputs, way.outputs)]


def summed_axis(node: Node) -> int | None:
    """The axis of the first input that a product sums over, whose parts can be added to one another; or None."""
    op = node.op
    if op.name not in SUMS or getattr(op, "wide", False):
        return None
    return next(iter(summed_axes(node)), None)


def joined_axis(value: Value, boxes: Sequence[Slice]) -> int | None:
    """The axis along which boxes cover a tensor one behind the other, if they do; they may overlap."""
    axes = {axis for box in boxes for axis in touched(box, value.shape)}
    if len(axes) != 1 or any(set(box.steps) - {1} for box in boxes):
        return None
    (axis,) = axes
    at = [(box.starts[axis], box.starts[axis] + box.shape[axis]) for box in boxes]
    ends = [*(start for start, _ in at[1:]), value.shape[axis]]
    fits = at[0][0] == 0 and all(start < end <= stop for (start, stop), end in zip(at, ends))
    return axis if fits else None


def range_of(value: Value, axis: int, start: int, number: int) -> Slice:
    """The box of a range of one axis."""
    return box_of((start, number, 1) if i == axis else (0, extent, 1) for i, extent in enumerate(value.shape))


def _together(graph: Graph, tile: Tile) -> Graph:
    """The graph with its members one behind the other: what does not depend on them before, the others behind."""
    behind: set[Value] = set()
    first: list[Node] = []
    later: list[Node] = []
    end = graph.nodes.index(tile.targets[-1]) + 1
    for node in graph.nodes[:end]:
        if node in tile.members or not behind.isdisjoint(node.inputs):
            behind.update(node.outputs)
            if node not in tile.members:
                later.append(node)
        else:
            first.append(node)
    return dataclasses.replace(graph, nodes=(*first, *tile.members, *later, *graph.nodes[end:]))


@dataclass
class _Emission:
    """The nodes of all parts, one part after the other."""

    b: Builder
    graph: Graph
    tile: Tile
    cut: dict[tuple[Value, Slice], Value] = field(default_factory=dict)

    def run(self) -> dict[Value, Value]:
        """What others read of the members."""
        members, pieces, totals = self.tile.members, dict[Value, list[Value]](), dict[Value, Value]()
        summing = self.tile.targets if self.tile.sums else ()
        ends = {value: boxes for node in members for value, boxes in self.tile.ends(self.graph, node)}
        for part in range(self.tile.count):
            own: dict[Value, tuple[Value, Slice]] = {}
            for node, ways in members.items():
                way = ways[part]
                inputs = [self._input(own, value, cut) for value, cut in zip(node.inputs, way.inputs)]
                total = totals.get(node.outputs[0])
                if total is not None and summed_axis(node) is not None:
                    inputs, total = [*inputs[: node.op.accumulates], total], None
                self.b.kind, self.b.source = node.outputs[0].kind, node.source
                outputs = self.b.node(way.op, *inputs, name=f"{node.name}/part")
                own.update((old, (new, box)) for old, new, box in zip(node.outputs, outputs, way.outputs))
                if node in summing:
                    totals[node.outputs[0]] = outputs[0] if total is None else self._sum(node, total, outputs[0])
            for value, boxes in ends.items():
                pieces.setdefault(value, []).append(self._piece(value, own[value], boxes, part))
        found = {value: concat(self.b, some, self._axis(value, ends[value])) for value, some in pieces.items()}
        return found | totals

    def _input(self, own: Mapping[Value, tuple[Value, Slice]], value: Value, cut: Slice | None) -> Value:
        """What a part reads: of a member, what the part has of it; else a box of the whole."""
        if value in own:
            made, box = own[value]
            cut = whole(value.shape) if cut is None else cut
            starts = tuple(start - first for start, first in zip(cut.starts, box.starts))
            inner = Slice(starts, cut.shape, cut.steps)
            return made if not touched(inner, made.shape) else self._slice(made, inner)
        return value if cut is None else self._slice(value, cut)

    def _sum(self, node: Node, total: Value, more: Value) -> Value:
        return elementwise(self.b, lambda x, y: x + y, total, more, name=f"{node.name}/sum")

    def _slice(self, value: Value, box: Slice) -> Value:
        if (value, box) not in self.cut:
            self.cut[value, box] = self.b.apply(box, value, name=f"{value.name}/part")
        return self.cut[value, box]

    def _axis(self, value: Value, boxes: Sequence[Slice]) -> int:
        axis = joined_axis(value, boxes)
        assert axis is not None
        return axis

    def _piece(self, value: Value, made: tuple[Value, Slice], boxes: Sequence[Slice], part: int) -> Value:
        """What a part adds to a whole: from where it begins to where the next one does."""
        (piece, box), axis = made, self._axis(value, boxes)
        stop = boxes[part + 1].starts[axis] if part + 1 < len(boxes) else value.shape[axis]
        number = stop - box.starts[axis]
        return piece if number == box.shape[axis] else self._slice(piece, range_of(piece, axis, 0, number))

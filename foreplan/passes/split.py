"""Segments → parts, one after the other: what only a segment reads of its own is never whole.

A segment is split along an axis of its last result, whose parts are then joined; or along the axis that its last
product sums over, whose parts are added up in place.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from foreplan.base.errors import UsageError
from foreplan.base.patterns import TO, all_scopes, by_scope, close_names
from foreplan.base.units import format_bytes
from foreplan.graph import Builder, Graph, Node, TensorType, Value
from foreplan.ops.join import Concat, concat
from foreplan.ops.map import elementwise
from foreplan.ops.shape import Slice
from foreplan.passes.base import Pass
from foreplan.passes.narrowing import Narrowed, box_of, narrowed, summed, summed_axes, touched, whole
from foreplan.passes.rewrite import rewrite

LOSS = "loss"  # as the end of a range: the last operation
SUMS = ("matmul", "conv", "conv_data_grad")  # the ops whose ranges of a summed factor are taken


@dataclass(frozen=True)
class Parts:
    """How a segment runs in parts.

    Attributes:
        targets: the last node; or all products of one tensor whose parts are added up.
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

    def __str__(self) -> str:
        """`3 operations up to 'h.0.mlp.c_proj/matmul' run in 4 parts, along axis 1 of its result`."""
        whole = "its first input, which are added up" if self.sums else "its result"
        what = f"{len(self.members)} operations up to {self.targets[-1].name!r}"
        return f"{what} run in {self.count} parts, along axis {self.axis} of {whole}"


@dataclass(frozen=True)
class SplitSegments(Pass, requires=("forward", "plain ops"), ensures=("forward", "plain ops")):
    """Run segments in parts.

    Each part of a segment computes a range of one axis, from ranges of what it reads, before the next part begins. What
    the segment alone reads then exists a part at a time. Of the axes of its last result, and those that its products
    sum over, the one is taken along which the most bytes are never whole; of equal ones, that which moves the fewest.
    What cannot do with a part of it is computed whole, before.

    Requires: a forward graph. Ensures: the same results, up to the order of additions.

    Attributes:
        entries: the number of parts, by what `foreplan.base.patterns` takes for names, where each scope that matches
            is a segment of its own; or by a range `FIRST..LAST` of two scopes, as the model lists its operations.

    Raises:
        UsageError: an entry names nothing, or a segment that nothing splits.
    """

    entries: Mapping[str, int]

    def _run(self, graph: Graph) -> Graph:
        for entry, count in self.entries.items():
            names = {scope: [node.name for node in nodes] for scope, nodes in segments(graph, entry).items()}
            for scope, inside in names.items():
                now = {node.name: node for node in graph.nodes}  # one that reads what has parts now is another one
                found = best_parts(graph, [now[name] for name in inside if name in now], count)
                if found is None:
                    raise UsageError(
                        f"split {entry!r}: {scope!r} cannot run in {count} parts: no axis of its last result, or that "
                        "it sums over, can be taken part by part; name a smaller part of the model, or fewer parts"
                    )
                graph = in_parts(graph, found)
        return graph


def segments(graph: Graph, entry: str) -> dict[str, list[Node]]:
    """The nodes of each scope that an entry of `split` means.

    Raises:
        UsageError: it names nothing.
    """
    scopes = {at: all_scopes([n.name, *(value.name for value in n.outputs)]) for at, n in enumerate(graph.nodes)}

    def named(text: str) -> dict[str, list[int]]:
        """The places of the nodes that a pattern means, by scope."""
        pattern = text.strip().lstrip("/")
        found = by_scope(scopes, pattern)
        if not found:
            close = close_names(pattern, [node.name for node in graph.nodes])
            raise UsageError(f"split {entry!r}: {pattern!r} names no operation of the model; close names are {close}")
        return found

    first, to, last = entry.partition(TO)
    if not to:
        return {scope: [graph.nodes[at] for at in places] for scope, places in named(entry).items()}
    begin = min(map(min, named(first).values()))
    end = (
        len(graph.nodes) - 1 if graph.loss is not None and last.strip() == LOSS else max(map(max, named(last).values()))
    )
    if begin > end:
        raise UsageError(f"split {entry!r}: the model has {last.strip()!r} before {first.strip()!r}")
    return {entry: list(graph.nodes[begin : end + 1])}


def best_parts(graph: Graph, nodes: Sequence[Node], count: int) -> Parts | None:
    """The best way to run a segment in a number of parts; None: there is none."""
    products = [node for node in nodes if summed_axis(node) is not None]
    found = ways_to_split(graph, nodes, count, [*products, nodes[-1]])
    return max(found, key=lambda parts: _worth(graph, parts), default=None)


def ways_to_split(graph: Graph, nodes: Sequence[Node], count: int, targets: Iterable[Node]) -> Iterator[Parts]:
    """The ways to run a segment in a number of parts of which something is never whole.

    Args:
        nodes: the segment, as the graph lists it.
        targets: those of its nodes that may be the last to run in parts: the last one along any axis of its result,
            products along what they sum over.
    """
    inside, last = set(nodes), nodes[-1]
    done: set[Node] = set()
    for target in dict.fromkeys(targets):
        if target is last:
            for axis, extent in enumerate(target.outputs[0].shape):
                if extent >= count:
                    yield from _ways(graph, inside, (target,), axis, count, sums=False)
        over = summed_axis(target)
        if over is not None and target not in done and target.inputs[0].shape[over] >= count:
            value = target.inputs[0]
            alike = [n for n in graph.readers[value] if n in inside and n.inputs[0] is value and summed_axis(n) == over]
            done.update(alike)
            yield from _ways(graph, inside, tuple(alike), over, count, sums=True)


def _worth(graph: Graph, parts: Parts) -> tuple[int, int]:
    """Bytes that are never whole, less what parts of results take beside the result; and (negative) bytes moved."""
    saved = sum(value.type.nbytes for value in never_whole(graph, parts))
    moved = 0
    for node, ways in parts.members.items():
        for value, boxes in parts.ends(graph, node):
            pieces = [value.type.with_shape(box.shape) for box in boxes]
            if not Concat(_tile_axis(value, boxes) or 0).parts(pieces, [value.type]):
                saved -= value.type.nbytes
                moved += 2 * value.type.nbytes
        for way in ways:
            moved += sum(type.nbytes for types in types_of(node, way) for type in types)
    return saved, -moved


def types_of(node: Node, way: Narrowed) -> tuple[list[TensorType], list[TensorType]]:
    """The types of what a part of a node reads and writes."""
    read = [x.type if cut is None else x.type.with_shape(cut.shape) for x, cut in zip(node.inputs, way.inputs)]
    return read, [x.type.with_shape(box.shape) for x, box in zip(node.outputs, way.outputs)]


def bytes_made(graph: Graph) -> int:
    """Bytes of all that nodes make; views make nothing."""
    return sum(value.type.nbytes for node in graph.nodes if not node.op.is_view for value in node.outputs)


def never_whole(graph: Graph, parts: Parts) -> list[Value]:
    """What exists only in parts."""
    made = [value for node in parts.members if not node.op.is_view for value in node.outputs]
    ends = {value for node in parts.members for value, _ in parts.ends(graph, node)}
    whole = {value for node in parts.targets for value in node.outputs}
    return [value for value in made if value not in ends and value not in whole]


def _ways(
    graph: Graph, inside: Collection[Node], targets: tuple[Node, ...], axis: int, count: int, sums: bool
) -> Iterator[Parts]:
    """The way to split along one axis, if there is one."""
    parts = parts_up_to(graph, inside, {node: _target_ways(node, axis, count, sums) for node in targets}, axis, sums)
    if parts is not None and never_whole(graph, parts):
        yield parts


def parts_up_to(
    graph: Graph, inside: Collection[Node], targets: Mapping[Node, list[Narrowed]], axis: int, sums: bool
) -> Parts | None:
    """How nodes run in parts, given what each part computes of the last ones; None: they cannot.

    Args:
        inside: those of the nodes that may run in parts; what cannot do with a part of its inputs runs whole, before.
        targets: the last ones, in the graph's order.
        axis, sums: see `Parts`.
    """
    members = _members(graph, inside, targets)
    if not members:
        return None
    parts = Parts(tuple(targets), axis, sums, members)
    ends = [end for node in members for end in parts.ends(graph, node)]
    return parts if all(_tile_axis(*end) is not None for end in ends) else None


def _members(
    graph: Graph, inside: Collection[Node], targets: Mapping[Node, list[Narrowed]]
) -> dict[Node, list[Narrowed]]:
    """What runs in parts, from the targets back; empty: nothing."""
    boxes: dict[Value, list[Slice]] = {}  # what parts read, or compute
    before: set[Value] = set()  # what is there before any part begins
    found: dict[Node, list[Narrowed]] = {}
    for node in reversed(graph.nodes[: graph.nodes.index([*targets][-1]) + 1]):
        ways: list[Narrowed] = []
        if node in targets:
            ways = targets[node]
            if not ways or not before.isdisjoint(node.outputs):
                return {}
        elif node in inside and node.outputs[0] in boxes and before.isdisjoint(node.outputs):
            tried = [narrowed(node, box) for box in boxes[node.outputs[0]]]
            ways = [way for way in tried if way is not None]
            if len(ways) < len(tried) or not all(_covers(way, node, boxes, i) for i, way in enumerate(ways)):
                ways = []
        if ways:
            found[node] = ways
            for at, value in enumerate(node.inputs):
                cuts = [way.inputs[at] for way in ways]
                producer = graph.producer.get(value)
                if producer is None or producer not in inside or None in cuts:
                    before.add(value)
                else:
                    own = boxes.get(value, cuts)
                    boxes[value] = [_hull(a, b) for a, b in zip(own, cuts) if a is not None and b is not None]
        elif not before.isdisjoint(node.outputs) or node.outputs[0] in boxes:
            before.update(node.outputs)
            before.update(node.inputs)
    return dict(reversed(found.items()))


def _covers(way: Narrowed, node: Node, boxes: Mapping[Value, Sequence[Slice]], part: int) -> bool:
    """Whether a part computes what is read of all outputs."""
    return all(
        value not in boxes or _hull(own, boxes[value][part]) == own for value, own in zip(node.outputs, way.outputs)
    )


def _hull(a: Slice, b: Slice) -> Slice:
    """The smallest box that holds two."""
    starts = tuple(map(min, a.starts, b.starts))
    stops = (max(s + m, t + n) for s, m, t, n in zip(a.starts, a.shape, b.starts, b.shape))
    return Slice(starts, tuple(stop - start for start, stop in zip(starts, stops)), a.steps)


def _ranges(extent: int, count: int) -> list[tuple[int, int]]:
    """(start, number) of parts as equal as can be."""
    ends = [extent * part // count for part in range(count + 1)]
    return [(start, stop - start) for start, stop in itertools.pairwise(ends)]


def _range_of(value: Value, axis: int, start: int, number: int) -> Slice:
    return box_of((start, number, 1) if i == axis else (0, extent, 1) for i, extent in enumerate(value.shape))


def _target_ways(node: Node, axis: int, count: int, sums: bool) -> list[Narrowed]:
    """Of the target: the parts of its result, or its results of parts."""
    if sums:
        factor = summed_axes(node)[axis]
        found = [summed(node, factor, *part) for part in _ranges(node.inputs[0].shape[axis], count)]
    else:
        (value, *_) = node.outputs
        found = [narrowed(node, _range_of(value, axis, *part)) for part in _ranges(value.shape[axis], count)]
    return [way for way in found if way is not None] if None not in found else []


def summed_axis(node: Node) -> int | None:
    """The axis of the first input that a product sums over, whose parts can be added to one another; or None."""
    op = node.op
    if op.name not in SUMS or getattr(op, "wide", False):
        return None
    return next(iter(summed_axes(node)), None)


def _tile_axis(value: Value, boxes: Sequence[Slice]) -> int | None:
    """The axis along which boxes cover a tensor one behind the other, if they do; they may overlap."""
    axes = {axis for box in boxes for axis in touched(box, value.shape)}
    if len(axes) != 1 or any(set(box.steps) - {1} for box in boxes):
        return None
    (axis,) = axes
    at = [(box.starts[axis], box.starts[axis] + box.shape[axis]) for box in boxes]
    ends = [*(start for start, _ in at[1:]), value.shape[axis]]
    fits = at[0][0] == 0 and all(start < end <= stop for (start, stop), end in zip(at, ends))
    return axis if fits else None


def in_parts(graph: Graph, parts: Parts, note: str | None = None) -> Graph:
    """The graph with a segment in parts.

    Args:
        note: what the graph says about it; None: the usual words, "": nothing.
    """
    graph = _together(graph, parts)
    made: dict[Value, Value] = {}

    def replace(b: Builder, node: Node, inputs: tuple[Value, ...]) -> Sequence[Value] | None:
        if node not in parts.members:
            return None
        if not made:
            saved = sum(value.type.nbytes for value in never_whole(graph, parts))
            usual = f"{parts}: {format_bytes(saved)} of its activations are never whole"
            b.notes += [usual] if note is None else [note] if note else []
            made.update(_Emission(b, graph, parts).run())
        return [made.get(value, value) for value in node.outputs]

    return rewrite(graph, replace)


def _together(graph: Graph, parts: Parts) -> Graph:
    """The graph with its members one behind the other: what does not depend on them before, the others behind."""
    behind: set[Value] = set()
    first: list[Node] = []
    later: list[Node] = []
    end = graph.nodes.index(parts.targets[-1]) + 1
    for node in graph.nodes[:end]:
        if node in parts.members or not behind.isdisjoint(node.inputs):
            behind.update(node.outputs)
            if node not in parts.members:
                later.append(node)
        else:
            first.append(node)
    return dataclasses.replace(graph, nodes=(*first, *parts.members, *later, *graph.nodes[end:]))


@dataclass
class _Emission:
    """The nodes of all parts, one part after the other."""

    b: Builder
    graph: Graph
    parts: Parts
    cut: dict[tuple[Value, Slice], Value] = field(default_factory=dict)

    def run(self) -> dict[Value, Value]:
        """What others read of the members."""
        members, pieces, totals = self.parts.members, dict[Value, list[Value]](), dict[Value, Value]()
        summing = self.parts.targets if self.parts.sums else ()
        ends = {value: boxes for node in members for value, boxes in self.parts.ends(self.graph, node)}
        for part in range(self.parts.count):
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
        axis = _tile_axis(value, boxes)
        assert axis is not None
        return axis

    def _piece(self, value: Value, made: tuple[Value, Slice], boxes: Sequence[Slice], part: int) -> Value:
        """What a part adds to a whole: from where it begins to where the next one does."""
        (piece, box), axis = made, self._axis(value, boxes)
        stop = boxes[part + 1].starts[axis] if part + 1 < len(boxes) else value.shape[axis]
        number = stop - box.starts[axis]
        return piece if number == box.shape[axis] else self._slice(piece, _range_of(piece, axis, 0, number))

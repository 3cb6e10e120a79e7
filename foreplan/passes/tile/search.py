"""The tiles of a stretch: along an axis of its last result, or along what its products sum over."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from foreplan.graph import Graph, Node, Value
from foreplan.ops.join import Concat
from foreplan.ops.shape import Slice
from foreplan.passes.narrowing import Narrowed, narrowed, summed, summed_axes
from foreplan.passes.tile.tile import Tile, joined_axis, range_of, summed_axis, types_of


def best_tile(graph: Graph, nodes: Sequence[Node], count: int) -> Tile | None:
    """The best way to run a stretch in a number of parts; None: there is none.

    It is the one with which the most bytes are never whole; of equal ones, the one that moves the fewest.
    """
    products = [node for node in nodes if summed_axis(node) is not None]
    found = tiles(graph, nodes, count, [*products, nodes[-1]])
    return max(found, key=lambda tile: _worth(graph, tile), default=None)


def tiles(graph: Graph, nodes: Sequence[Node], count: int, targets: Iterable[Node]) -> Iterator[Tile]:
    """The ways to run a stretch in a number of parts of which something is never whole.

    Args:
        nodes: the stretch, as the graph lists it.
        targets: those of its nodes that may be the last to run in parts: the last one along any axis of its result,
            products along what they sum over.
    """
    inside, last = set(nodes), nodes[-1]
    done: set[Node] = set()
    for target in dict.fromkeys(targets):
        if target is last:
            for axis, extent in enumerate(target.outputs[0].shape):
                if extent >= count:
                    ways = {target: _parts_of(target, axis, extent, count)}
                    yield from tile_up_to(graph, inside, ways, axis, sums=False)
        over = summed_axis(target)
        if over is not None and target not in done and (extent := target.inputs[0].shape[over]) >= count:
            value = target.inputs[0]
            alike = [n for n in graph.readers[value] if n in inside and n.inputs[0] is value and summed_axis(n) == over]
            done.update(alike)
            sums = {node: sums_of_parts(node, over, ranges(extent, count)) for node in alike}
            yield from tile_up_to(graph, inside, sums, over, sums=True)


def tile_up_to(
    graph: Graph, inside: Collection[Node], targets: Mapping[Node, Sequence[Narrowed]], axis: int, sums: bool
) -> Iterator[Tile]:
    """The way to run nodes in parts, given what each part computes of the last ones; none, if they cannot or nothing
    is never whole.

    Args:
        inside: those of the nodes that may run in parts; what cannot do with a part of its inputs runs whole, before.
        targets: the last ones, in the graph's order.
        axis, sums: see `Tile`.
    """
    if not (members := _members(graph, inside, targets)):
        return
    tile = Tile(tuple(targets), axis, sums, members)
    ends = [end for node in members for end in tile.ends(graph, node)]
    if all(joined_axis(*end) is not None for end in ends) and tile.never_whole(graph):
        yield tile


def sums_of_parts(node: Node, axis: int, parts: Iterable[tuple[int, int]]) -> list[Narrowed]:
    """What computes the summands of a node's result that are of ranges of an axis of its first input; empty: nothing.

    Args:
        parts: (start, number) of each.
    """
    factor = summed_axes(node).get(axis)
    return _if_all([] if factor is None else [summed(node, factor, *part) for part in parts])


def ranges(extent: int, count: int, unit: int = 1) -> list[tuple[int, int]]:
    """(start, number) of parts as equal as can be, in whole units."""
    ends = [extent // unit * part // count * unit for part in range(count + 1)]
    return [(start, stop - start) for start, stop in itertools.pairwise(ends)]


def bytes_made(graph: Graph) -> int:
    """Bytes of all that nodes make; views make nothing."""
    return sum(value.type.nbytes for node in graph.nodes if not node.op.is_view for value in node.outputs)


def _worth(graph: Graph, tile: Tile) -> tuple[int, int]:
    """Bytes that are never whole, less what parts of results take beside the result; and (negative) bytes moved."""
    saved, moved = tile.saved_bytes(graph), 0
    for node, ways in tile.members.items():
        for value, boxes in tile.ends(graph, node):
            pieces = [value.type.with_shape(box.shape) for box in boxes]
            if not Concat(joined_axis(value, boxes) or 0).parts(pieces, [value.type]):
                saved -= value.type.nbytes
                moved += 2 * value.type.nbytes
        for way in ways:
            moved += sum(type.nbytes for types in types_of(node, way) for type in types)
    return saved, -moved


def _parts_of(node: Node, axis: int, extent: int, count: int) -> list[Narrowed]:
    """What computes the parts of a node's result."""
    return _if_all([narrowed(node, range_of(node.outputs[0], axis, *part)) for part in ranges(extent, count)])


def _if_all(ways: Sequence[Narrowed | None]) -> list[Narrowed]:
    return [way for way in ways if way is not None] if None not in ways else []


def _members(
    graph: Graph, inside: Collection[Node], targets: Mapping[Node, Sequence[Narrowed]]
) -> dict[Node, Sequence[Narrowed]]:
    """What runs in parts, from the targets back; empty: nothing."""
    boxes: dict[Value, list[Slice]] = {}  # what parts read, or compute
    before: set[Value] = set()  # what is there before any part begins
    found: dict[Node, Sequence[Narrowed]] = {}
    for node in reversed(graph.nodes[: graph.nodes.index([*targets][-1]) + 1]):
        ways: Sequence[Narrowed] = ()
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

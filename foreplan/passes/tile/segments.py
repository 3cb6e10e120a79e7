"""Tiles of stretches that a user names: `split={"h.*.mlp": 4, "h.6..loss": 2}`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from foreplan.base.errors import UsageError
from foreplan.base.patterns import TO, all_scopes, by_scope, close_names
from foreplan.graph import Graph, Node
from foreplan.passes.base import Pass
from foreplan.passes.tile.samples import samples_in_parts, samples_of
from foreplan.passes.tile.search import best_tile
from foreplan.passes.tile.tile import tiled

LOSS = "loss"  # as the end of a range: the last operation


def is_to_loss(entry: str) -> bool:
    """Whether an entry of `split` is a range that ends in the loss."""
    _, to, last = entry.partition(TO)
    return bool(to) and last.strip() == LOSS


@dataclass(frozen=True)
class SplitSegments(Pass, requires=("forward", "plain ops"), ensures=("forward", "plain ops")):
    """Run segments in parts.

    Each part of a segment computes a range of one axis, from ranges of what it reads, before the next part begins. What
    the segment alone reads then exists a part at a time. Of the axes of its last result, and those that its products
    sum over, the one is taken along which the most bytes are never whole; of equal ones, that which moves the fewest.
    What cannot do with a part of it is computed whole, before.

    Of a training step, a range that ends in the loss runs some samples at a time, or some rows of each, forward and
    back. These ranges come first; of several that overlap, the inner ones.

    Requires: a forward graph. Ensures: the same results, up to the order of additions.

    Attributes:
        entries: the number of parts, by what `foreplan.base.patterns` takes for names, where each scope that matches
            is a segment of its own; or by a range `FIRST..LAST` of two scopes, as the model lists its operations.

    Raises:
        UsageError: an entry names nothing, or a segment that nothing splits.
    """

    entries: Mapping[str, int]

    def _run(self, graph: Graph) -> Graph:
        for entry in sorted(self.entries, key=lambda entry: not is_to_loss(entry)):
            count, run = self.entries[entry], _to_loss if graph.loss is not None and is_to_loss(entry) else _segment
            names = {scope: [node.name for node in nodes] for scope, nodes in segments(graph, entry).items()}
            for scope, inside in names.items():
                now = {node.name: node for node in graph.nodes}  # one that reads what has parts now is another one
                graph = run(graph, [now[name] for name in inside if name in now], count, entry, scope)
        return graph


def _segment(graph: Graph, nodes: list[Node], count: int, entry: str, scope: str) -> Graph:
    tile = best_tile(graph, nodes, count) if nodes else None
    if tile is None:
        raise UsageError(
            f"split {entry!r}: {scope!r} cannot run in {count} parts: no axis of its last result, or that it sums "
            "over, can be taken part by part; name a smaller part of the model, or fewer parts"
        )
    return tiled(graph, tile)


def _to_loss(graph: Graph, nodes: list[Node], count: int, entry: str, scope: str) -> Graph:
    found = samples_in_parts(graph, nodes, count)
    if found is None:
        raise UsageError(
            f"split {entry!r}: nothing before the loss can run in {count} parts; the batch has {samples_of(graph)} "
            "samples, and what needs all of them, such as batch norm, runs whole with all that comes before it"
        )
    return found[0]


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

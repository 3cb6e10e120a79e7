"""The stretch of a graph in which most bytes are alive → parts of it: ways to run a model in less memory.

It is often the batch that is split: a large image is small again behind a few layers, and only those need run a few
images at a time. Of a single image it is the rows, which parts compute with what their taps read beyond them; or
channels. Reference: Lin et al., "MCUNetV2: Memory-Efficient Patch-based Inference for Tiny Deep Learning", NeurIPS
2021, for rows; Chen et al., "MAGIS: Memory Optimization via Coordinated Graph Transformation and Scheduling", ASPLOS
2024, for splitting any axis.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from foreplan.graph import Graph, Node
from foreplan.passes.tile.live_bytes import live_bytes
from foreplan.passes.tile.search import tiles
from foreplan.passes.tile.tile import Tile, tiled

FIRST = 4  # number of parts with which stretches are compared
COUNTS = (2, 8, 16, 32)  # others, for the best of them
STRETCHES = 4  # how many those are
LOWS = 6  # places on each side of the peak at which stretches begin and end
NODES = 3000  # a graph of more is not made
BALANCE = 10  # operations that take as long as to move a byte
START = 1 << 20  # operations that take as long as to start a node


@dataclass(frozen=True)
class Way:
    """A graph with a stretch in parts.

    Attributes:
        peak: its highest `live_bytes`.
        work: about how long it takes, in operations.
    """

    graph: Graph
    tile: Tile
    peak: int
    work: int


def ways_in_parts(graph: Graph, share: float) -> list[Way]:
    """Ways to run a graph with fewer bytes alive: each takes less work than those with fewer bytes.

    Args:
        graph: a simplified forward graph that no gradient is taken of.
        share: of the graph's work, the most that a way may add.
    """
    live, before = live_bytes(graph), _work(graph)
    most = before * (1 + share)
    found: list[Way] = []
    for nodes in _stretches(graph, live):
        found += _ways(graph, nodes, FIRST, most)
    best = sorted(_front(found), key=lambda way: way.peak)[:STRETCHES]
    for way in best:
        for count in COUNTS:
            found += (
                other
                for other in _ways(graph, list(way.tile.members), count, most)
                if (other.tile.axis, other.tile.sums) == (way.tile.axis, way.tile.sums)
            )
    return [way for way in _front(found) if way.peak < max(live)]


def _front(ways: Iterable[Way]) -> list[Way]:
    """Those that no other beats in bytes and work, by ascending bytes."""
    kept: list[Way] = []
    for way in sorted(ways, key=lambda way: (way.peak, way.work)):
        if not kept or way.work < kept[-1].work:
            kept.append(way)
    return kept


def _stretches(graph: Graph, live: Sequence[int]) -> Iterator[Sequence[Node]]:
    """Stretches around the peak, from and to where fewer bytes are alive than anywhere nearer to it."""
    if not live:
        return
    peak = live.index(max(live))
    ends = _lows(live, range(peak, len(live)))
    for begin in _lows(live, range(peak, -1, -1)):
        for end in ends:
            yield graph.nodes[begin : end + 1]


def _lows(live: Sequence[int], places: range) -> list[int]:
    """Places along a way at which fewer bytes are alive than before, evenly spread; its first and its last."""
    found: list[int] = []
    for at in places:
        if not found or live[at] < live[found[-1]]:
            found.append(at)
    spread = found[:: max(1, -(-len(found) // LOWS))]
    return sorted({*spread, found[-1], places[-1]})


def _ways(graph: Graph, nodes: Sequence[Node], count: int, most: float) -> Iterator[Way]:
    for tile in tiles(graph, nodes, count, nodes[-1:]):
        if len(graph.nodes) + count * len(tile.members) <= NODES:
            split = tiled(graph, tile)
            if (work := _work(split)) <= most:
                yield Way(split, tile, max(live_bytes(split)), work)


def _work(graph: Graph) -> int:
    """About how long the nodes take, in operations."""
    total = 0
    for node in graph.nodes:
        if not node.op.is_view:
            cost = node.op.cost([x.type for x in node.inputs], [x.type for x in node.outputs])
            total += START + max(cost.flops, BALANCE * cost.nbytes)
    return total

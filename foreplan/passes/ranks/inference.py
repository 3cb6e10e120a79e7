"""The forward pass alone, of weights in parts: each bucket of them is gathered before it is read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from foreplan.graph import Graph, Kind, Node, Value
from foreplan.passes.ranks.layout import Bucket, made_bucket, narrow_copies
from foreplan.passes.ranks.setting import Ranks
from foreplan.passes.ranks.weight_views import FORWARD, Phase, When, in_homes

AGAIN = Phase(1, True)
FAR = 2  # buckets that are gathered between two uses of one, from which on it is worth to gather this once more


def in_parts(graph: Graph, ranks: Ranks) -> Graph:
    """The forward graph of one rank, which stores its part of all weights. They share buckets in the order in which
    they are read.
    """
    weights = [value for value in _as_read(graph) if value.kind in (Kind.PARAMETER, Kind.FROZEN)]
    full, copies = ranks.bucket(weights), narrow_copies(graph)
    open: dict[Any, list[Value]] = {}
    found: list[list[Value]] = []
    for value in weights:
        group = ranks.with_other_samples(value)
        if group.ranks == 1:
            continue
        key = (value.kind, value.dtype, copies[value].dtype if value in copies else None, group)
        bucket = open.setdefault(key, [])
        bucket.append(value)
        if sum(each.type.nbytes for each in bucket) >= full:
            found.append(open.pop(key))
    buckets = [made_bucket(i, each, ranks, copies) for i, each in enumerate((*found, *open.values()))]
    return gathering(graph, buckets)


def gathering(graph: Graph, buckets: Sequence[Bucket]) -> Graph:
    """The forward graph in which weights are views of buckets. One whose uses lie far apart is gathered twice."""
    return in_homes(graph, buckets, _gathers_of(graph, buckets))


def _as_read(graph: Graph) -> Iterable[Value]:
    """What a graph stores: first what nodes read, in their order."""
    stored = dict.fromkeys(graph.stored)
    return dict.fromkeys([*(x for node in graph.nodes for x in node.inputs if x in stored), *stored])


def _gathers_of(graph: Graph, buckets: Sequence[Bucket]) -> When:
    """When buckets are gathered: before their first use and, if many others are gathered in the longest pause between
    uses, behind that.
    """
    place = {node: i for i, node in enumerate(graph.nodes)}
    end = len(graph.nodes)
    of_value = {value: bucket for bucket in buckets for value in (*bucket.weights, *bucket.copies)}
    uses: dict[Bucket, list[int]] = {}
    for node, at in place.items():
        if node.outputs[0] not in of_value:
            for bucket in dict.fromkeys(of_value[x] for x in node.inputs if x in of_value):
                uses.setdefault(bucket, []).append(at)
    for bucket in dict.fromkeys(of_value[x] for x in graph.results if x in of_value):
        uses.setdefault(bucket, []).append(end)
    first = [some[0] for some in uses.values()]
    late: dict[Bucket, int] = {}
    for bucket, some in uses.items():
        pauses = [(sum(a < at < b for at in first), b) for a, b in pairwise(some)]
        others, until = max(pauses, default=(0, end))
        if others >= FAR:
            late[bucket] = until

    def when(bucket: Bucket, reader: Node | None) -> Phase:
        at = end if reader is None else place[reader]
        return AGAIN if bucket in late and at >= late[bucket] else FORWARD

    return when

"""Stretches of a forward pass in parts: the ways that are offered within a budget."""

from __future__ import annotations

from itertools import pairwise

import pytest

import foreplan as fp
from foreplan.graph import Graph
from foreplan.passes import simplified
from foreplan.passes.tile.live_bytes import live_bytes
from foreplan.passes.tile.stretches import BALANCE, START, ways_in_parts

NETS = ["conv_chain:size=32", "resnet18:batch=2,size=32", "vgg16:batch=1,size=32", "unet:batch=1,size=32"]
EMPTY = Graph("empty", (), (), (), {})


def work_of(graph: Graph) -> int:
    """Starts and the longer of arithmetic and bytes, of what is no view."""
    costs = [
        node.op.cost([x.type for x in node.inputs], [x.type for x in node.outputs])
        for node in graph.nodes
        if not node.op.is_view
    ]
    return sum(START + max(cost.flops, BALANCE * cost.nbytes) for cost in costs)


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("share", [0.05, 0.5])
def test_each_way_needs_fewer_bytes_than_those_with_less_work(net: str, share: float) -> None:
    graph = simplified(fp.models.build(net))
    ways = ways_in_parts(graph, share)
    assert ways or share < 0.5
    for way in ways:
        assert way.peak == max(live_bytes(way.graph)) < max(live_bytes(graph))
        assert way.work == work_of(way.graph) <= (1 + share) * work_of(graph)
    for low, high in pairwise(ways):
        assert low.peak < high.peak and low.work > high.work


def test_nothing_has_no_ways() -> None:
    assert not ways_in_parts(EMPTY, 0.5)

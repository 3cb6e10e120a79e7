"""A dominant activation between two convolutions → ranges of its channels, each made, used and dropped by itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from foreplan.graph import Builder, Graph, Node, Value
from foreplan.ops.conv.ops import Conv
from foreplan.ops.map import Map
from foreplan.ops.shape import slice_axis
from foreplan.passes.rewrite import rewrite_groups

PARTS = 4  # ranges of channels; each more costs one more pass over the second convolution's output
SHARE = 10  # an activation dominates if it has at least 1 / SHARE of the bytes that the forward pass makes
CHEAPER = 4  # it is computed again if that takes at most 1 / CHEAPER of the flops of what reads it


@dataclass(frozen=True)
class _Pair:
    """conv → element-wise maps → conv.

    Attributes:
        first: makes the activation.
        maps: what is done to each of its elements, in order; nobody else reads what they make.
        second: reads it.
    """

    first: Node
    maps: tuple[Node, ...]
    second: Node


def split_channels(graph: Graph) -> Graph:
    """Let the second of two convolutions add up what ranges of channels of a dominant activation between them give.

    Forward, a range is made, and what the second convolution gives of it is added to the output in place. Backward,
    the gradient of a range is made and used before that of the next one. Neither the activation nor its gradient is
    then ever whole, once the planner drops the ranges and recomputes each when it is needed.

    This serves networks in which one activation is a large part of a step, such as `conv_chain`. In others, such as
    VGG-16, it lets recomputation save a little more, and takes time: four small convolutions take longer than a large
    one.

    Requires: a simplified forward graph that is about to be differentiated. Ensures: the same results, up to the order
    of additions. Only where nobody else reads the activation, the first convolution is cheap beside the second, and
    both have one group of channels.
    """
    pairs = {pair.second: pair for pair in _pairs(graph)}
    absorbed = {node for pair in pairs.values() for node in (pair.first, *pair.maps)}
    return rewrite_groups(graph, pairs, absorbed, _split)


def _pairs(graph: Graph) -> Iterator[_Pair]:
    """Those worth it, the first ones first, none of which has a convolution of another."""
    total = sum(value.type.nbytes for node in graph.nodes if not node.op.is_view for value in node.outputs)
    taken: set[Node] = set()
    for node in graph.nodes:
        if node in taken or not _is_plain(node) or node.outputs[0].type.nbytes * SHARE < total:
            continue
        pair = _pair_from(graph, node)
        if pair is not None and _flops(pair.first) * CHEAPER <= _flops(pair.second):
            taken.update((pair.first, pair.second))
            yield pair


def _pair_from(graph: Graph, first: Node) -> _Pair | None:
    maps: list[Node] = []
    node = first
    while True:
        (value, *others), readers = node.outputs, graph.readers[node.outputs[0]]
        if others or len(readers) != 1 or value in graph.results:
            return None
        (node,) = readers
        if isinstance(node.op, Map) and all(x is value or x.type.size == 1 for x in node.inputs):
            maps.append(node)
        else:
            alone = node.inputs[0] is value and value not in node.inputs[1:]
            return _Pair(first, tuple(maps), node) if _is_plain(node) and alone else None


def _is_plain(node: Node) -> bool:
    """A convolution with one group of channels and enough of them that adds to nothing but a bias."""
    if not isinstance(node.op, Conv) or node.op.groups != 1 or node.outputs[0].shape[1] < PARTS:
        return False
    return all(value.shape == node.inputs[1].shape[:1] for value in node.inputs[2:])


def _flops(node: Node) -> int:
    return node.op.cost([value.type for value in node.inputs], [value.type for value in node.outputs]).flops


def _split(b: Builder, pair: _Pair, now: Mapping[Value, Value]) -> list[Value]:
    x, w, *bias = (now[value] for value in pair.first.inputs)
    _, weights, *added = (now[value] for value in pair.second.inputs)
    channels = w.shape[0]
    for part in range(PARTS):
        start, stop = channels * part // PARTS, channels * (part + 1) // PARTS
        cut = [slice_axis(b, value, 0, start, stop - start) for value in (w, *bias)]
        made = b.apply(pair.first.op, x, *cut, name=f"{pair.first.name}/part")
        before = pair.first.outputs[0]
        for node in pair.maps:
            inputs = [made if value is before else now[value] for value in node.inputs]
            made, before = b.apply(node.op, *inputs, name=f"{node.name}/part"), node.outputs[0]
        columns = slice_axis(b, weights, 1, start, stop - start)
        added = [b.apply(pair.second.op, made, columns, *added, name=f"{pair.second.name}/part")]
    return added[:1]

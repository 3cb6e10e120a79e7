"""Large activations between convolutions → ranges of their channels, each made, used and dropped by itself."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from foreplan.graph import Graph, Node, Value
from foreplan.ops.conv.ops import Conv
from foreplan.ops.map import Map
from foreplan.ops.norm.batch import BatchNorm, BatchNormTrain
from foreplan.passes.base import Pass
from foreplan.passes.tile.search import bytes_made, tiles
from foreplan.passes.tile.tile import Tile, tiled

PARTS = 4  # ranges of channels; each more costs one more pass over the second convolution's output
CHANNELS = 16  # of a range, at least, where there are more than PARTS: a product over fewer is slow


@dataclass(frozen=True)
class SplitChannels(Pass, requires=("forward", "plain ops"), ensures=("forward", "plain ops"), optional=True):
    """Let the second of two convolutions add up what ranges of channels of a large activation between them give.

    Forward, a range is made, and what the second convolution gives of it is added to the output in place. Backward,
    the gradient of a range is made and used before that of the next one. Neither the activation nor its gradient is
    then ever whole, once the planner drops the ranges and recomputes each when it is needed.

    This serves networks in which one activation is a large part of a step, such as `conv_chain`. In others, such as
    VGG-16, it lets recomputation save a little more, and takes time: small convolutions take longer than a large one.

    `split_pieces` does so with every large activation, from the last one back. A convolution before another one then
    makes each of these ranges by itself. So its result lies in pieces, each of which dies when its own gradient takes
    its bytes; whole, it would be there beside its whole gradient. The planner need recompute nothing for that; what is
    cheap to make again, such as the first activation, need not be kept at all.

    Requires: a simplified forward graph that is about to be differentiated. Ensures: the same results, up to the order
    of additions. Only where element-wise maps and normalisations of channels lie between the two, nobody else reads
    what they make, and both have one group of channels.

    Attributes:
        share: an activation is large if it has at least 1 / share of the bytes that the forward pass makes.
        most: ranges of its channels.
        cheaper: the first convolution takes at most 1 / cheaper of the flops of each that reads what it makes; 0: any.
    """

    share: int = 10
    most: int = PARTS
    cheaper: int = 4

    def _run(self, graph: Graph) -> Graph:
        total, named = bytes_made(graph), {node.name: node for node in graph.nodes}
        for name in reversed([node.name for node in graph.nodes if _is_plain(node)]):
            node = named[name]  # of the graph as it is by now
            if node.outputs[0].type.nbytes * self.share < total:
                continue
            chain, readers = _between(graph, node)
            if readers and _flops(node) * self.cheaper <= sum(map(_flops, readers)):
                for tile in _over_channels(graph, chain, readers, self.most):
                    graph = tiled(graph, tile)
                    named = {node.name: node for node in graph.nodes}
        return graph


split_channels = SplitChannels()
split_pieces = SplitChannels(share=32, most=8, cheaper=0)


def _between(graph: Graph, first: Node) -> tuple[list[Node], list[Node]]:
    """A convolution with what only channels of its result pass through; and the convolutions that read what comes of
    that; none, where what it makes is read otherwise, too.
    """
    chain, node = [first], first
    while _is_plain(first) and node.outputs[0] not in graph.returned:
        value = node.outputs[0]
        readers = list(graph.readers[value])
        if readers and all(_is_plain(reader) and _reads_only(reader, value) for reader in readers):
            return chain, readers
        if len(readers) != 1 or not (readers[0].of(BatchNorm, BatchNormTrain) or _is_map_of(readers[0], value)):
            break
        (node,) = readers
        chain.append(node)
    return chain, []


def _over_channels(graph: Graph, chain: list[Node], readers: list[Node], most: int) -> Iterator[Tile]:
    """How the readers add up ranges of channels that a convolution makes, if all of the chain can run in parts."""
    channels, count = readers[0].inputs[0].shape[1], PARTS
    while 2 * count <= most and channels >= 2 * count * CHANNELS:
        count *= 2
    found = tiles(graph, [*chain, *readers], count, readers)
    return itertools.islice((tile for tile in found if tile.sums and set(chain) <= tile.members.keys()), 1)


def _reads_only(node: Node, value: Value) -> bool:
    """Whether a convolution reads a value as its images, and nothing else of it."""
    return node.inputs[0] is value and value not in node.inputs[1:]


def _is_map_of(node: Node, value: Value) -> bool:
    """Whether a node does the same to each element of a value."""
    return isinstance(node.op, Map) and all(x is value or x.type.size == 1 for x in node.inputs)


def _is_plain(node: Node) -> bool:
    """A convolution with one group of channels."""
    return isinstance(node.op, Conv) and node.op.groups == 1


def _flops(node: Node) -> int:
    return node.op.cost([value.type for value in node.inputs], [value.type for value in node.outputs]).flops

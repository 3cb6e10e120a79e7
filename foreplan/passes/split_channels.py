"""Dominant activations between convolutions → ranges of their channels, each made, used and dropped by itself."""

from __future__ import annotations

from dataclasses import dataclass

from foreplan.graph import Graph, Node, Value
from foreplan.ops.conv.ops import Conv
from foreplan.ops.map import Map
from foreplan.ops.norm.batch import BatchNorm, BatchNormTrain
from foreplan.passes.base import Pass
from foreplan.passes.split import Parts, bytes_made, in_parts, ways_to_split

PARTS, PIECES = 4, 8  # ranges of channels; each more costs one more pass over the second convolution's output
CHANNELS = 16  # of a range, at least, where there are more than PARTS: a product over fewer is slow
SHARE = 10  # an activation dominates if it has at least 1 / SHARE of the bytes that the forward pass makes
CHEAPER = 4  # it is computed again if that takes at most 1 / CHEAPER of the flops of what reads it
PIECE = 32  # an activation is in pieces if it has at least 1 / PIECE of those bytes


@dataclass(frozen=True)
class SplitChannels(Pass, requires=("forward", "plain ops"), ensures=("forward", "plain ops"), optional=True):
    """Let the second of two convolutions add up what ranges of channels of a dominant activation between them give.

    Forward, a range is made, and what the second convolution gives of it is added to the output in place. Backward,
    the gradient of a range is made and used before that of the next one. Neither the activation nor its gradient is
    then ever whole, once the planner drops the ranges and recomputes each when it is needed.

    This serves networks in which one activation is a large part of a step, such as `conv_chain`. In others, such as
    VGG-16, it lets recomputation save a little more, and takes time: small convolutions take longer than a large one.

    Requires: a simplified forward graph that is about to be differentiated. Ensures: the same results, up to the order
    of additions. Only where element-wise maps and normalisations of channels lie between the two, nobody else reads
    what they make, the first convolution is cheap beside the second, and both have one group of channels.
    """

    def _run(self, graph: Graph) -> Graph:
        total, taken = bytes_made(graph), set[str]()  # names: the graph changes
        for node in graph.nodes:
            if node.name in taken or node.outputs[0].type.nbytes * SHARE < total:
                continue
            chain, readers = _between(graph, node)
            if len(readers) == 1 and _flops(node) * CHEAPER <= _flops(readers[0]):
                parts = _over_channels(graph, chain, readers, PARTS)
                if parts is not None:
                    taken.update(member.name for member in parts.members)
                    graph = in_parts(graph, parts)
        return graph


split_channels = SplitChannels()


@dataclass(frozen=True)
class SplitPieces(Pass, requires=("forward", "plain ops"), ensures=("forward", "plain ops"), optional=True):
    """Let every convolution add up what ranges of channels of a large activation give, from the last one back.

    A convolution before another one then makes each of these ranges by itself. So its result lies in pieces, each of
    which dies when its own gradient takes its bytes; whole, it would be there beside its whole gradient. The planner
    need recompute nothing for that; what is cheap to make again, such as the first activation, need not be kept at all.

    This serves where `split_channels` does not meet a budget. Requires, ensures: as `split_channels`.
    """

    def _run(self, graph: Graph) -> Graph:
        total = bytes_made(graph)
        for name in reversed([node.name for node in graph.nodes if _is_plain(node)]):
            node = next(node for node in graph.nodes if node.name == name)
            if node.outputs[0].type.nbytes * PIECE >= total:
                chain, readers = _between(graph, node)
                parts = _over_channels(graph, chain, readers, PIECES) if readers else None
                graph = graph if parts is None else in_parts(graph, parts)
        return graph


split_pieces = SplitPieces()


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
        if len(readers) != 1 or not (
            isinstance(readers[0].op, BatchNorm | BatchNormTrain) or _is_map_of(readers[0], value)
        ):
            break
        (node,) = readers
        chain.append(node)
    return chain, []


def _over_channels(graph: Graph, chain: list[Node], readers: list[Node], most: int) -> Parts | None:
    """How the readers add up ranges of channels that a convolution makes, if all of the chain can run in parts."""
    channels, count = readers[0].inputs[0].shape[1], PARTS
    if channels < count:
        return None
    while 2 * count <= most and channels >= 2 * count * CHANNELS:
        count *= 2
    ways = ways_to_split(graph, [*chain, *readers], count, readers)
    return next((way for way in ways if way.sums and set(chain) <= way.members.keys()), None)


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

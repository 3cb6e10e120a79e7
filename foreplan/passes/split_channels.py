"""A dominant activation between two convolutions → ranges of its channels, each made, used and dropped by itself."""

from __future__ import annotations

from collections.abc import Iterator

from foreplan.graph import Graph, Node, Value
from foreplan.ops.conv.ops import Conv
from foreplan.ops.map import Map
from foreplan.ops.norm.batch import BatchNorm, BatchNormTrain
from foreplan.passes.split import Parts, in_parts, ways_to_split

PARTS, FEW = 8, 4  # ranges of channels; each more costs one more pass over the second convolution's output
CHANNELS = 16  # of a part, at least, of more than FEW: a product over fewer is slow
SHARE = 10  # an activation dominates if it has at least 1 / SHARE of the bytes that the forward pass makes
CHEAPER = 4  # it is computed again if that takes at most 1 / CHEAPER of the flops of what reads it


def split_channels(graph: Graph) -> Graph:
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
    taken: set[str] = set()  # names: the graph changes
    for node in graph.nodes:
        parts = _worth_it(graph, node, taken)
        if parts is not None:
            taken.update(member.name for member in parts.members)
            graph = in_parts(graph, parts)
    return graph


def _worth_it(graph: Graph, first: Node, taken: set[str]) -> Parts | None:
    """How to split what lies between a convolution and the next one, if that is worth it."""
    total = sum(value.type.nbytes for node in graph.nodes if not node.op.is_view for value in node.outputs)
    if first.name in taken or not _is_plain(first) or first.outputs[0].type.nbytes * SHARE < total:
        return None
    found = list(_until_conv(graph, first))
    second = found[-1]
    if len(found) < 2 or not _is_plain(second) or _flops(first) * CHEAPER > _flops(second):
        return None
    channels = second.inputs[0].shape[1]
    count = PARTS if channels >= PARTS * CHANNELS else FEW
    ways = [way for way in ways_to_split(graph, found, count, [second]) if way.sums] if channels >= FEW else []
    return next((way for way in ways if first in way.members), None)


def _until_conv(graph: Graph, node: Node) -> Iterator[Node]:
    """A convolution, what only channels of its result pass through, and the next convolution."""
    yield node
    while True:
        value = node.outputs[0]
        readers = graph.readers[value]
        if len(readers) != 1 or value in graph.returned:
            return
        (node,) = readers
        yield node
        if not isinstance(node.op, BatchNorm | BatchNormTrain) and not _is_map_of(node, value):
            return


def _is_map_of(node: Node, value: Value) -> bool:
    """Whether a node does the same to each element of a value."""
    return isinstance(node.op, Map) and all(x is value or x.type.size == 1 for x in node.inputs)


def _is_plain(node: Node) -> bool:
    """A convolution with one group of channels that adds to nothing but a bias."""
    if not isinstance(node.op, Conv) or node.op.groups != 1:
        return False
    return all(value.shape == node.inputs[1].shape[:1] for value in node.inputs[2:])


def _flops(node: Node) -> int:
    return node.op.cost([value.type for value in node.inputs], [value.type for value in node.outputs]).flops

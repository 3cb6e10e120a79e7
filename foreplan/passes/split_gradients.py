"""The gradient of a concatenation → gradients of its parts, so that each can die by itself."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from foreplan.graph import Builder, Graph, Node, Value
from foreplan.graph.ir import Kind
from foreplan.ops.conv.ops import ConvDataGrad
from foreplan.ops.shape import Slice, slice_axis
from foreplan.passes.rewrite import rewrite

MOST_PARTS = 4  # more of them would make the products too thin


def split_gradients(graph: Graph) -> Graph:
    """A convolution's data gradient of which only ranges of channels are read is computed a range at a time.

    Where a convolution reads a concatenation, the gradient of the whole would live until the last part of it was read:
    in a U-Net, that is through most of the backward pass.

    Requires: a whole training step. Ensures: the same results, up to the blocks in which products are computed, and no
    operation more. Only up to `MOST_PARTS` ranges that do not overlap, of one group of channels.
    """
    parts = {node: found for node in graph.nodes if (found := _parts(graph, node))}
    done: dict[Node, Value] = {}

    def replace(b: Builder, node: Node, inputs: tuple[Value, ...]) -> Sequence[Value] | None:
        if node in parts:
            g, w = inputs
            for part, start, count in parts[node]:
                b.kind = Kind.GRADIENT
                done[part] = b.apply(node.op, g, slice_axis(b, w, 1, start, count), name=f"{node.name}/part")
            return node.outputs  # nobody but the slices would read it
        return [done[node]] if node in done else None

    return rewrite(graph, replace) if parts else graph


def _parts(graph: Graph, node: Node) -> list[tuple[Node, int, int]]:
    """(slice, first channel, number of channels) of everything that reads a data gradient; nothing if it must stay."""
    if not isinstance(node.op, ConvDataGrad) or node.op.groups != 1 or len(node.inputs) != 2:
        return []
    (whole,) = node.outputs
    readers = graph.readers[whole]
    if whole.kind is not Kind.GRADIENT or whole in graph.returned or not 1 < len(readers) <= MOST_PARTS:
        return []
    found: list[tuple[Node, int, int]] = []
    for reader in readers:
        op = reader.op
        if not isinstance(op, Slice) or any(step != 1 for step in op.steps):
            return []
        if (op.shape[0], *op.shape[2:]) != (whole.shape[0], *whole.shape[2:]):
            return []
        found.append((reader, op.starts[1], op.shape[1]))
    found.sort(key=lambda part: part[1])
    overlaps = any(start + count > later for (_, start, count), (_, later, _) in pairwise(found))
    return [] if overlaps else found

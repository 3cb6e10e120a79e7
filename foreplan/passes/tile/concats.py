"""A convolution over concatenated channels → the sum of one over each operand, which so need not be concatenated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from foreplan.graph import Builder, Graph, Node, Value
from foreplan.ops.conv.ops import Conv
from foreplan.ops.join import Concat
from foreplan.ops.shape import slice_axis
from foreplan.passes.base import Pass
from foreplan.passes.rewrite import rewrite_groups

CHANNELS = 16  # that each operand must have: a product over fewer is slow


@dataclass(frozen=True)
class _Joined:
    """concat → conv.

    Attributes:
        concat: nobody else reads what it makes.
        conv: with one group of channels.
        order: of the operands, those made first first, so that each is added as soon as it is there.
    """

    concat: Node[Concat]
    conv: Node[Conv]
    order: tuple[int, ...]


@dataclass(frozen=True)
class SplitConcats(Pass, requires=("forward", "plain ops"), ensures=("forward", "plain ops"), optional=True):
    """Let a convolution that alone reads concatenated channels add up, in place, what it gives of each operand.

    Neither the concatenation nor its gradient is then ever made, and each operand lives only as long as it is needed
    itself. By linearity: conv([x, y], [v w]) = conv(x, v) + conv(y, w). This serves U-Nets.

    Requires: a forward graph. Ensures: the same results, up to the order of additions.
    """

    def _run(self, graph: Graph) -> Graph:
        groups: dict[Node, _Joined] = {joined.conv: joined for joined in _joined(graph)}
        return rewrite_groups(graph, groups, {joined.concat for joined in groups.values()}, _split)


split_concats = SplitConcats()


def _joined(graph: Graph) -> Iterator[_Joined]:
    position = {value: i for i, node in enumerate(graph.nodes) for value in node.outputs}
    for concat in graph.nodes_of(Concat):
        (value,) = concat.outputs
        conv = graph.only_reader(value, Conv) if concat.op.axis == 1 else None
        if conv is None or conv.op.groups != 1 or conv.inputs.index(value) or value in conv.inputs[1:]:
            continue
        if all(x.shape[1] >= CHANNELS for x in concat.inputs):
            order = sorted(range(len(concat.inputs)), key=lambda i: position.get(concat.inputs[i], -1))
            yield _Joined(concat, conv, tuple(order))


def _split(b: Builder, joined: _Joined, now: Mapping[Value, Value]) -> list[Value]:
    xs = [now[value] for value in joined.concat.inputs]
    _, weights, *added = (now[value] for value in joined.conv.inputs)
    for i in joined.order:
        start, count = sum(x.shape[1] for x in xs[:i]), xs[i].shape[1]
        columns = slice_axis(b, weights, 1, start, count)
        added = [b.apply(joined.conv.op, xs[i], columns, *added, name=f"{joined.conv.name}/part")]
    return added[:1]

"""Updates of many small stored tensors by one formula → one op."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from foreplan.graph import Builder, Graph, Node, Value
from foreplan.ops.expr import Arg, substitute, used_args
from foreplan.ops.map import Map
from foreplan.ops.multi_map import MultiMap
from foreplan.passes.base import Pass
from foreplan.passes.rewrite import Accepts, rewrite

SMALL = 16 * 1024  # bytes of a tensor: what it takes longer to launch than to update
TOGETHER = 64 * 1024  # bytes of all that a group reads and that would else have been read earlier
MOST = 32  # tensors
_Together = tuple[MultiMap, tuple[Value, ...], tuple[Value, ...]]  # the op of a group, its inputs and outputs


@dataclass(frozen=True)
class _Update:
    """A map of small tensors.

    Attributes:
        node: whose results are all new contents of stored values.
        own: what it reads of its outputs' shape.
        scalars: what else it reads.
        exprs: of `own`, then `scalars`.
    """

    node: Node
    own: tuple[Value, ...]
    scalars: tuple[Value, ...]
    exprs: tuple[str, ...]

    @property
    def kind(self) -> tuple[tuple[str, ...], ...]:
        """What is the same of updates that one op can do."""
        return self.exprs, tuple(str(x.dtype) for x in self.own), tuple(x.name for x in self.scalars)

    @property
    def waiting(self) -> int:
        """Bytes that have to be there until the group runs."""
        return sum(x.type.nbytes for x in self.own if not x.kind.is_stored)


@dataclass(frozen=True)
class GroupUpdates(Pass, requires=("kernels",), ensures=("kernels",), optional=True):
    """`multi_map` for updates of small tensors that have one formula, a few dozen at a time.

    Each would be a kernel of its own that runs for less time than it takes to launch it: a ResNet has more than a
    hundred. What a group reads lives until its last member would have run: no more than `TOGETHER` of it.

    Requires: a graph that nobody differentiates any more. Ensures: the same results, bit for bit.
    """

    accepts: Accepts

    def _run(self, graph: Graph) -> Graph:
        groups: dict[Node, _Together] = {}  # by the last node of each
        members: set[Node] = set()
        position = {node: i for i, node in enumerate(graph.nodes)}
        for group in _groups(graph, position):
            op, inputs, outputs = together = _together(group)
            if len(group) > 1 and self.accepts(op, [x.type for x in inputs], [y.type for y in outputs]):
                groups[group[-1].node] = together
                members.update(update.node for update in group)

        def replace(b: Builder, node: Node, inputs: tuple[Value, ...]) -> Sequence[Value] | None:
            if node in groups:
                b.append(Node(*groups[node], node.name, node.source))
            return node.outputs if node in members else None

        return rewrite(graph, replace) if groups else graph


def _groups(graph: Graph, position: dict[Node, int]) -> Iterator[list[_Update]]:
    """Updates of one kind that can wait for each other, perhaps one alone, in the order of the graph."""
    every = sorted(_updates(graph), key=lambda update: (update.kind, position[update.node]))
    for _, alike in groupby(every, key=lambda update: update.kind):
        group: list[_Update] = []
        for update in alike:
            full = len(group) == MOST or sum(each.waiting for each in (*group, update)) > TOGETHER
            if group and (full or _is_read_before(graph, group, position, update)):
                yield group
                group = []
            group.append(update)
        yield group


def _is_read_before(graph: Graph, group: list[_Update], position: dict[Node, int], last: _Update) -> bool:
    """Whether a new content is read no later than the last of a group runs."""
    readers = (reader for update in group for y in update.node.outputs for reader in graph.readers[y])
    return any(position[reader] <= position[last.node] for reader in readers)


def _updates(graph: Graph) -> Iterator[_Update]:
    contents = set(graph.updates.values())
    for node in graph.nodes_of(Map):
        shape = node.outputs[0].shape
        if len(shape) != 1 or not contents.issuperset(node.outputs):
            continue
        read = list(dict.fromkeys(node.inputs[i] for i in sorted(used_args(*node.op.parsed))))
        own = tuple(x for x in read if x.shape == shape)
        scalars = tuple(x for x in read if not x.shape)
        largest = max(x.type.nbytes for x in (*own, *node.outputs))
        if len(read) != len(own) + len(scalars) or not own or largest > SMALL:
            continue
        places = {x: Arg(i) for i, x in enumerate((*own, *scalars))}
        exprs = [substitute(expr, [places.get(x, Arg(0)) for x in node.inputs]) for expr in node.op.parsed]
        yield _Update(node, own, scalars, tuple(map(str, exprs)))


def _together(group: Sequence[_Update]) -> _Together:
    """The op of a group, with its inputs and outputs."""
    first = group[0]
    own = tuple(x for update in group for x in update.own)
    outputs = tuple(y for update in group for y in update.node.outputs)
    return MultiMap(first.exprs, len(first.own), len(group)), (*own, *first.scalars), outputs

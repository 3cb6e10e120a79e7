"""A matrix product and the map that alone reads it → one op that does not write the product."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from foreplan.graph import Builder, Graph, Node, Value
from foreplan.ops.expr import Arg, substitute, used_args
from foreplan.ops.map import Map
from foreplan.ops.matmul import MatMul
from foreplan.ops.matmul_map import MatMulMap
from foreplan.passes.base import Pass
from foreplan.passes.rewrite import Accepts, replaced, rewrite_groups


@dataclass(frozen=True)
class _Pair:
    """A product and the map behind it."""

    product: Node[MatMul]
    map: Node[Map]

    @property
    def further(self) -> list[Value]:
        """What the map reads beside the product, which has the shape of its results."""
        read = dict.fromkeys(self.map.inputs[i] for i in sorted(used_args(*self.map.op.parsed)))
        return [value for value in read if value is not self.product.outputs[0]]

    @property
    def inputs(self) -> list[Value]:
        return [*self.product.inputs, *self.further]

    @property
    def op(self) -> MatMulMap:
        matmul, then = self.product.op, self.map.op
        places = {value: Arg(1 + i) for i, value in enumerate(self.further)} | {self.product.outputs[0]: Arg(0)}
        exprs = [substitute(expr, [places.get(value, Arg(0)) for value in self.map.inputs]) for expr in then.parsed]
        return MatMulMap(tuple(map(str, exprs)), matmul.transpose_a, matmul.transpose_b)


@dataclass(frozen=True)
class FuseMatmulMaps(Pass, requires=("kernels",), ensures=("kernels",), optional=True):
    """`matmul_map` for a product that one map reads and nothing else.

    Only where it costs no memory. The product itself is no longer kept. Either its operands, which may then live until
    the map runs, are no larger than it; or the map's other inputs, such as biases and residuals, are there when the
    product is computed.

    Requires: a graph that nobody differentiates any more. Ensures: the same results.
    """

    accepts: Accepts

    def _run(self, graph: Graph) -> Graph:
        pairs: dict[Node, _Pair] = {}
        position = {node: i for i, node in enumerate(graph.nodes)}
        updates = set(graph.updates.values())
        for node in graph.nodes_of(MatMul):
            pair = _pair(graph, position, updates, node)
            if pair is None or pair.map in pairs:
                continue
            types = [value.type for value in pair.inputs], [value.type for value in pair.map.outputs]
            if self.accepts(pair.op, *types):
                pairs[pair.map] = pair
        fused = rewrite_groups(graph, pairs, {pair.product for pair in pairs.values()}, _fused)
        return _updates_after_readers(fused) if pairs else graph


def _updates_after_readers(graph: Graph) -> Graph:
    """The graph with each update of a stored value moved behind the last reader of the old content. Fused nodes read
    later than before, and an update in place must come after them.
    """
    position = {node: i for i, node in enumerate(graph.nodes)}
    behind: dict[Node, int] = {}
    for old, new in graph.updates.items():
        node = graph.producer.get(new)
        if node is None:
            continue
        last = max((position[reader] for reader in graph.readers[old] if reader is not node), default=-1)
        used = min((position[reader] for value in node.outputs for reader in graph.readers[value]), default=last + 1)
        if position[node] < last < used:
            behind[node] = max(last, behind.get(node, 0))
    nodes = sorted(graph.nodes, key=lambda node: (behind.get(node, position[node]), node in behind))
    return replace(graph, nodes=tuple(nodes)) if behind else graph


def _pair(graph: Graph, position: Mapping[Node, int], updates: set[Value], node: Node[MatMul]) -> _Pair | None:
    """A product with its map, if fusing them costs no memory."""
    if node.op.wide or len(node.inputs) != 2:
        return None
    (value,) = node.outputs
    map = graph.only_reader(value, Map)
    if map is None or any(y.shape != value.shape for y in map.outputs):
        return None
    pair, passing = _Pair(node, map), [x for x in node.inputs if not x.kind.is_stored]
    smaller = all(x.type.nbytes <= value.type.nbytes for x in passing)
    makers = (graph.producer.get(x) for x in pair.further)
    there = all(maker is None or position[maker] < position[node] for maker in makers)
    return pair if smaller or (there and updates.isdisjoint(map.outputs)) else None


def _fused(b: Builder, pair: _Pair, now: Mapping[Value, Value]) -> Sequence[Value]:
    return replaced(b, pair.map, pair.op, [now[value] for value in pair.inputs])

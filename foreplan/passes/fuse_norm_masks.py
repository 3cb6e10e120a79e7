"""Batch normalisation's gradient and the masked map that makes what it reads → one op that reads what the map reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foreplan.graph import Builder, Graph, Node, Value
from foreplan.ops.bits import MaskedMap
from foreplan.ops.norm.batch import BatchNormGrad
from foreplan.ops.norm.masked import MaskedBatchNormGrad
from foreplan.passes.base import Pass
from foreplan.passes.rewrite import Accepts, rewrite


@dataclass(frozen=True)
class _Pair:
    """A masked map and the gradient that reads it.

    Attributes:
        op: what takes the place of both.
    """

    map: Node[MaskedMap]
    norm: Node[BatchNormGrad]
    op: MaskedBatchNormGrad

    @property
    def inputs(self) -> list[Value]:
        return [*self.norm.inputs[:4], *self.map.inputs]

    @property
    def outputs(self) -> list[Value]:
        return [*self.norm.outputs, *(self.map.outputs if self.op.keeps else ())]


@dataclass(frozen=True)
class FuseNormMasks(Pass, requires=("kernels",), ensures=("kernels",), optional=True):
    """`masked_batch_norm_grad` for a gradient that a ReLU lets through and batch normalisation takes, as in ResNets.

    A pass over the images less where nobody else reads what is let through, and a read less where others do, such as
    the addition of a residual block: then the op writes it as well.

    Requires: a graph that nobody differentiates any more. Ensures: the same results, bit for bit.
    """

    accepts: Accepts

    def _run(self, graph: Graph) -> Graph:
        position = {node: i for i, node in enumerate(graph.nodes)}
        pairs: dict[Node, _Pair] = {}
        for node in graph.nodes_of(BatchNormGrad):
            pair = _pair(graph, node)
            if pair is None or pair.map in pairs:
                continue
            made = (graph.producer.get(value) for value in node.inputs[:4])
            if any(other is not None and position[other] > position[pair.map] for other in made):
                continue
            if self.accepts(pair.op, *([value.type for value in values] for values in (pair.inputs, pair.outputs))):
                pairs[pair.map] = pair
        norms = {pair.norm for pair in pairs.values()}

        def replace(b: Builder, node: Node, inputs: tuple[Value, ...]) -> Sequence[Value] | None:
            if node in pairs:
                pair = pairs[node]
                given = (*pair.norm.inputs[:4], *inputs)
                b.append(Node(pair.op, given, tuple(pair.outputs), pair.norm.name, pair.norm.source))
            return node.outputs if node in pairs or node in norms else None

        return rewrite(graph, replace) if pairs else graph


def _pair(graph: Graph, norm: Node[BatchNormGrad]) -> _Pair | None:
    x, g = norm.inputs[0], norm.inputs[4]
    map = graph.made_by(g, MaskedMap)
    if map is None or len(map.outputs) > 1:
        return None
    if any(value.type != x.type for value in map.inputs[1:]):
        return None
    keeps = g in graph.returned or set(graph.readers[g]) != {norm}
    (expr,) = map.op.exprs
    return _Pair(map, norm, MaskedBatchNormGrad(norm.op.epsilon, expr, keeps))

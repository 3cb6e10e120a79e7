"""Gradients that a step returns: those of the mean of all ranks' losses."""

from __future__ import annotations

from dataclasses import dataclass

from foreplan.graph import Builder, Graph, GraphBuilder, Value
from foreplan.graph.shard import Sharded
from foreplan.ops.collective import AllReduce, Group
from foreplan.passes.base import Pass
from foreplan.passes.ranks.setting import Ranks
from foreplan.passes.tensor.pieces import gathered


@dataclass(frozen=True)
class SumGradients(Pass, requires=("backward",), ensures=("backward",)):
    """The step in which each rank returns all of a gradient, where it had a summand or a part: of an input, that of its
    group's samples; of a parameter, the whole of it, the same on all ranks.
    """

    ranks: Ranks

    def _run(self, graph: Graph) -> Graph:
        parameters = {value.name: value for value in graph.parameters}
        b = GraphBuilder(base=graph)
        gradients = {}
        for name, gradient in sorted(graph.gradients.items()):
            parameter = parameters.get(name)
            group = Group(self.ranks.tensor) if parameter is None else self.ranks.with_other_samples(parameter)
            b.scope = f"{name}/"
            if group.ranks > 1:
                gradient = b.apply(group.op(AllReduce), gradient, name="sum")
            gradients[name] = gradient if parameter is None else _whole(b, parameter, gradient)
        b.scope = ""
        if gradients == graph.gradients:
            return graph
        return b.finish(graph.outputs, graph.updates, graph.loss, {name: gradients[name] for name in graph.gradients})


def _whole(b: Builder, parameter: Value, gradient: Value) -> Value:
    """The gradient of all of a parameter, of which each rank may have a part."""
    if not isinstance(parameter.init, Sharded):
        return gradient
    return gathered(b, gradient, parameter.init.shard, parameter.init.type.with_dtype(gradient.dtype))

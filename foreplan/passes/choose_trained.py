"""Which weights a step trains: those that the model trains, but for those that the user names; or none at all."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from foreplan.base.arguments import instance
from foreplan.base.patterns import Selection
from foreplan.graph import Graph, Kind, Node
from foreplan.ops.marks import ByMode
from foreplan.ops.norm.batch import BatchNorm, with_frozen_statistics
from foreplan.ops.random import Dropout
from foreplan.passes.base import Pass
from foreplan.passes.quantised_weights import schemes, without_weights
from foreplan.passes.rewrite import rewrite_ops, with_values

_WEIGHTS = (Kind.PARAMETER, Kind.FROZEN)


@dataclass(frozen=True)
class ChooseTrained(Pass, requires=("forward",), ensures=("forward",)):
    """The graph with the weights trained, or frozen, that patterns name; all others are as they were.

    A weight that is frozen keeps its place among the model's parameters; it gets no gradient, no optimizer state and no
    update. Buffers, such as running statistics, and integers are never trained.

    Raises:
        UsageError: a pattern means nothing, or nothing that can be trained.
    """

    selection: Selection

    def _run(self, graph: Graph) -> Graph:
        if not self.selection:
            return graph
        stored = {value.name: value for value in graph.stored if value.kind in (*_WEIGHTS, Kind.CONSTANT, Kind.BUFFER)}
        whole = {value.name for value in schemes(graph)}  # integers for which a step has weights in float32
        trainable = dict.fromkeys(getattr(graph.origin, "constants", ()), False)  # to freeze them changes nothing
        trainable |= {
            name: name in whole or (value.dtype.is_float and value.kind is not Kind.BUFFER)
            for name, value in stored.items()
        }
        weights = [name for name, value in stored.items() if value.kind in _WEIGHTS or name in whole]
        chosen = self.selection.chosen(trainable, weights)
        graph = without_weights(graph, [name for name in whole & chosen.keys() if not chosen[name][0]])

        def kind(name: str, trained: bool) -> Kind:
            left = Kind.BUFFER if stored[name] in graph.updates else Kind.FROZEN
            return Kind.CONSTANT if name in whole else Kind.PARAMETER if trained else left

        return with_values(
            graph,
            {
                stored[name]: dataclasses.replace(stored[name], kind=kind(name, trained), why=why)
                for name, (trained, why) in chosen.items()
            },
        )


@dataclass(frozen=True)
class FreezeStatistics(Pass, requires=("forward",), ensures=("forward",)):
    """The graph with frozen batch normalisation where its scale and bias are frozen, or everywhere.

    In training it then uses the running statistics, as in inference, and leaves them as they are. A module of PyTorch
    (`BatchNorm.unbiased`) has said itself whether it does, by its mode.
    """

    everywhere: bool = False

    def _run(self, graph: Graph) -> Graph:
        def is_frozen(node: Node) -> bool:
            told = isinstance(node.op, BatchNorm) and node.op.unbiased
            return not told and all(value.kind is Kind.FROZEN for value in node.inputs[1:3])

        return with_frozen_statistics(graph, lambda node: self.everywhere or is_frozen(node))


def frozen(graph: Graph) -> Graph:
    """A model that stays as it is wherever it is called: a teacher, or a part that is not trained.

    Its weights are frozen: no gradient, no optimizer state, no update; gradients still pass to its inputs. In training
    it computes what it computes in inference: batch normalisation uses the running statistics, and nothing is dropped.

    Raises:
        UsageError: it is no Graph.
    """
    instance("a model", graph, Graph, "such as from_onnx(path) gives")
    graph = without_weights(graph, [value.name for value in schemes(graph)])
    weights = {
        value: dataclasses.replace(
            value, kind=Kind.BUFFER if value in graph.updates else Kind.FROZEN, why="frozen(graph)"
        )
        for value in graph.parameters
    }
    return in_inference(with_values(graph, weights))


def in_inference(graph: Graph) -> Graph:
    """A model that computes in training what it computes in inference."""
    return FreezeStatistics(everywhere=True)(rewrite_ops(graph, lambda b, node, inputs: inputs[:1], Dropout, ByMode))

"""The loss of several ranks: the mean of theirs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from foreplan.graph import Graph, GraphBuilder, Value
from foreplan.ops.collective import AllReduce
from foreplan.ops.map import elementwise
from foreplan.passes.base import Pass


@dataclass(frozen=True)
class ShareOfMean(Pass, requires=("forward", "loss"), ensures=("forward", "loss")):
    """The forward graph whose loss is this rank's share of the mean: the sum of all ranks' is minimised."""

    ranks: int

    def _run(self, graph: Graph) -> Graph:
        def share(b: GraphBuilder, loss: Value) -> Value:
            return elementwise(b, lambda x: x * (1.0 / self.ranks), loss, dtype=loss.dtype, name="share_of_loss")

        return _with_loss(graph, share)


@dataclass(frozen=True)
class MeanOfAll(Pass, requires=("loss", "backward"), ensures=("loss", "backward")):
    """The step that returns the mean of all ranks' losses, given that its loss is a share."""

    ranks: int

    def _run(self, graph: Graph) -> Graph:
        return _with_loss(graph, lambda b, loss: b.apply(AllReduce(self.ranks), loss, name="mean_of_losses"))


def _with_loss(graph: Graph, made: Callable[[GraphBuilder, Value], Value]) -> Graph:
    """A graph with another loss, made of its own."""
    assert graph.loss is not None
    b = GraphBuilder(base=graph)
    return b.finish(graph.outputs, graph.updates, made(b, graph.loss), graph.gradients)

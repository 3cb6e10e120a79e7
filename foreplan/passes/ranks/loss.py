"""The loss of several ranks: the mean of theirs."""

from __future__ import annotations

from dataclasses import dataclass

from foreplan.graph import Graph, GraphBuilder
from foreplan.ops.collective import AllReduce
from foreplan.ops.map import elementwise
from foreplan.passes.base import Pass


@dataclass(frozen=True)
class ShareOfMean(Pass, requires=("forward", "loss"), ensures=("forward", "loss")):
    """The forward graph whose loss is this rank's share of the mean: the sum of all ranks' is minimised."""

    ranks: int

    def _run(self, graph: Graph) -> Graph:
        loss = graph.loss
        assert loss is not None
        b = GraphBuilder(base=graph)
        share = elementwise(b, lambda x: x * (1.0 / self.ranks), loss, dtype=loss.dtype, name="share_of_loss")
        return b.finish(graph.outputs, graph.updates, share, graph.gradients)


@dataclass(frozen=True)
class MeanOfAll(Pass, requires=("loss", "backward"), ensures=("loss", "backward")):
    """The step that returns the mean of all ranks' losses, given that its loss is a share."""

    ranks: int

    def _run(self, graph: Graph) -> Graph:
        loss = graph.loss
        assert loss is not None
        b = GraphBuilder(base=graph)
        mean = b.apply(AllReduce(self.ranks), loss, name="mean_of_losses")
        return b.finish(graph.outputs, graph.updates, mean, graph.gradients)

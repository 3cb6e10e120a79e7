"""The loss of several ranks: the mean of theirs."""

from __future__ import annotations

from foreplan.graph import Graph, GraphBuilder
from foreplan.ops.collective import AllReduce
from foreplan.ops.map import elementwise


def share_of_mean(graph: Graph, ranks: int) -> Graph:
    """The forward graph whose loss is this rank's share of the mean: the sum of all ranks' is minimised."""
    loss = graph.loss
    assert loss is not None
    b = GraphBuilder(base=graph)
    share = elementwise(b, lambda x: x * (1.0 / ranks), loss, dtype=loss.dtype, name="share_of_loss")
    return b.finish(graph.outputs, graph.updates, share, graph.gradients)


def mean_of_all(graph: Graph, ranks: int) -> Graph:
    """The step that returns the mean of all ranks' losses, given that its loss is a share."""
    loss = graph.loss
    assert loss is not None
    b = GraphBuilder(base=graph)
    mean = b.apply(AllReduce(ranks), loss, name="mean_of_losses")
    return b.finish(graph.outputs, graph.updates, mean, graph.gradients)

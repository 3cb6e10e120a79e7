"""Batch normalisation with the statistics of its own batch → with those of all ranks' batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foreplan.graph import Builder, Graph, Node, Value
from foreplan.ops.norm.batch import BatchNormTrain
from foreplan.ops.norm.sync import BatchNormSync
from foreplan.passes.base import Pass
from foreplan.passes.rewrite import rewrite_ops


@dataclass(frozen=True)
class SyncBatchNorm(Pass, requires=("forward", "training form"), ensures=("forward",)):
    """The graph whose batch normalisation takes the statistics of the batches of all ranks; what is frozen stays.

    Requires: training form. Ensures: the running statistics of all ranks are the same.
    """

    ranks: int

    def _run(self, graph: Graph) -> Graph:
        def replace(b: Builder, node: Node[BatchNormTrain], inputs: tuple[Value, ...]) -> Sequence[Value]:
            return b.node(BatchNormSync(node.op.epsilon, self.ranks), *inputs, name=node.name)

        return rewrite_ops(graph, replace, BatchNormTrain)

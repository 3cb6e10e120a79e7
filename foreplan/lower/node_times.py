"""The predicted time of single nodes, before anything is lowered."""

from __future__ import annotations

from foreplan.graph import GraphBuilder, Node, Op, TensorType, Window
from foreplan.graph.op import Types
from foreplan.lower.exchanges import cluster_for, exchange_nanoseconds
from foreplan.lower.target import Target
from foreplan.ops.collective import Begin


class NodeTimes:
    """What nodes take on a target: each by its fastest kernel, on dense tensors. An op without a kernel takes what the
    ops of its decomposition take, and one that has none either what the roofline says of it. An exchange takes what
    links take.
    """

    def __init__(self, target: Target, links: str = "") -> None:
        self.target, self.links = target, links
        self.known: dict[tuple[Op, tuple[TensorType, ...]], int] = {}

    def __call__(self, node: Node) -> int:
        """The nanoseconds of a node; of a view none."""
        return self._of(node.op, [x.type for x in node.inputs], [y.type for y in node.outputs])

    def _of(self, op: Op, inputs: Types, outputs: Types) -> int:
        key = op, tuple(inputs)
        if key not in self.known:
            self.known[key] = 0 if op.is_view else self._predicted(op, inputs, outputs)
        return self.known[key]

    def _predicted(self, op: Op, inputs: Types, outputs: Types) -> int:
        target = self.target
        if isinstance(op, Begin):
            return exchange_nanoseconds(op, inputs, cluster_for(op, self.links, target.profile))
        reads, writes = [Window.dense(x) for x in inputs], [Window.dense(y) for y in outputs]
        kernels = target.kernels(op, reads, writes)
        if kernels:
            return min(target.price(op, kernel, reads, writes) for kernel in kernels)
        b = GraphBuilder()
        if op.decompose(b, [b.input(f"x{i}", type) for i, type in enumerate(inputs)]) is None:
            return target.profile.nanoseconds(op.cost(inputs, outputs))
        return sum(self(node) for node in b.nodes)

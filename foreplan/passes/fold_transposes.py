"""Products with transposed matrices → products that read the matrices as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from foreplan.graph import Builder, Graph, Node, Value
from foreplan.ops.matmul import MatMul
from foreplan.ops.shape import Transpose
from foreplan.passes.base import Pass
from foreplan.passes.rewrite import rewrite_ops


@dataclass(frozen=True)
class FoldTransposes(Pass, requires=("forward", "plain ops"), ensures=("forward", "plain ops"), optional=True):
    """Let products turn a matrix themselves where a transpose has turned it.

    So a weight's gradient is computed as the weight lies. Else, of `x @ w.T`, as PyTorch's exporter writes a linear
    layer, it lies transposed, and whatever reads both, as an update does, goes across one of them.

    Ensures: the same results, up to the order in which a target adds. Only for operands of two axes.
    """

    def _run(self, graph: Graph) -> Graph:
        made: dict[Value, Value] = {}

        def plain(value: Value) -> Value | None:
            """What a transpose has turned into this value."""
            node = graph.made_by(value, Transpose)
            if node is None or node.op.perm != (1, 0):
                return None
            return made.get(node.inputs[0], node.inputs[0])

        def rewritten(b: Builder, node: Node[MatMul], inputs: tuple[Value, ...]) -> Sequence[Value] | None:
            x, w, *added = inputs
            a, c = (plain(value) for value in node.inputs[:2])
            if a is None and c is None:
                return None
            op = replace(
                node.op,
                transpose_a=node.op.transpose_a != (a is not None),
                transpose_b=node.op.transpose_b != (c is not None),
            )
            outputs = b.node(op, a or x, c or w, *added, name=node.name)
            made.update(zip(node.outputs, outputs))
            return outputs

        return rewrite_ops(graph, rewritten, MatMul)


fold_transposes = FoldTransposes()

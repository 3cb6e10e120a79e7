"""The gradient of attention on parts of one tensor → that tensor's gradient at once, in its bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foreplan.graph import Builder, Graph, Node, Op, Value
from foreplan.ops.attention.gradient import AttentionGrad
from foreplan.ops.attention.packed import PackedAttentionGrad
from foreplan.ops.join import Concat
from foreplan.ops.shape import Reshape, Slice
from foreplan.passes.base import Pass
from foreplan.passes.rewrite import rewrite


@dataclass(frozen=True)
class PackAttention(Pass, requires=("plain ops",), ensures=("plain ops", "live"), optional=True):
    """Let the gradients of queries, keys and values be written side by side, in the place of the tensor that holds all
    three.

    Where one product makes all three and attention reads them as slices, their gradients would be three tensors that
    are then concatenated; all of these live beside what the forward pass kept. This serves transformers such as
    GPT-2 and ViT, which save the time of the concatenation.

    Requires: a whole training step. Ensures: the same results, bit for bit. Only without a mask, with heads behind
    positions, and where nobody else reads the three gradients.
    """

    def _run(self, graph: Graph) -> Graph:
        packed: dict[Node, tuple[Node[AttentionGrad], Value]] = {}
        for join in graph.nodes_of(Concat):
            if (found := _packed(graph, join)) is not None:
                packed[join] = found
        if not packed:
            return graph
        now: dict[Value, Value] = {}

        def replace(b: Builder, node: Node, inputs: tuple[Value, ...]) -> Sequence[Value] | None:
            now.update(zip(node.inputs, inputs))
            if node not in packed:
                return None
            grad, x = packed[node]
            op, (q, k) = grad.op, grad.inputs[:2]
            o, lse, g = (now.get(value, value) for value in grad.inputs[3:])
            whole = PackedAttentionGrad(op.scale, q.shape[2], k.shape[2], op.causal)
            return b.node(whole, now.get(x, x), o, lse, g, name=f"{grad.name}/packed")

        return rewrite(rewrite(graph, replace), lambda b, node, inputs: None)


pack_attention = PackAttention()


def _packed(graph: Graph, join: Node[Concat]) -> tuple[Node[AttentionGrad], Value] | None:
    """(attention_grad, the tensor of queries, keys and values) of a node that concatenates their gradients."""
    if len(join.inputs) != 3 or join.op.axis != 2:
        return None
    sources = [_through(graph, value) for value in join.inputs]
    grad = graph.made_by(sources[0], AttentionGrad)
    if grad is None or tuple(sources) != grad.outputs:
        return None
    alone = all(graph.only_reader(value, Op) for value in (*sources, *join.inputs))
    x = _sliced_tensor(graph, grad.inputs[:3])
    fits = alone and x is not None and x.type == join.outputs[0].type and grad.op.heads_last and len(grad.inputs) == 6
    return (grad, x) if fits and x is not None else None


def _through(graph: Graph, value: Value) -> Value:
    """The value that this one is a reshape of, or itself."""
    node = graph.made_by(value, Reshape)
    return node.inputs[0] if node else value


def _sliced_tensor(graph: Graph, parts: Sequence[Value]) -> Value | None:
    """The tensor that three values cut up along its last axis, one behind the other; None if they do not."""
    whole: Value | None = None
    start = 0
    for value in parts:
        node = graph.made_by(_through(graph, value), Slice)
        if node is None or whole not in (None, node.inputs[0]):
            return None
        whole = node.inputs[0]
        if len(whole.shape) != 3 or value.shape[:2] != whole.shape[:2] or node.op.steps != (1, 1, 1):
            return None
        if node.op.starts != (0, 0, start) or node.op.shape[:2] != whole.shape[:2]:
            return None
        start += node.op.shape[2]
    return whole if whole is not None and start == whole.shape[2] else None

"""Cross-entropy over a large vocabulary → `linear_cross_entropy`, which never holds all the logits."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from foreplan.base.units import format_bytes
from foreplan.graph import Builder, Graph, Node, Op, Value
from foreplan.graph.types import DTYPES
from foreplan.graph.value import Kind
from foreplan.ops.expr import Arg, Call, Const, call, maximum
from foreplan.ops.linear_cross_entropy import LinearCrossEntropy, fitting_chunk, linear_cross_entropy
from foreplan.ops.loss import CrossEntropy
from foreplan.ops.map import Map, elementwise
from foreplan.ops.matmul import MatMul
from foreplan.ops.reduce import Reduce
from foreplan.ops.shape import Reshape, Slice, reshape, transpose
from foreplan.passes.base import Pass
from foreplan.passes.rewrite import rewrite_groups

SAVED_BYTES = 1 << 20  # a loss is rewritten if its logits exceed the workspace that takes their place by as much


@dataclass(frozen=True)
class _Chain:
    """matmul → views and a bias → cross_entropy → reshapes → reduce (→ division by the number of items that count).

    Attributes:
        product: the matmul that makes the logits.
        bias: what is added to them, a number a class, or None.
        views: reshapes and slices of the logits that leave the classes alone, in order.
        entropy: the cross_entropy.
        last: the node whose output is replaced.
        how: that output is the `sum` of the items' losses, or their `mean`, or the mean of those that are `counted`.
        inner: the nodes before the last; nobody else reads what they make.
        frozen: whether matrix and bias are computed from no parameter, so that they need no gradient.
    """

    product: Node[MatMul]
    bias: Value | None
    views: tuple[Node, ...]
    entropy: Node[CrossEntropy]
    last: Node
    how: str
    inner: tuple[Node, ...]
    frozen: bool

    @property
    def op(self) -> LinearCrossEntropy:
        """The op that takes its place."""
        w = self.product.inputs[1].type
        classes_first = w if self.product.op.transpose_b else w.with_shape(w.shape[::-1])
        chunk = fitting_chunk(classes_first)
        return LinearCrossEntropy(chunk, self.entropy.op.ignore_index, self.how == "counted", frozen=self.frozen)

    @property
    def saved(self) -> int:
        """Bytes of the logits beyond the workspace of the op that takes their place."""
        logits, target = (value.type for value in self.entropy.inputs)
        h, w = (value.type for value in self.product.inputs)
        types = [h.with_shape((target.size, h.shape[-1])), w.with_shape((logits.shape[-1], h.shape[-1])), target]
        return logits.nbytes - self.op.workspace(types, [])


@dataclass(frozen=True)
class ChunkLosses(Pass, requires=("forward", "plain ops"), ensures=("forward", "plain ops"), optional=True):
    """Let `linear_cross_entropy` take the place of a cross-entropy and of the product that makes its logits.

    Requires: a simplified forward graph that is about to be differentiated (the op gives gradients as well, which
    would be wasted otherwise). Ensures: the same loss, up to the order of additions. Only where nobody else reads the
    logits or the losses of single items, and the logits have at least so many bytes more than the op's workspace.
    """

    least: int = SAVED_BYTES

    def _run(self, graph: Graph) -> Graph:
        given = _from_no_parameter(graph)
        found = [_chain_at(graph, node, given) for node in graph.nodes_of(CrossEntropy)]
        chains = {chain.last: chain for chain in found if chain is not None and chain.saved >= self.least}
        absorbed = {node for chain in chains.values() for node in chain.inner}
        return rewrite_groups(graph, chains, absorbed, _replacement)


chunk_losses = ChunkLosses()


def _replacement(b: Builder, chain: _Chain, now: Mapping[Value, Value]) -> list[Value]:
    h, w = (now[value] for value in chain.product.inputs)
    op, target = chain.op, now[chain.entropy.inputs[1]]
    logits = chain.entropy.inputs[0]
    b.note(
        f"the logits {logits.name!r} ({format_bytes(logits.type.nbytes)}), which nothing but the loss reads, are never "
        f"whole: linear_cross_entropy makes and uses them {op.chunk} rows at a time"
    )
    for node in chain.views:
        shape = (*node.outputs[0].shape[:-1], h.shape[-1])
        cut = node.of(Slice)
        h = b.apply(Slice((*cut.op.starts[:-1], 0), shape, cut.op.steps), h) if cut else reshape(b, h, shape)
    h, target = reshape(b, h, (-1, h.shape[-1])), reshape(b, target, (-1,))
    w = w if chain.product.op.transpose_b else transpose(b, w, (1, 0))
    bias = None if chain.bias is None else reshape(b, now[chain.bias], (-1,))
    kind = b.kind
    b.kind = Kind.GRADIENT  # what it makes are gradients, but for one number
    loss = linear_cross_entropy(
        b,
        h,
        w,
        target,
        bias,
        ignore_index=op.ignore_index,
        chunk=op.chunk,
        mean=op.mean,
        frozen=op.frozen,
        name=f"{chain.entropy.name}/linear",
    )
    b.kind, items = kind, target.type.size
    return [elementwise(b, lambda x: x * (1.0 / items), loss) if chain.how == "mean" else loss]


def _from_no_parameter(graph: Graph) -> set[Value]:
    """The values that depend on no parameter and on no input: they need no gradient."""
    given = {value for value in graph.stored if value.kind is not Kind.PARAMETER}
    for node in graph.nodes:
        if given.issuperset(node.inputs):
            given.update(node.outputs)
    return given


def _chain_at(graph: Graph, entropy: Node[CrossEntropy], given: Collection[Value]) -> _Chain | None:
    before, after = _logits(graph, entropy), _reduction(graph, entropy)
    if before is None or after is None:
        return None
    product, bias, views, nodes = before
    last, how, more = after
    frozen = product.inputs[1] in given and (bias is None or bias in given)
    return _Chain(product, bias, views, entropy, last, how, (*nodes, entropy, *more), frozen)


def _logits(
    graph: Graph, entropy: Node[CrossEntropy]
) -> tuple[Node[MatMul], Value | None, tuple[Node, ...], tuple[Node, ...]] | None:
    """(product, bias, views, all nodes) that make the logits of a cross-entropy over the last axis."""
    value, classes = entropy.inputs[0], entropy.inputs[0].shape[-1]
    if entropy.op.axis != len(value.shape) - 1:
        return None
    bias: Value | None = None
    views: list[Node] = []
    nodes: list[Node] = []
    while graph.only_reader(value, Op) is not None and value.shape[-1:] == (classes,):
        node = graph.producer.get(value)
        if node is None:
            return None
        nodes.insert(0, node)
        if product := node.of(MatMul):
            h, w, *base = product.inputs
            fits = not base and len(w.shape) == 2 and not product.op.transpose_a and h is not w
            return (product, bias, tuple(views), tuple(nodes)) if fits else None
        if node.of(Reshape) or ((cut := node.of(Slice)) and cut.op.steps[-1] == 1):
            views.insert(0, node)
            value = node.inputs[0]
        elif (map := node.of(Map)) and (added := _added_vector(map)) and bias is None:
            value, bias = added
        else:
            return None
    return None


def _added_vector(node: Node[Map]) -> tuple[Value, Value] | None:
    """(x, vector) of a node that adds a number a column to x."""
    if not node.op.is_sum:
        return None
    for x, vector in (node.inputs, node.inputs[::-1]):
        if x.type == node.outputs[0].type and vector.dtype == x.dtype and vector.shape[-1:] == (vector.type.size,):
            return (x, vector) if vector.shape[-1] == x.shape[-1] else None
    return None


def _reduction(graph: Graph, entropy: Node[CrossEntropy]) -> tuple[Node, str, tuple[Node, ...]] | None:
    """(last node, what its output is of the items' losses, the nodes before it)."""
    loss, lse = entropy.outputs
    if graph.readers[lse] or lse in graph.returned:
        return None
    nodes: list[Node] = []
    while view := graph.only_reader(loss, Reshape):
        nodes.append(view)
        loss = view.outputs[0]
    node = graph.only_reader(loss, Reduce)
    if node is None or node.op.how not in ("sum", "mean") or node.outputs[0].shape:
        return None
    total = node.outputs[0]
    division = graph.only_reader(total, Map)
    if node.op.how == "sum" and division is not None and _divides_by_count(graph, division, total, entropy):
        return division, "counted", (*nodes, node)
    return node, node.op.how, tuple(nodes)


def _divides_by_count(graph: Graph, node: Node[Map], total: Value, entropy: Node[CrossEntropy]) -> bool:
    """Whether a node is total / max(number of targets that are not to be ignored, 1)."""
    if len(node.inputs) != 2 or node.inputs.count(total) != 1:
        return False
    i = node.inputs.index(total)
    counter = graph.made_by(node.inputs[1 - i], Reduce)
    if node.op.parsed != (Arg(i) / maximum(Arg(1 - i), 1.0),) or counter is None:
        return False
    marks = graph.made_by(counter.inputs[0], Map)
    if counter.op.how != "sum" or counter.outputs[0].shape or marks is None:
        return False
    (mark, *others) = marks.op.parsed
    counted = call("ne", Arg(0), Const(entropy.op.ignore_index))
    is_mark = not others and isinstance(mark, Call) and mark.function in DTYPES and mark.args == (counted,)
    return is_mark and _reshaped_from(graph, marks.inputs[0]) is _reshaped_from(graph, entropy.inputs[1])


def _reshaped_from(graph: Graph, value: Value) -> Value:
    view = graph.made_by(value, Reshape)
    return _reshaped_from(graph, view.inputs[0]) if view else value

"""Where parts end: what makes whole values, the same on all ranks of a group, of what each of them has."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from foreplan.graph import Builder, Node, Value
from foreplan.ops.collective import AllGather, AllReduce
from foreplan.ops.expr import Arg, call, exp, log, maximum, where
from foreplan.ops.index import Gather
from foreplan.ops.local_index import LocalIndex
from foreplan.ops.loss import CrossEntropy
from foreplan.ops.map import elementwise
from foreplan.ops.marks import StopGradient
from foreplan.ops.reduce import reduce
from foreplan.ops.shape import reshape

# From the builder, the number of ranks, the node, and its inputs as this rank has them, to the node's outputs.
Close = Callable[[Builder, int, Node, Sequence[Value]], Sequence[Value]]


def summands(b: Builder, ranks: int, node: Node, inputs: Sequence[Value]) -> Sequence[Value]:
    """Each rank has a summand of the outputs."""
    return [_sum(b, ranks, summand) for summand in b.node(node.op, *inputs, name="summand")]


def rows(b: Builder, ranks: int, node: Node, inputs: Sequence[Value]) -> Sequence[Value]:
    """Each rank has rows of a table, from which `gather` reads."""
    (table, indices), op = inputs, node.op
    assert isinstance(op, Gather)
    local = b.apply(LocalIndex(ranks, table.shape[op.axis]), indices)
    place = elementwise(b, lambda i: maximum(i, 0), local, name="row")
    read = b.apply(op, table, place)
    before, behind = len(table.shape[: op.axis]), len(table.shape[op.axis + 1 :])
    held = reshape(b, local, (*(1 for _ in range(before)), *local.shape, *(1 for _ in range(behind))))
    own = elementwise(b, lambda x, i: where(i >= 0, x, 0.0), read, held, dtype=read.dtype, name="own_rows")
    return [_sum(b, ranks, own)]


def entropies(b: Builder, ranks: int, node: Node, inputs: Sequence[Value]) -> Sequence[Value]:
    """Each rank has the logits of some classes. With l the log-sum-exp of a rank's, that of all is the log-sum-exp of
    the ranks' l, and the loss is that less the target's logit, which one rank has.
    """
    (logits, target), op = inputs, node.op
    assert isinstance(op, CrossEntropy)
    local = b.apply(LocalIndex(ranks, logits.shape[op.axis], op.ignore_index), target)
    index = elementwise(b, lambda i: where(i >= 0, i, op.ignore_index), local, name="class")
    loss, own = b.node(op, logits, index, name="own_classes")
    row = reshape(b, own, (1, *own.shape))
    every = b.apply(AllGather(ranks), row, name="log_sums")
    high = b.apply(StopGradient(), reduce(b, "max", every, (0,), keepdims=True))  # it cancels out
    total = reduce(b, "sum", elementwise(b, lambda x, m: exp(x - m), every, high), (0,), keepdims=True)
    whole = reshape(b, elementwise(b, lambda t, m: log(t) + m, total, high, name="log_sum"), own.shape)
    picked = elementwise(b, lambda x, d, i: where(i >= 0, x - d, 0.0), own, loss, local, dtype=own.dtype)
    logit = _sum(b, ranks, picked)
    counts = call("ne", Arg(2), op.ignore_index)
    return [elementwise(b, where(counts, Arg(0) - Arg(1), 0.0), whole, logit, target, dtype=own.dtype), whole]


def _sum(b: Builder, ranks: int, x: Value) -> Value:
    return b.apply(AllReduce(ranks), x, name="sum")

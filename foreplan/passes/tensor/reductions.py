"""Where parts end: what makes whole values, the same on all ranks of a group, of what each of them has; or its tokens'
part of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from foreplan.graph import Builder, Node, Value
from foreplan.ops.collective import AllGather
from foreplan.ops.expr import Arg, call, exp, log, maximum, where
from foreplan.ops.index import Gather
from foreplan.ops.local_index import LocalIndex
from foreplan.ops.loss import CrossEntropy
from foreplan.ops.map import elementwise
from foreplan.ops.marks import StopGradient
from foreplan.ops.reduce import reduce
from foreplan.ops.shape import reshape
from foreplan.passes.tensor.pieces import Total

# From the builder, what sums up, the node, and its inputs as this rank has them, to the node's outputs.
Close = Callable[[Builder, Total, Node, Sequence[Value]], Sequence[Value]]


def summands(b: Builder, total: Total, node: Node, inputs: Sequence[Value]) -> Sequence[Value]:
    """Each rank has a summand of the outputs."""
    return [total.of(b, summand) for summand in b.node(node.op, *inputs, name="summand")]


def means(b: Builder, total: Total, node: Node, inputs: Sequence[Value]) -> Sequence[Value]:
    """Each rank has the means of as many elements as any other."""
    own = b.node(node.op, *inputs, name="own_mean")
    shares = [elementwise(b, lambda x: x * (1.0 / total.ranks), x, dtype=x.dtype, name="summand") for x in own]
    return [total.of(b, share) for share in shares]


def rows(b: Builder, total: Total, node: Node, inputs: Sequence[Value]) -> Sequence[Value]:
    """Each rank has rows of a table, from which `gather` reads."""
    (table, indices), op = inputs, node.op
    assert isinstance(op, Gather)
    local = b.apply(LocalIndex(total.ranks, table.shape[op.axis], from_end=op.from_end), indices)
    place = elementwise(b, lambda i: maximum(i, 0), local, name="row")
    read = b.apply(op, table, place)
    before, behind = len(table.shape[: op.axis]), len(table.shape[op.axis + 1 :])
    held = reshape(b, local, (*(1 for _ in range(before)), *local.shape, *(1 for _ in range(behind))))
    own = elementwise(b, lambda x, i: where(i >= 0, x, 0.0), read, held, dtype=read.dtype, name="own_rows")
    return [total.of(b, own)]


def entropies(b: Builder, total: Total, node: Node, inputs: Sequence[Value]) -> Sequence[Value]:
    """Each rank has the logits of some classes. With l the log-sum-exp of a rank's, that of all is the log-sum-exp of
    the ranks' l, and the loss is that less the target's logit, which one rank has.
    """
    (logits, target), op = inputs, node.op
    assert isinstance(op, CrossEntropy)
    local = b.apply(LocalIndex(total.ranks, logits.shape[op.axis], op.ignore_index), target)
    loss, own = b.node(replace(op, ignore_index=-1), logits, local, name="own_classes")
    row = reshape(b, own, (1, *own.shape))
    every = b.apply(AllGather(total.ranks), row, name="log_sums")
    high = b.apply(StopGradient(), reduce(b, "max", every, (0,), keepdims=True))  # it cancels out
    sums = reduce(b, "sum", elementwise(b, lambda x, m: exp(x - m), every, high), (0,), keepdims=True)
    whole = reshape(b, elementwise(b, lambda t, m: log(t) + m, sums, high, name="log_sum"), own.shape)
    picked = elementwise(b, lambda x, d, i: where(i >= 0, x - d, 0.0), own, loss, local, dtype=own.dtype)
    logit = total.of(b, picked)
    counts, classes = call("ne", Arg(2), op.ignore_index), total.ranks * logits.shape[op.axis]
    loss_of_class = where(call("and", Arg(2) >= 0, Arg(2) < classes), Arg(0) - Arg(1), math.nan)
    return [elementwise(b, where(counts, loss_of_class, 0.0), whole, logit, target, dtype=own.dtype), whole]


# By what `Axes.sums` names; there is none of the others.
CLOSINGS: dict[str, Close] = {"sum": summands, "mean": means, "rows": rows, "entropies": entropies}

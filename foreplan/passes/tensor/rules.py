"""How ops compute on parts: given how one tensor of a node is cut, how its others are."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from foreplan.base.errors import ShapeError
from foreplan.graph import Node, Op, TensorType
from foreplan.graph.shard import Shard
from foreplan.graph.types import Shape
from foreplan.ops.attention.ops import Attention
from foreplan.ops.index import Gather
from foreplan.ops.join import Concat
from foreplan.ops.loss import CrossEntropy
from foreplan.ops.map import Map
from foreplan.ops.matmul import MatMul
from foreplan.ops.norm.rows import LayerNorm, RMSNorm
from foreplan.ops.random import Random
from foreplan.ops.reduce import Reduce
from foreplan.ops.shape import Broadcast, Reshape, Slice, Transpose
from foreplan.ops.softmax import LogSoftmax, Softmax
from foreplan.passes.tensor.closings import Close, entropies, means, rows, summands

Placement = Shard | None  # None: every rank has the whole tensor


class StaysWhole(Exception):
    """A tensor cannot be cut as asked; the message says why."""


@dataclass(frozen=True)
class Shards:
    """How the tensors of a node are cut.

    Attributes:
        inputs, outputs: of each.
        op: what computes the parts.
        close: what makes the outputs instead, which are whole; None: outputs are cut.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    op: Op
    close: Close | None = None


@dataclass(frozen=True)
class Known:
    """A tensor of a node whose cut is known.

    Attributes:
        index: among the node's inputs, or among its outputs if `made`.
    """

    node: Node
    index: int
    made: bool
    shard: Shard

    @property
    def inputs(self) -> list[TensorType]:
        """The types of the node's inputs."""
        return [value.type for value in self.node.inputs]

    @property
    def outputs(self) -> list[TensorType]:
        """The types of its outputs."""
        return [value.type for value in self.node.outputs]

    @property
    def type(self) -> TensorType:
        """Of the tensor."""
        return (self.outputs if self.made else self.inputs)[self.index]


def shards_of(known: Known) -> Shards:
    """How the other tensors of a node are cut.

    Raises:
        StaysWhole: its op cannot compute with such a part; says why.
    """
    rule = _RULES.get(type(known.node.op))
    if rule is None:
        raise StaysWhole(f"{known.node.op.name} needs the whole of {known.type}")
    found = rule(known)
    tensors = (*zip(found.inputs, known.inputs), *zip(found.outputs, known.outputs))
    for shard, whole in tensors:
        if shard is not None:
            check(shard, whole)
    given = [whole if shard is None else shard.of(whole) for shard, whole in zip(found.inputs, known.inputs)]
    made = [whole if shard is None else shard.of(whole) for shard, whole in zip(found.outputs, known.outputs)]
    if found.close is not None:
        return found
    try:
        fits = found.op.result_types(given) == tuple(made)
    except ShapeError:
        fits = False
    if not fits:
        raise StaysWhole(f"{found.op.name} of {known.type} cannot be computed in parts")
    return found


def check(shard: Shard, whole: TensorType) -> None:
    """Check that a tensor can be cut so.

    Raises:
        StaysWhole: it cannot; names the nearest numbers of ranks that could.
    """
    if shard.divides(whole):
        return
    extent = whole.shape[shard.axis] // shard.blocks
    if not extent:
        raise StaysWhole(f"axis {shard.axis} of {whole} is no row of {shard.blocks} blocks")
    fitting = [n for n in range(1, extent + 1) if extent % n == 0]
    near = [max(n for n in fitting if n <= shard.ranks), *[n for n in fitting if n > shard.ranks][:1]]
    fits = " or ".join(map(str, near))
    raise StaysWhole(
        f"{shard.ranks} ranks do not divide the {extent} elements along axis {shard.axis} of {whole} ({fits} would)"
    )


def _of_map(known: Known) -> Shards:
    """Elementwise: all tensors are cut alike, but for axes along which they are broadcast."""
    rank = known.outputs[0].rank
    axis = known.shard.axis + rank - known.type.rank
    inputs = tuple(_broadcast(replace(known.shard, axis=axis), rank, x.shape) for x in known.inputs)
    outputs = tuple(replace(known.shard, axis=axis) for _ in known.outputs)
    return Shards(inputs, outputs, known.node.op)


def _broadcast(shard: Shard, rank: int, shape: Shape) -> Placement:
    """The cut of a tensor that broadcasts to one of so many axes, which is cut so."""
    axis = shard.axis - (rank - len(shape))
    return replace(shard, axis=axis) if axis >= 0 and shape[axis] > 1 else None


def _of_broadcast(known: Known) -> Shards:
    (x,), (y,) = known.inputs, known.outputs
    shard = replace(known.shard, axis=known.shard.axis + y.rank - known.type.rank)
    return Shards((_broadcast(shard, y.rank, x.shape),), (shard,), Broadcast(shard.of(y).shape))


def _of_matmul(known: Known) -> Shards:
    """Rows of the left factor, columns of the right one and leading axes stay apart; along the axis that is summed,
    each rank has a summand.
    """
    op = known.node.op
    assert isinstance(op, MatMul)
    a, b, *base = known.inputs
    rank, shard = known.outputs[0].rank, known.shard
    row, inner = (-1, -2) if op.transpose_a else (-2, -1)
    columns, inner_b = (-2, -1) if op.transpose_b else (-1, -2)
    at = shard.axis - known.type.rank  # negative: the same from the end in all tensors
    if not known.made and known.index < 2 and at == (inner if known.index == 0 else inner_b):
        if base:
            raise StaysWhole("a product that adds to another tensor cannot be a sum over ranks")
        sides = (replace(shard, axis=a.rank + inner), replace(shard, axis=b.rank + inner_b))
        return Shards(sides, (None,), op, summands)
    if known.made or known.index == 2:
        kind = {-2: "rows", -1: "columns"}.get(at, "leading")
    else:
        kind = "leading" if at < -2 else "rows" if known.index == 0 else "columns"
    axes: dict[str, tuple[int | None, int | None, int]] = {
        "rows": (a.rank + row, None, rank - 2),
        "columns": (None, b.rank + columns, rank - 1),
        "leading": (_leading(a, at), _leading(b, at), rank + at),
    }
    of_a, of_b, of_y = (None if axis is None else replace(shard, axis=axis) for axis in axes[kind])
    return Shards((of_a, of_b, *(of_y for _ in base)), (of_y,), op)


def _leading(x: TensorType, at: int) -> int | None:
    """The leading axis of a factor that is so many from the end, if it has one that is not broadcast."""
    return x.rank + at if x.rank + at >= 0 and x.shape[at] > 1 else None


def _of_reshape(known: Known) -> Shards:
    """In C order a cut tensor is a number of stretches, of each of which every rank has a part: so it is in the other
    shape.
    """
    (x,), (y,), shard = known.inputs, known.outputs, known.shard
    other = x if known.made else y
    if not x.size:
        raise StaysWhole(f"{x} has no elements")
    stretches = math.prod(known.type.shape[: shard.axis]) * shard.blocks
    outer = 1
    for axis, extent in enumerate(other.shape):
        if stretches % outer == 0 and stretches < outer * extent and extent % (stretches // outer) == 0:
            cut = Shard(shard.ranks, axis, stretches // outer)
            check(cut, other)
            return Shards(*(((cut,), (shard,)) if known.made else ((shard,), (cut,))), Reshape(_shape(known, cut)))
        outer *= extent
    raise StaysWhole(f"{known.type}, {shard}, is no part of {other}")


def _shape(known: Known, other: Shard) -> Shape:
    """The shape that a reshape of parts gives."""
    shard = known.shard if known.made else other
    return shard.of(known.outputs[0]).shape


def _of_transpose(known: Known) -> Shards:
    op, shard = known.node.op, known.shard
    assert isinstance(op, Transpose)
    before = op.perm[shard.axis] if known.made else shard.axis
    return Shards((replace(shard, axis=before),), (replace(shard, axis=op.perm.index(before)),), op)


def _of_slice(known: Known) -> Shards:
    """Along the cut axis a slice is of whole blocks."""
    op, (x,), (y,), shard = known.node.op, known.inputs, known.outputs, known.shard
    assert isinstance(op, Slice)
    axis, block = shard.axis, known.type.shape[shard.axis] // shard.blocks
    start, count, whole = op.starts[axis], op.shape[axis], x.shape[axis]
    starts = list(op.starts)
    if count != whole:
        if op.steps[axis] != 1 or start % block or count % block or whole % block:
            raise StaysWhole(f"elements {start} to {start + count} along axis {axis} of {x} are not whole blocks of it")
        starts[axis] = start // shard.ranks
    elif op.steps[axis] != 1:
        raise StaysWhole(f"axis {axis} of {x} is turned around")
    before, behind = (replace(shard, blocks=extent // block) for extent in (whole, count))
    check(behind, y)
    return Shards((before,), (behind,), Slice(tuple(starts), behind.of(y).shape, op.steps))


def _of_concat(known: Known) -> Shards:
    op, shard = known.node.op, known.shard
    assert isinstance(op, Concat)
    if shard.axis == op.axis:
        raise StaysWhole(f"tensors are put one behind the other along the axis of {known.type} that would be cut")
    return Shards(tuple(shard for _ in known.inputs), (shard,), op)


def _of_attention(known: Known) -> Shards:
    """By heads, or by samples."""
    op, shard = known.node.op, known.shard
    assert isinstance(op, Attention)
    heads = 2 if op.heads_last else 1
    is_mask, is_sums = not known.made and known.index == 3, known.made and known.index == 1
    axis = shard.axis + (4 - known.type.rank if is_mask else 0)  # a mask may have fewer axes, the last ones
    if axis != 0 and (axis != (1 if is_mask or is_sums else heads) or shard.blocks > 1):
        raise StaysWhole(f"attention is computed by heads or samples, and {known.type} would be cut along another axis")
    of_heads, of_sums = replace(shard, axis=axis and heads), replace(shard, axis=min(axis, 1))
    mask = [_broadcast(of_sums, 4, x.shape) for x in known.inputs[3:]]
    return Shards((of_heads, of_heads, of_heads, *mask), (of_heads, of_sums), op)


def _of_rows(known: Known) -> Shards:
    """What computes along one axis, or from one axis on, takes any other axis in parts."""
    op, shard = known.node.op, known.shard
    assert isinstance(op, Softmax | LogSoftmax)
    if shard.axis == op.axis:
        raise StaysWhole(f"{op.name} needs the whole of axis {op.axis} of {known.type}")
    return Shards((shard,), (shard,), op)


def _of_norm(known: Known) -> Shards:
    op, shard = known.node.op, known.shard
    assert isinstance(op, LayerNorm | RMSNorm)
    if shard.axis >= op.axis or (not known.made and known.index > 0):
        raise StaysWhole(f"{op.name} needs the whole of {known.type} from axis {op.axis} on")
    return Shards((shard, *(None for _ in known.inputs[1:])), tuple(shard for _ in known.outputs), op)


def _of_reduce(known: Known) -> Shards:
    op, shard, x = known.node.op, known.shard, known.inputs[0]
    assert isinstance(op, Reduce)
    kept = [axis for axis in range(x.rank) if op.keepdims or axis not in op.axes]
    axis = kept[shard.axis] if known.made else shard.axis
    if axis in op.axes:
        close = {"sum": summands, "mean": means}.get(op.how)
        if close is None or known.made:
            raise StaysWhole(f"{op.how} of {x} needs the whole of axis {axis}")
        return Shards((shard,), (None,), op, close)
    return Shards((replace(shard, axis=axis),), (replace(shard, axis=kept.index(axis)),), op)


def _of_gather(known: Known) -> Shards:
    """Rows of a table; or other axes of it; or some of the indices."""
    op, indices, shard = known.node.op, known.inputs[1], known.shard
    assert isinstance(op, Gather)
    behind = indices.rank - 1  # how many axes more the result has behind those before the rows
    if known.made:
        axis = shard.axis
    elif known.index:
        axis = shard.axis + op.axis
    elif shard.axis != op.axis:
        axis = shard.axis + (behind if shard.axis > op.axis else 0)
    elif shard.blocks == 1:
        return Shards((shard, None), (None,), op, rows)
    else:
        raise StaysWhole(f"gather of {known.type} needs neighbouring rows of it")
    result = (replace(shard, axis=axis),)
    if op.axis <= axis <= op.axis + behind:
        return Shards((None, replace(shard, axis=axis - op.axis)), result, op)
    return Shards((replace(shard, axis=axis if axis < op.axis else axis - behind), None), result, op)


def _of_entropy(known: Known) -> Shards:
    """Classes; or items, each with all of its classes."""
    op, shard = known.node.op, known.shard
    assert isinstance(op, CrossEntropy)
    is_logits = not known.made and not known.index
    if is_logits and shard.axis == op.axis:
        if shard.blocks > 1:
            raise StaysWhole(f"cross_entropy of {known.type} is computed in parts by neighbouring classes alone")
        return Shards((shard, None), (None, None), op, entropies)
    axis = shard.axis - (is_logits and shard.axis > op.axis)  # among the items
    items = replace(shard, axis=axis)
    return Shards((replace(shard, axis=axis + (axis >= op.axis)), items), (items, items), op)


def _of_random(known: Known) -> Shards:
    """Each rank draws its own."""
    op = known.node.op
    assert isinstance(op, Random)
    if not known.made:
        raise StaysWhole("the state of random numbers is one")
    return Shards((None,), (known.shard,), replace(op, shape=known.shard.of(known.type).shape))


_RULES: dict[type[Op], Callable[[Known], Shards]] = {
    Map: _of_map,
    Broadcast: _of_broadcast,
    MatMul: _of_matmul,
    Reshape: _of_reshape,
    Transpose: _of_transpose,
    Slice: _of_slice,
    Concat: _of_concat,
    Attention: _of_attention,
    Softmax: _of_rows,
    LogSoftmax: _of_rows,
    LayerNorm: _of_norm,
    RMSNorm: _of_norm,
    Reduce: _of_reduce,
    Gather: _of_gather,
    CrossEntropy: _of_entropy,
    Random: _of_random,
}

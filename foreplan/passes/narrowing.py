"""How ops compute a box of their results: the op that does, and the box that it reads of each input.

A box is a slice: a first index, an extent and a step along each axis. What is not listed here, or cannot do with less
than the whole, has no rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from foreplan.graph import Node, Op
from foreplan.graph.types import Shape
from foreplan.ops.attention.ops import Attention
from foreplan.ops.conv.ops import Conv, ConvDataGrad
from foreplan.ops.index import Gather
from foreplan.ops.index_elements import GatherElements
from foreplan.ops.join import Concat, Pad
from foreplan.ops.loss import CrossEntropy
from foreplan.ops.map import Map
from foreplan.ops.matmul import MatMul
from foreplan.ops.norm.batch import BatchNorm, BatchNormTrain, ChannelMoments
from foreplan.ops.norm.rows import LayerNorm, RMSNorm
from foreplan.ops.norm.sync import BatchNormSync
from foreplan.ops.pool import AvgPool, MaxPool
from foreplan.ops.reduce import Reduce
from foreplan.ops.resize import Resize
from foreplan.ops.scan import CumSum
from foreplan.ops.shape import Broadcast, Reshape, Slice, Transpose
from foreplan.ops.softmax import LogSoftmax, Softmax
from foreplan.ops.sort import ArgReduce, TopK


@dataclass(frozen=True)
class Narrowed:
    """What computes a box of a node's results.

    Attributes:
        op: takes the boxes of the inputs.
        inputs: the box of each; None: all of it.
        outputs: the box of each output, of which the first is the one that was asked for.
    """

    op: Op
    inputs: Sequence[Slice | None]
    outputs: Sequence[Slice]


def narrowed(node: Node, box: Slice) -> Narrowed | None:
    """What computes a box of a node's first output; None: nothing does, or no rule says so."""
    rule = RULES.get(type(node.op))
    found = rule(node, box) if rule is not None and all(box.shape) else None
    if found is None:
        return None
    op, inputs, *others = found
    cut = [box if box is not None and touched(box, x.shape) else None for box, x in zip(inputs, node.inputs)]
    return Narrowed(op, cut, [box, *(others[0] if others else [box] * (len(node.outputs) - 1))])


def box_of(places: Iterable[tuple[int, int, int]]) -> Slice:
    """The box of a first index, an extent and a step along each axis."""
    starts, extents, steps = tuple(zip(*places)) or ((), (), ())
    return Slice(starts, extents, steps)


def whole(shape: Shape) -> Slice:
    """The box that is all of a tensor."""
    return box_of((0, extent, 1) for extent in shape)


def touched(box: Slice, shape: Shape) -> list[int]:
    """The axes along which a box leaves something out or changes the order."""
    return [i for i, extent in enumerate(shape) if (box.starts[i], box.shape[i], box.steps[i]) != (0, extent, 1)]


def _axes(box: Slice, axes: Sequence[int | None], shape: Shape) -> Slice:
    """The box of a tensor of this shape whose axes are those of another box, or None: whole."""
    return box_of((0, extent, 1) if i is None else _place(box, i) for i, extent in zip(axes, shape))


def _place(box: Slice, axis: int) -> tuple[int, int, int]:
    return box.starts[axis], box.shape[axis], box.steps[axis]


def _spread(box: Slice, shape: Shape) -> Slice:
    """The box of what is broadcast to the tensor that the box is of: axes from the right, those of extent 1 whole."""
    lead = len(box.shape) - len(shape)
    return _axes(box, [None if extent == 1 else lead + i for i, extent in enumerate(shape)], shape)


_Found = tuple[Op, Sequence[Slice | None]] | tuple[Op, Sequence[Slice | None], Sequence[Slice]] | None


def _map(node: Node, box: Slice) -> _Found:
    return node.op, [_spread(box, value.shape) for value in node.inputs]


def _rows(node: Node, box: Slice) -> _Found:
    """Some rows of x normalise as they do among all of them."""
    assert isinstance(node.op, LayerNorm | RMSNorm)
    if any(axis >= node.op.axis for axis in touched(box, node.inputs[0].shape)):
        return None
    others = [_axes(box, range(len(value.shape)), value.shape) for value in node.outputs[1:]]
    return node.op, [box, *[None] * (len(node.inputs) - 1)], others


def _lines(node: Node, box: Slice) -> _Found:
    """Some of the lines along an axis, each of which gives what it gives among all of them."""
    assert isinstance(node.op, Softmax | LogSoftmax | CumSum)
    return None if node.op.axis in touched(box, node.outputs[0].shape) else (node.op, [box])


def _best(node: Node, box: Slice) -> _Found:
    """Whole lines along an axis, with what is greatest in each."""
    assert isinstance(node.op, TopK)
    (x,), axis = node.inputs, node.op.axis
    return None if axis in touched(box, node.outputs[0].shape) else (node.op, [_lines_of(box, axis, x.shape)])


def _lines_of(box: Slice, axis: int, shape: Shape) -> Slice:
    """The same box along all axes but one, of which it is all."""
    return _axes(box, [None if i == axis else i for i in range(len(shape))], shape)


def _elements(node: Node, box: Slice) -> _Found:
    """Some of the indices, and the lines that they choose from."""
    assert isinstance(node.op, GatherElements)
    return node.op, [_lines_of(box, node.op.axis, node.inputs[0].shape), box]


def _item_losses(node: Node, box: Slice) -> _Found:
    """Some items, with all classes of each."""
    assert isinstance(node.op, CrossEntropy)
    logits, axis = node.inputs[0].shape, node.op.axis
    items = [None if i == axis else i - (i > axis) for i in range(len(logits))]
    return node.op, [_axes(box, items, logits), box]


def _product(node: Node, box: Slice) -> _Found:
    """Rows of the left side, columns of the right, and items of both."""
    assert isinstance(node.op, MatMul)
    a, b = node.inputs[:2]
    rank = len(box.shape)
    batch = [[rank - len(x.shape) + i if x.shape[i] > 1 else None for i in range(len(x.shape) - 2)] for x in (a, b)]
    rows: list[int | None] = [rank - 2, None]
    columns: list[int | None] = [None, rank - 1]
    left = _axes(box, batch[0] + (rows[::-1] if node.op.transpose_a else rows), a.shape)
    right = _axes(box, batch[1] + (columns[::-1] if node.op.transpose_b else columns), b.shape)
    return node.op, [left, right, *[box] * (len(node.inputs) - 2)]


def _reshape(node: Node, box: Slice) -> _Found:
    """Axes that hold the same elements as a range of one axis before."""
    before, after = node.inputs[0].shape, node.outputs[0].shape
    places = [(0, extent, 1) for extent in before]
    for axis in touched(box, after):
        start, count, step = _place(box, axis)
        found = _axis_before(before, after, axis, start, count)
        if found is None or places[found[0]] != (0, before[found[0]], 1):
            return None
        at, first, extent, same = found
        if step != 1 and not same:
            return None
        places[at] = first, extent, step
    cut = box_of(places)
    # Axes of several touched ones must stay apart: the number of elements tells.
    return (Reshape(box.shape), [cut]) if math.prod(cut.shape) == math.prod(box.shape) else None


def _axis_before(before: Shape, after: Shape, axis: int, start: int, count: int) -> tuple[int, int, int, bool] | None:
    """The axis before a reshape, and the range of it, that holds a range of an axis after it; and whether it is the
    same axis.
    """
    outer, inner = math.prod(after[:axis]), math.prod(after[axis + 1 :])
    for at, extent in enumerate(before):
        if math.prod(before[:at]) != outer or extent == 1:
            continue
        own = math.prod(before[at + 1 :])
        if own and start * inner % own == 0 and count * inner % own == 0:
            return at, start * inner // own, count * inner // own, extent == after[axis]
    return None


def _transpose(node: Node, box: Slice) -> _Found:
    assert isinstance(node.op, Transpose)
    back = {axis: i for i, axis in enumerate(node.op.perm)}
    shape = node.inputs[0].shape
    return node.op, [_axes(box, [back[i] for i in range(len(shape))], shape)]


def _slice(node: Node, box: Slice) -> _Found:
    """The stretch between the first and the last element that is read."""
    assert isinstance(node.op, Slice)
    if any(step < 0 for step in (*node.op.steps, *box.steps)):
        return None
    starts = tuple(s + b * t for s, b, t in zip(node.op.starts, box.starts, node.op.steps))
    steps = tuple(t * b for t, b in zip(node.op.steps, box.steps))
    extents = tuple((count - 1) * step + 1 for count, step in zip(box.shape, steps))
    rank = len(starts)
    return Slice((0,) * rank, box.shape, steps), [Slice(starts, extents, (1,) * rank)]


def _broadcast(node: Node, box: Slice) -> _Found:
    return Broadcast(box.shape), [_spread(box, node.inputs[0].shape)]


def _concat(node: Node, box: Slice) -> _Found:
    """Along the other axes."""
    assert isinstance(node.op, Concat)
    axis = node.op.axis
    if axis in touched(box, node.outputs[0].shape):
        return None
    axes = [None if i == axis else i for i in range(len(box.shape))]
    return node.op, [_axes(box, axes, value.shape) for value in node.inputs]


def _reduce(node: Node, box: Slice) -> _Found:
    assert isinstance(node.op, Reduce | ArgReduce)
    shape, reduced = node.inputs[0].shape, node.op.axes if isinstance(node.op, Reduce) else (node.op.axis,)
    kept = iter(range(len(shape)))
    axes = [None if i in reduced and not node.op.keepdims else next(kept) for i in range(len(shape))]
    return node.op, [_axes(box, [None if i in reduced else at for i, at in enumerate(axes)], shape)]


def _gather(node: Node, box: Slice) -> _Found:
    """Some of the indices, and a box of the rows that they name."""
    assert isinstance(node.op, Gather)
    (data, indices), axis = (value.shape for value in node.inputs), node.op.axis
    more = len(indices) - 1
    rows = [None if i == axis else i if i < axis else i + more for i in range(len(data))]
    return node.op, [_axes(box, rows, data), _axes(box, range(axis, axis + len(indices)), indices)]


def _conv(node: Node, box: Slice) -> _Found:
    """Items, output channels of whole groups, and positions with what their taps read beyond them."""
    assert isinstance(node.op, Conv)
    op, (x, w, *added) = node.op, node.inputs
    items, channels = _place(box, 0), _place(box, 1)
    wide = w.shape[0] // op.groups  # output channels of a group
    read, groups = (0, x.shape[1], 1), op.groups
    if channels != (0, w.shape[0], 1) and groups > 1:
        if channels[2] != 1 or channels[0] % wide or channels[1] % wide:
            return None
        groups = channels[1] // wide
        read = channels[0] // wide * w.shape[1], groups * w.shape[1], 1
    found = _windows(box, x.shape[2:], w.shape[2:], op.strides, op.pads, op.dilations)
    if found is None:
        return None
    places, pads = found
    image = box_of([items, read, *places])
    rank = len(w.shape)
    weights = _axes(box, [1, *[None] * (rank - 1)], w.shape)
    summands = [box if value.shape == node.outputs[0].shape else _axes(box, [1], value.shape) for value in added]
    return replace(op, pads=pads, groups=groups), [image, weights, *summands]


def _transposed_conv(node: Node, box: Slice) -> _Found:
    """Items, and channels of a single group."""
    assert isinstance(node.op, ConvDataGrad)
    cut = touched(box, node.outputs[0].shape)
    if max(cut, default=0) > 1 or (1 in cut and node.op.groups > 1):
        return None
    g, w = (value.shape for value in node.inputs[:2])
    channels = [None, 1 if 1 in cut else None, *[None] * (len(w) - 2)]
    images = _axes(box, [0, *[None] * (len(g) - 1)], g)
    return node.op, [images, _axes(box, channels, w), *[box] * (len(node.inputs) - 2)]


def _resize(node: Node, box: Slice) -> _Found:
    """Along the axes that stay as they are."""
    assert isinstance(node.op, Resize)
    before, after, scales = node.inputs[0].shape, node.outputs[0].shape, node.op.scales
    if any(before[i] != after[i] or (scales and scales[i] != 1) for i in touched(box, after)):
        return None
    axes = [i if before[i] == after[i] else None for i in range(len(after))]
    return replace(node.op, shape=box.shape), [_axes(box, axes, before)]


def _pad(node: Node, box: Slice) -> _Found:
    """Along the axes that get nothing."""
    assert isinstance(node.op, Pad)
    pads = node.op.pads
    if any(pads[i] != (0, 0) for i in touched(box, node.outputs[0].shape)):
        return None
    axes = [i if pair == (0, 0) else None for i, pair in enumerate(pads)]
    return node.op, [_axes(box, axes, node.inputs[0].shape)]


def _pool(node: Node, box: Slice) -> _Found:
    assert isinstance(node.op, MaxPool | AvgPool)
    op, (x,) = node.op, node.inputs
    spatial = x.shape[2:]
    if isinstance(op, AvgPool) and any(axis > 1 for axis in touched(box, node.outputs[0].shape)):
        return None  # what a window at the border is divided by would change
    found = _windows(box, spatial, op.kernel, op.strides, op.pads, op.dilations)
    if found is None:
        return None
    places, pads = found
    image = box_of([_place(box, 0), _place(box, 1), *places])
    return replace(op, pads=pads), [image]


def _windows(
    box: Slice, extents: Shape, kernel: Shape, strides: Shape, pads: Sequence[tuple[int, int]], dilations: Shape
) -> tuple[list[tuple[int, int, int]], tuple[tuple[int, int], ...]] | None:
    """What windows at a box of positions read along each spatial axis, and the padding that is left of it."""
    places, kept = [], []
    for axis, (extent, taps, stride, (low, high), gap) in enumerate(zip(extents, kernel, strides, pads, dilations), 2):
        start, count, step = _place(box, axis)
        positions = (extent + low + high - gap * (taps - 1) - 1) // stride + 1
        if (start, count, step) == (0, positions, 1):
            places.append((0, extent, 1))
            kept.append((low, high))
            continue
        first = start * stride - low
        stop = first + (count - 1) * stride + gap * (taps - 1) + 1
        begin, end = max(first, 0), min(stop, extent)
        if step != 1 or begin >= end or min(low, high) < 0:
            return None
        places.append((begin, end - begin, 1))
        kept.append((begin - first, stop - end))
    return places, tuple(kept)


def _norm(node: Node, box: Slice) -> _Found:
    """With statistics that are given: any box."""
    vectors = [_axes(box, [1], value.shape) for value in node.inputs[1:]]
    return node.op, [box, *vectors]


def _own_norm(node: Node, box: Slice) -> _Found:
    """With the statistics of x: channels."""
    if set(touched(box, node.outputs[0].shape)) - {1}:
        return None
    vector = _axes(box, [1], node.outputs[1].shape)
    return node.op, [box, vector, vector], [vector, vector]


def _moments(node: Node, box: Slice) -> _Found:
    """Of channels."""
    shape = node.inputs[0].shape
    return node.op, [_axes(box, [None, 0, *[None] * (len(shape) - 2)], shape)], [box]


def _attention(node: Node, box: Slice) -> _Found:
    """Items, heads that share keys, and queries, if each of them reads all keys."""
    assert isinstance(node.op, Attention)
    q, k, v, *mask = node.inputs
    tokens, heads = (1, 2) if node.op.heads_last else (2, 1)
    cut = touched(box, node.outputs[0].shape)
    if 3 in cut or any(box.steps[axis] != 1 for axis in cut) or (tokens in cut and node.op.causal):
        return None
    group = q.shape[heads] // k.shape[heads]
    if box.starts[heads] % group or box.shape[heads] % group:
        return None
    queries = _axes(box, [0, 1, 2, None], q.shape)
    keys = []
    for value in (k, v):
        own = _axes(box, [0, None, None, None], value.shape)
        starts, extents = list(own.starts), list(own.shape)
        starts[heads], extents[heads] = box.starts[heads] // group, box.shape[heads] // group
        keys.append(replace(own, starts=tuple(starts), shape=tuple(extents)))
    scores = _axes(box, [0, heads, tokens, None], (q.shape[0], q.shape[heads], q.shape[tokens], k.shape[tokens]))
    return (
        node.op,
        [queries, *keys, *(_spread(scores, value.shape) for value in mask)],
        [_axes(box, [0, heads, tokens], node.outputs[1].shape)],
    )


RULES: dict[type[Op], Callable[[Node, Slice], _Found]] = {
    Map: _map,
    LayerNorm: _rows,
    RMSNorm: _rows,
    Softmax: _lines,
    LogSoftmax: _lines,
    CumSum: _lines,
    TopK: _best,
    CrossEntropy: _item_losses,
    MatMul: _product,
    Reshape: _reshape,
    Transpose: _transpose,
    Slice: _slice,
    Broadcast: _broadcast,
    Concat: _concat,
    Reduce: _reduce,
    ArgReduce: _reduce,
    Gather: _gather,
    GatherElements: _elements,
    Pad: _pad,
    Conv: _conv,
    ConvDataGrad: _transposed_conv,
    Resize: _resize,
    MaxPool: _pool,
    AvgPool: _pool,
    BatchNorm: _norm,
    BatchNormTrain: _own_norm,
    BatchNormSync: _own_norm,
    ChannelMoments: _moments,
    Attention: _attention,
}

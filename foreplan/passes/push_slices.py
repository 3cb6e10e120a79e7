"""Slices of results → results of slices: values that nobody reads are not computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from foreplan.graph import Builder, Graph, Node, Op, Value
from foreplan.graph.ir import Kind
from foreplan.graph.types import Shape
from foreplan.ops.attention.ops import Attention
from foreplan.ops.map import Map
from foreplan.ops.matmul import MatMul
from foreplan.ops.norm.rows import LayerNorm, RMSNorm
from foreplan.ops.shape import Reshape, Slice
from foreplan.passes.rewrite import rewrite

SHARE = 2  # a slice is pushed if it keeps at most 1 / SHARE of the elements

Narrowed = tuple[Op, list[Slice | None]]  # what computes the slice, and the slice of each input (None: all of it)


def push_slices(graph: Graph) -> Graph:
    """Compute only the slice of a forward result that is read, and likewise of its inputs, and of theirs.

    This serves classifiers that read one token of many, such as ViT, which then compute only that one behind the last
    attention; and language models that are asked for the last position's logits.

    Ensures: the same results, up to the blocks in which products are computed. Only where all readers read the same
    slice, of at most half of the elements, through element-wise maps, products of rows, normalisations of rows,
    reshapes, and attention that is neither causal nor masked.
    """
    plans: dict[Node, Narrowed] = {}
    for node in reversed(graph.nodes):
        wanted = _wanted(graph, node, plans)
        if wanted is not None and (found := _narrowed(node, wanted)) is not None:
            plans[node] = found
    if not plans:
        return graph
    parts: dict[tuple[Value, Slice], Value] = {}

    def part(b: Builder, old: Value, new: Value, cut: Slice | None) -> Value:
        producer = graph.producer.get(old)
        if cut is None or (producer is not None and producer in plans):
            return new
        if (new, cut) not in parts:
            parts[new, cut] = b.apply(cut, new, name=f"{new.name}/part")
        return parts[new, cut]

    def rewritten(b: Builder, node: Node, inputs: tuple[Value, ...]) -> Sequence[Value] | None:
        if node in plans:
            op, cuts = plans[node]
            values = [part(b, old, new, cut) for old, new, cut in zip(node.inputs, inputs, cuts, strict=True)]
            return b.node(op, *values, name=f"{node.name}/part")
        producer = graph.producer.get(node.inputs[0]) if isinstance(node.op, Slice) else None
        return [inputs[0]] if producer is not None and producer in plans else None

    return rewrite(graph, rewritten)


def _wanted(graph: Graph, node: Node, plans: dict[Node, Narrowed]) -> Slice | None:
    """The one slice of a node's first output that all its readers read, if nobody reads anything else of it."""
    first, *others = node.outputs
    if any(graph.readers[value] or value in graph.returned for value in others) or first in graph.returned:
        return None
    wanted: set[Slice] = set()
    for reader in graph.readers[first]:
        if isinstance(reader.op, Slice):
            wanted.add(reader.op)
            continue
        cuts = plans[reader][1] if reader in plans else []
        read = [cut for value, cut in zip(reader.inputs, cuts) if value is first]
        if not read or None in read:
            return None
        wanted.update(cut for cut in read if cut is not None)
    if len(wanted) != 1 or first.kind is not Kind.ACTIVATION:
        return None
    (cut,) = wanted
    return cut if first.type.with_shape(cut.shape).size * SHARE <= first.type.size else None


def _narrowed(node: Node, cut: Slice) -> Narrowed | None:
    rule = _RULES.get(type(node.op))
    return None if rule is None or not all(cut.shape) else rule(node, cut)


def _touched(cut: Slice, shape: Shape) -> list[int]:
    """The axes along which a slice leaves something out or changes the order."""
    return [i for i, extent in enumerate(shape) if (cut.starts[i], cut.shape[i], cut.steps[i]) != (0, extent, 1)]


def _along(cut: Slice, axes: int, shape: Shape) -> Slice:
    """The slice of the first `axes` axes, and all of the others, of a tensor of this shape."""
    rest = len(shape) - axes
    return Slice(
        (*cut.starts[:axes], *[0] * rest), (*cut.shape[:axes], *shape[axes:]), (*cut.steps[:axes], *[1] * rest)
    )


def _narrow_map(node: Node, cut: Slice) -> Narrowed | None:
    """Each input's own axes, from the right; those of extent 1 are broadcast and stay."""
    if len(node.outputs) > 1:
        return None
    cuts: list[Slice | None] = []
    for value in node.inputs:
        lead = len(cut.shape) - len(value.shape)
        spread = [extent == 1 for extent in value.shape]
        starts = tuple(0 if one else start for one, start in zip(spread, cut.starts[lead:]))
        shape = tuple(1 if one else extent for one, extent in zip(spread, cut.shape[lead:]))
        steps = tuple(1 if one else step for one, step in zip(spread, cut.steps[lead:]))
        own = Slice(starts, shape, steps)
        cuts.append(own if _touched(own, value.shape) else None)
    return node.op, cuts


def _narrow_rows(node: Node, cut: Slice) -> Narrowed | None:
    """Some rows of x normalise as they do among all of them."""
    assert isinstance(node.op, LayerNorm | RMSNorm)
    if any(axis >= node.op.axis for axis in _touched(cut, node.inputs[0].shape)):
        return None
    return node.op, [cut, *[None] * (len(node.inputs) - 1)]


def _narrow_product(node: Node, cut: Slice) -> Narrowed | None:
    """Some rows of the left side, times a matrix."""
    assert isinstance(node.op, MatMul)
    if len(node.inputs) > 2:
        return None
    a, b = node.inputs
    rows = len(a.shape) - 1
    if node.op.transpose_a or len(b.shape) > 2 or rows in _touched(cut, node.outputs[0].shape):
        return None
    return node.op, [_along(cut, rows, a.shape), None]


def _narrow_reshape(node: Node, cut: Slice) -> Narrowed | None:
    """Axes in front that the reshape leaves alone."""
    before, after = node.inputs[0].shape, node.outputs[0].shape
    same = next((i for i, (m, n) in enumerate(zip(before, after)) if m != n), min(len(before), len(after)))
    if any(axis >= same for axis in _touched(cut, after)):
        return None
    return Reshape(cut.shape), [_along(cut, same, before)]


def _narrow_attention(node: Node, cut: Slice) -> Narrowed | None:
    """Some queries, each of which attends to all keys."""
    assert isinstance(node.op, Attention)
    q = node.inputs[0]
    tokens = 1 if node.op.heads_last else 2
    if node.op.causal or len(node.inputs) > 3 or _touched(cut, node.outputs[0].shape) != [tokens]:
        return None
    return node.op, [replace(cut, shape=(*cut.shape[:3], q.shape[3])), None, None]


_RULES: dict[type[Op], Callable[[Node, Slice], Narrowed | None]] = {
    Map: _narrow_map,
    LayerNorm: _narrow_rows,
    RMSNorm: _narrow_rows,
    MatMul: _narrow_product,
    Reshape: _narrow_reshape,
    Attention: _narrow_attention,
}

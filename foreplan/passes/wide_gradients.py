"""Gradients of narrow types: sums that a conversion to float32 would follow are left wide, and maps round once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foreplan.graph import Builder, Graph, Kind, Node, Value
from foreplan.graph.types import BOOL
from foreplan.ops.bits import MaskedMap
from foreplan.ops.expr import Arg, cast
from foreplan.ops.map import Map, rounded, without_rounding
from foreplan.passes.base import Pass
from foreplan.passes.rewrite import replaced, rewrite


@dataclass(frozen=True)
class WideGradients(Pass, requires=("plain ops",), ensures=("plain ops", "live"), optional=True):
    """Let gradients that are read in float32 alone be float32 from the sum on that makes them.

    A contraction reads a parameter through a conversion, whose derivative converts the gradient back. The contraction's
    sums are float32 inside in any case: here they stay so, and nothing is rounded or converted.

    Requires: a whole training step. Ensures: the same results, but for roundings that are left out.
    """

    def _run(self, graph: Graph) -> Graph:
        widened: set[Value] = set()
        for node in graph.nodes:
            if _is_widening(node):
                found = _sources(graph, node.inputs[0])
                widened |= set() if found is None else found
        while torn := _torn(graph, widened):
            widened -= torn

        def replace(b: Builder, node: Node, inputs: tuple[Value, ...]) -> Sequence[Value] | None:
            if _is_widening(node) and node.inputs[0] in widened:
                return [inputs[0]]
            if widened.isdisjoint(node.outputs):
                return None
            op = node.op
            if isinstance(op, Map):
                dtypes = [value.dtype for value in inputs]
                (expr,) = rounded(op.parsed, dtypes, [node.outputs[0].dtype.wide])
                op = Map((str(without_rounding(expr, dtypes)),))
            return replaced(b, node, op.wide_form or op, inputs)

        return rewrite(graph, replace) if widened else graph


wide_gradients = WideGradients()


def _is_widening(node: Node) -> bool:
    """Whether a node converts a narrow gradient to its wide type, and nothing else."""
    if not isinstance(node.op, Map) or node.outputs[0].kind is not Kind.GRADIENT:
        return False
    x = node.inputs[0].dtype
    return x.is_narrow and node.op.parsed == (cast(Arg(0), x.wide),)


def _sources(graph: Graph, value: Value) -> set[Value] | None:
    """A narrow gradient, and what it is put together from, if all of it can be made wide at no cost; else None."""
    node = graph.producer.get(value)
    if node is None or value.kind is not Kind.GRADIENT or value in graph.returned:
        return None
    if any(not _reads_wide(graph, reader) for reader in graph.readers[value]):
        return None
    if node.op.wide_form is not None:
        is_sum = node.op.wide_sum([x.type for x in node.inputs]) == node.outputs.index(value)
        return {value} if is_sum and _adds_to_none(node) else None
    if isinstance(node.op, Map):
        return {value} if len(node.outputs) == 1 else None
    if not _is_put_together(node):
        return None
    parts = [_sources(graph, x) for x in node.inputs if x.dtype.is_narrow]
    return None if None in parts else {value}.union(*(part for part in parts if part))


def _reads_wide(graph: Graph, reader: Node) -> bool:
    """Whether all that comes of what a node reads is converted to the wide type at once."""
    if not _is_put_together(reader):
        return _is_widening(reader)
    read = [each for value in reader.outputs for each in graph.readers[value]]
    return graph.returned.isdisjoint(reader.outputs) and all(_reads_wide(graph, each) for each in read)


def _torn(graph: Graph, widened: set[Value]) -> set[Value]:
    """Those of some values that a node puts together with others, which stay narrow."""
    found: set[Value] = set()
    for node in graph.nodes:
        if _is_put_together(node):
            made = [value for value in node.outputs if graph.readers[value] or value in graph.returned]
            values = [value for value in (*node.inputs, *made) if value.dtype.is_narrow]
            found.update(() if widened.issuperset(values) else widened.intersection(values))
    return found


def _is_put_together(node: Node) -> bool:
    """Whether a node gives what it reads, as wide or narrow as that is. What ranks exchange is half as much narrow."""
    op = node.op
    return op.keeps_precision and op.wide_form is None and not isinstance(op, Map) and not op.of_ranks


def _adds_to_none(node: Node) -> bool:
    return not node.op.accumulates or len(node.inputs) <= node.op.accumulates


@dataclass(frozen=True)
class WideMaps(Pass, requires=("plain ops",), ensures=("plain ops", "live"), optional=True):
    """Let maps of narrow gradients compute in the wide type and round their results once.

    Requires: a whole training step, its maps fused. Ensures: the same results, but for roundings that are left out.
    """

    def _run(self, graph: Graph) -> Graph:
        def replace(b: Builder, node: Node, inputs: tuple[Value, ...]) -> Sequence[Value] | None:
            op = node.op
            if not isinstance(op, Map | MaskedMap) or node.outputs[0].kind is not Kind.GRADIENT:
                return None
            values = (*inputs, *node.outputs)
            if not any(value.dtype.is_narrow for value in values):
                return None
            dtypes = [value.dtype for value in inputs]
            if isinstance(op, MaskedMap):
                dtypes[0] = BOOL
            plain = (op if isinstance(op, Map) else op.map).parsed
            wide = rounded(plain, dtypes, [value.dtype.wide for value in node.outputs])
            bare = [without_rounding(expr, dtypes) for expr in wide]
            exprs = [
                expr if value.dtype == value.dtype.wide else cast(expr, value.dtype)
                for expr, value in zip(bare, node.outputs)
            ]
            texts = tuple(map(str, exprs))
            return None if texts == op.exprs else replaced(b, node, type(op)(texts), inputs)

        return rewrite(graph, replace)


wide_maps = WideMaps()

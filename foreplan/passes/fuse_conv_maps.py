"""A convolution and the maps and normalisation that alone read its result → one op that writes it once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from foreplan.graph import Builder, Graph, Node, TensorType, Value
from foreplan.ops.conv.mapped import ConvMap, steps_of
from foreplan.ops.conv.ops import Conv
from foreplan.ops.expr import Arg, Call, Expr, subexpressions, substitute, used_args
from foreplan.ops.map import Map
from foreplan.ops.norm.batch import BatchNorm
from foreplan.passes.base import Pass
from foreplan.passes.rewrite import Accepts, rewrite_groups

RESULT = Arg(0)


@dataclass(frozen=True)
class _Chain:
    """A convolution and the nodes behind it, each of which alone reads the one before.

    Attributes:
        expr: the nodes' expression over the convolution's result, a0, and a further argument for each entry of `reads`.
        reads: (node, index) of each further input: that of a map, or one of the shape of a normalisation's vectors.
    """

    conv: Node[Conv]
    nodes: tuple[Node, ...] = ()
    expr: Expr = RESULT
    reads: tuple[tuple[Node, int], ...] = ()

    @property
    def last(self) -> Node:
        return self.nodes[-1] if self.nodes else self.conv

    @property
    def op(self) -> ConvMap:
        return ConvMap(*self.conv.op.geometry, str(self.expr), len(self.conv.inputs) > 2)

    @property
    def types(self) -> list[TensorType]:
        """Of what the op reads."""
        further = [node.inputs[index] for node, index in self.reads]
        channels = self.conv.outputs[0].shape[1:2]
        spatial = [1] * (len(self.conv.outputs[0].shape) - 2)
        vectors = [x.type.with_shape((*x.shape, *spatial)) if x.shape == channels else x.type for x in further]
        return [value.type for value in self.conv.inputs] + vectors


@dataclass(frozen=True)
class FuseConvMaps(Pass, requires=("kernels",), ensures=("kernels",), optional=True):
    """`conv_map` for a convolution whose result goes through maps and normalisation and nowhere else: as many of these
    as the target has a kernel for. Most kernels do additions, products and a ReLU.

    Requires: a graph that nobody differentiates any more. Ensures: the same results up to rounding: a normalisation's
    factor is computed first, and a narrow result is rounded only once.
    """

    accepts: Accepts

    def _run(self, graph: Graph) -> Graph:
        groups: dict[Node, _Chain] = {}
        taken: set[Node] = set()
        for node in graph.nodes_of(Conv):
            if len(node.inputs) > 2 and len(node.inputs[2].shape) > 1:
                continue
            chain, best = _Chain(node), None
            while (longer := _longer(graph, chain)) is not None and longer.last not in taken:
                chain = longer
                if self.accepts(chain.op, chain.types, [node.outputs[0].type]):
                    best = chain
            if best is not None:
                groups[best.last] = best
                taken.update(best.nodes)
        inner = {node for chain in groups.values() for node in (chain.conv, *chain.nodes[:-1])}
        return rewrite_groups(graph, groups, inner, _fused)


def _longer(graph: Graph, chain: _Chain) -> _Chain | None:
    """The chain with the node behind it, if only that node reads its result and one kernel can compute both."""
    (value,) = chain.last.outputs
    node = graph.only_reader(value, BatchNorm, Map)
    if node is None or node.inputs.count(value) != 1 or len(node.outputs) != 1 or node.outputs[0].type != value.type:
        return None
    first = len(chain.reads) + 1
    if node.of(BatchNorm) and node.inputs[0] is value:
        reads: list[tuple[Node, int]] = [(node, 1)] * 3
        mean, factor, bias = (Arg(first + i) for i in range(3))
        expr: Expr = (chain.expr - mean) * factor + bias
    elif (map := node.of(Map)) and node.outputs[0].kind is value.kind:
        others = [i for i in sorted(used_args(*map.op.parsed)) if node.inputs[i] is not value]
        if not all(_is_read_along(node.inputs[i], value) for i in others):
            return None
        reads = [(node, i) for i in others]
        along = {i: Arg(first + k) for k, i in enumerate(others)}
        expr = substitute(_wide(map), [along.get(i, chain.expr) for i in range(len(node.inputs))])
    else:
        return None
    if len(used_args(expr)) != first + len(reads):  # one of them makes no difference
        return None
    whole = [n.inputs[i] for n, i in (*chain.reads, *reads) if n.of(Map) and n.inputs[i].type == value.type]
    if len(whole) > 1 or (steps_of(expr) is None and value.dtype.is_narrow):
        return None
    return _Chain(chain.conv, (*chain.nodes, node), expr, (*chain.reads, *reads))


def _wide(node: Node[Map]) -> Expr:
    """A map's expression over wide arguments and with a wide result: without conversions from and to narrow types."""
    (expr,), result = node.op.parsed, node.outputs[0].dtype
    if not result.is_narrow:
        return expr
    plain: dict[Expr, Expr] = {}
    for part in subexpressions(expr):
        if isinstance(part, Call):
            first = part.args[0]
            widens = isinstance(first, Arg) and node.inputs[first.index].dtype.is_narrow
            dropped = result.name if part == expr else result.wide.name if widens else ""
            whole = Call(part.function, tuple(plain[x] for x in part.args))
            plain[part] = plain[first] if part.function == dropped else whole
        else:
            plain[part] = part
    return plain[expr]


def _is_read_along(x: Value, result: Value) -> bool:
    """Whether an input of a map has the result's type, or is one number a channel, which may be wide beside narrow
    images."""
    vector = (result.shape[1], *(1 for _ in result.shape[2:]))
    alike = x.dtype in (result.dtype, result.dtype.wide)
    return x.type == result.type or (alike and x.shape in (vector, (1, *vector)))


def _fused(b: Builder, chain: _Chain, now: Mapping[Value, Value]) -> Sequence[Value]:
    conv = chain.conv
    further: list[Value] = []
    for node in chain.nodes:
        if norm := node.of(BatchNorm):
            further += norm.op.vectors(b, [now[value] for value in norm.inputs[1:]], len(norm.outputs[0].shape))
        else:
            further += [now[node.inputs[i]] for which, i in chain.reads if which is node]
    return [b.apply(chain.op, *(now[value] for value in conv.inputs), *further, name=f"{conv.name}/fused")]

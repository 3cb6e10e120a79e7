"""Adapters of low rank beside frozen weights."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from foreplan.arguments import instance, names_in, number_in, whole
from foreplan.errors import UsageError
from foreplan.graph import Builder, Graph, Initializer, Kind, Node, Normal, TensorType, Uniform, Value
from foreplan.graph.adapter import FACTORS, OF_TABLES, AdapterZero, is_factor, module_of
from foreplan.ops.conv.ops import Conv, conv
from foreplan.ops.index import Gather, gather
from foreplan.ops.map import Map, elementwise
from foreplan.ops.matmul import MatMul, matmul
from foreplan.ops.random import dropout as dropped
from foreplan.ops.shape import Transpose, transpose
from foreplan.passes.loops import write_out_loops
from foreplan.passes.rewrite import replaced, rewrite, with_values
from foreplan.patterns import close_names, matches

_WEIGHTS = (Kind.PARAMETER, Kind.FROZEN)


@dataclass(frozen=True)
class _Use:
    """A node that reads a weight in a way that an adapter can follow.

    Attributes:
        kind: of the op: MatMul, Gather or Conv.
        transposed: whether a product is with the weight's transpose.
    """

    weight: Value
    node: Node
    kind: type[MatMul | Gather | Conv]
    transposed: bool = False


@dataclass(frozen=True)
class _Factors:
    """The two factors of an adapter in a graph: see `foreplan.graph.adapter`."""

    a: Value
    b: Value
    scale: float
    transposed: bool


def lora(
    graph: Graph, rank: int = 8, alpha: float = 16.0, targets: Iterable[str] | None = None, dropout: float = 0.0
) -> Graph:
    """A model whose weights are frozen, with low-rank adapters that are trained in their place (Hu et al. 2021).

    Where the model computes x·Wᵀ, it then computes x·Wᵀ + alpha/rank · dropout(x)·Aᵀ·Bᵀ. A is drawn from U(±1/√in), as
    PEFT draws it, and B begins at zero, so that the model begins as it was. An adapter of a table of embeddings has A
    at zero and B from N(0, 1); one of a convolution has A with the convolution's taps and B with one tap. A weight that
    is read several times, such as a tied one, has one adapter, which stands at each place. Loops are written out.

    Args:
        graph: a model in inference form.
        rank: of the adapters.
        alpha: the strength of the adapters is alpha / rank.
        targets: patterns of weights, as `compile` takes them: `["h.*.attn"]`, `["*.q_proj", "*.v_proj"]`. None: all
            that only products read, but for the model's last products, its heads.
        dropout: share of the adapters' inputs that training drops; of products and convolutions.

    Returns:
        A graph whose new parameters are called as PEFT calls them: `h.0.attn.c_attn.lora_A.weight`. Other weights are
        frozen; `compile(train=["head"])` trains some of them, too.

    Raises:
        UsageError: an argument is out of range; or a pattern means no weight, or none that can have an adapter, which
            are those that only products, embeddings, or convolutions in one group read.
    """
    instance("a model", graph, Graph, "such as from_onnx(path) gives")
    rank = whole("rank", rank, 1)
    scale = number_in("alpha", alpha, math.ulp(0.0), math.inf) / rank
    dropout = number_in("dropout", dropout, 0.0, 1.0)
    patterns = None if targets is None else names_in("targets", targets)
    why = "lora trains adapters alone"
    base = [value for value in graph.parameters if not is_factor(value.name)]
    source = graph
    graph = with_values(
        write_out_loops(graph), {value: dataclasses.replace(value, kind=Kind.FROZEN, why=why) for value in base}
    )
    uses = _uses(graph)
    chosen = _chosen(graph, uses, patterns)
    at = {use.node: use for weight in chosen for use in uses[weight]}
    made: dict[Value, _Factors] = {}

    def replace(b: Builder, node: Node, inputs: tuple[Value, ...]) -> Sequence[Value] | None:
        use = at.get(node)
        if use is None:
            return None
        b.scope = f"{node.name}/"
        if use.weight not in made:
            made[use.weight] = _factors(b, use.weight, uses[use.weight], rank, scale)
        was = b.apply(node.op, *inputs, name="base")
        added = _added(b, use, made[use.weight], inputs, dropout)
        b.scope = ""
        return replaced(b, node, Map(("(a0 + a1)",)), (was, added))

    def finish(b: Builder) -> None:
        b.note(f"LoRA of rank {rank} and alpha {alpha:g}: {len(chosen)} weights have adapters, all weights are frozen")

    adapted = rewrite(graph, replace, finish=finish)
    return dataclasses.replace(adapted, origin=source.origin if isinstance(source.origin, Graph) else source)


def _uses(graph: Graph) -> dict[Value, list[_Use]]:
    """The uses of each weight that can have an adapter."""
    found = {}
    for weight in graph.stored:
        if weight.kind in _WEIGHTS and weight.dtype.is_float and not is_factor(weight.name):
            uses = _uses_of(graph, weight)
            if uses and weight not in graph.returned:
                found[weight] = uses
    return found


def _uses_of(graph: Graph, weight: Value) -> list[_Use]:
    """All uses of a weight; none if there is one that an adapter cannot follow."""
    uses = []
    for node in graph.readers[weight]:
        if isinstance(node.op, Transpose) and node.op.perm == (1, 0):
            turned = node.outputs[0]
            inner = [_use(weight, turned, reader, True) for reader in graph.readers[turned]]
            inner += [None] * (turned in graph.returned)
        else:
            inner = [_use(weight, weight, node, False)]
        if not all(inner):
            return []
        uses += [use for use in inner if use is not None]
    return uses


def _use(weight: Value, read: Value, node: Node, turned: bool) -> _Use | None:
    if node.inputs.count(read) > 1 or len(node.inputs) < 2:
        return None
    op, index = node.op, node.inputs.index(read)
    if isinstance(op, MatMul) and index == 1 and len(weight.shape) == 2 and len(node.inputs) == 2:
        return _Use(weight, node, MatMul, op.transpose_b != turned)
    if isinstance(op, Conv) and index == 1 and op.groups == 1:
        return _Use(weight, node, Conv)
    table = isinstance(op, Gather) and op.axis == 0 and len(weight.shape) == 2 and len(node.inputs[1].shape) > 0
    return _Use(weight, node, Gather) if table and index == 0 and not turned else None


def _chosen(graph: Graph, uses: Mapping[Value, Sequence[_Use]], patterns: Sequence[str] | None) -> list[Value]:
    """The weights that get adapters, in the graph's order."""
    if patterns is None:
        heads = {_last_product(graph, output) for output in graph.outputs.values()}
        chosen = [
            weight
            for weight, found in uses.items()
            if all(use.kind is MatMul and use.node not in heads for use in found)
        ]
        if not chosen:
            raise UsageError(f"graph {graph.name!r} has no weight that only products read, but for heads: name targets")
    else:
        stored = [value.name for value in graph.stored if value.kind in _WEIGHTS]
        for pattern in patterns:
            meant = [name for name in stored if matches(name, pattern)]
            if not meant:
                near = f"; there are {close_names(pattern, stored)}" if stored else ""
                raise UsageError(f"targets: no weight of the model is called {pattern!r}{near}")
            if not any(matches(weight.name, pattern) for weight in uses):
                raise UsageError(
                    f"targets: {meant[0]!r} can have no adapter: those have weights that only products, embeddings, or "
                    "convolutions in one group read"
                )
        chosen = [weight for weight in uses if any(matches(weight.name, pattern) for pattern in patterns)]
        if not chosen:
            raise UsageError("targets is empty: name weights, or leave it out to mean those of all products")
    names = {value.name for value in graph.stored}
    for weight in chosen:
        if not names.isdisjoint(module_of(weight.name) + end for end in (*FACTORS, *OF_TABLES)):
            raise UsageError(f"targets: {weight.name!r} has an adapter already")
    return chosen


def _last_product(graph: Graph, output: Value) -> Node | None:
    """The product that an output is, but for a bias, an activation, or another shape."""
    node = graph.producer.get(output)
    while node is not None and not isinstance(node.op, MatMul):
        computed = [value for value in node.inputs if value in graph.producer]
        node = graph.producer[computed[0]] if len(computed) == 1 else None
    return node


def _factors(b: Builder, weight: Value, uses: Sequence[_Use], rank: int, scale: float) -> _Factors:
    """New parameters beside a weight."""
    products = [use for use in uses if use.kind is MatMul]
    is_table = all(use.kind is Gather for use in uses)
    transposed = is_table or (bool(products) and not products[0].transposed)
    wide, narrow = (1, 0) if transposed else (0, 1)
    out, inner, taps = weight.shape[wide], weight.shape[narrow], weight.shape[2:]
    shapes = (rank, inner, *taps), (out, rank, *[1] * len(taps))
    bound = 1 / math.sqrt(max(1, inner * math.prod(taps)))
    zero = AdapterZero(scale, transposed)
    inits: tuple[Initializer, Initializer] = (zero, Normal(1.0)) if is_table else (Uniform(-bound, bound), zero)
    factors = []
    for end, shape, init in zip(OF_TABLES if is_table else FACTORS, shapes, inits):
        name, type = module_of(weight.name) + end, TensorType(weight.dtype, shape)
        factors.append(b.adopt(Value(name, type, Kind.PARAMETER, init, f"the adapter of {weight.name!r}"), name))
    return _Factors(factors[0], factors[1], scale, transposed)


def _added(b: Builder, use: _Use, of: _Factors, inputs: Sequence[Value], dropout: float) -> Value:
    """What an adapter adds to the result of a node."""

    def scaled(value: Value) -> Value:
        return value if of.scale == 1 else elementwise(b, lambda v: v * of.scale, value)

    if use.kind is Gather:
        if of.transposed:
            return matmul(b, scaled(gather(b, transpose(b, of.a, (1, 0)), inputs[1])), of.b, transpose_b=True)
        return matmul(b, scaled(gather(b, of.b, inputs[1])), of.a)
    x = dropped(b, inputs[0], dropout)
    if use.kind is Conv:
        return conv(b, scaled(b.apply(use.node.op, x, of.a)), of.b)
    turned = isinstance(use.node.op, MatMul) and use.node.op.transpose_a
    if use.transposed != of.transposed:
        return matmul(b, scaled(matmul(b, x, of.a, turned, True)), of.b, transpose_b=True)
    return matmul(b, scaled(matmul(b, x, of.b, turned)), of.a)

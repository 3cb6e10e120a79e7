"""Adapters of low rank beside frozen weights."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from foreplan.base.arguments import flag, instance, names_in, number_in, whole
from foreplan.base.errors import UsageError
from foreplan.base.patterns import matches, no_such_weight
from foreplan.graph import Builder, Graph, Initializer, Kind, Node, Normal, TensorType, Uniform, Value
from foreplan.graph.adapter import (
    FACTORS,
    LEAST_NORM,
    MAGNITUDE,
    OF_TABLES,
    AdapterMagnitude,
    AdapterZero,
    is_of_adapter,
    module_of,
)
from foreplan.ops.conv.ops import Conv, conv
from foreplan.ops.expr import maximum, sqrt
from foreplan.ops.index import Gather, gather
from foreplan.ops.map import Map, elementwise
from foreplan.ops.marks import StopGradient
from foreplan.ops.matmul import MatMul, matmul
from foreplan.ops.random import dropout as dropped
from foreplan.ops.reduce import reduce
from foreplan.ops.shape import Transpose, reshape, transpose
from foreplan.passes.loops import write_out_loops
from foreplan.passes.rewrite import replaced, rewrite, with_values

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

    @property
    def out_axis(self) -> int:
        """The weight's axis that becomes the result's."""
        return 0 if self.kind is Conv or self.transposed else 1


@dataclass(frozen=True)
class _Factors:
    """The two factors of an adapter in a graph: see `foreplan.graph.adapter`.

    Attributes:
        gain: what each output of the adapted weight is multiplied with, [out]; None without DoRA.
    """

    a: Value
    b: Value
    scale: float
    transposed: bool
    gain: Value | None = None


def lora(
    graph: Graph,
    rank: int = 8,
    alpha: float = 16.0,
    targets: Iterable[str] | None = None,
    dropout: float = 0.0,
    dora: bool = False,
) -> Graph:
    """A model whose weights are frozen, with low-rank adapters that are trained in their place (Hu et al. 2021).

    Where the model computes x·Wᵀ, it then computes x·Wᵀ + alpha/rank · dropout(x)·Aᵀ·Bᵀ. A is drawn from U(±1/√in), as
    PEFT draws it, and B begins at zero, so that the model begins as it was. An adapter of a table of embeddings has A
    at zero and B from N(0, 1); one of a convolution has A with the convolution's taps and B with one tap. A weight that
    is read several times, such as a tied one, has one adapter, which stands at each place. Loops are written out.

    With `dora`, the adapted weight is scaled to norms m that are trained, too (DoRA, Liu et al. 2024): for V = W +
    alpha/rank · B·A it is m · V/‖V‖, where ‖V‖, one norm for each output, counts as a constant in the gradient. m
    begins as ‖W‖ of the weight that the session has drawn or loaded. As in PEFT, dropout is applied to what m changes.

    Args:
        graph: a model in inference form.
        rank: of the adapters.
        alpha: the strength of the adapters is alpha / rank.
        targets: patterns of weights, as `compile` takes them: `["h.*.attn"]`, `["*.q_proj", "*.v_proj"]`. None: all
            that only products read, but for the model's last products, its heads.
        dropout: share of the adapters' inputs that training drops; of products and convolutions.
        dora: whether the norms of the adapted weights are trained, too.

    Returns:
        A graph whose new parameters are called as PEFT calls them: `h.0.attn.c_attn.lora_A.weight`. Other weights are
        frozen; `compile(train=["head"])` trains some of them, too.

    Raises:
        UsageError: an argument is out of range; or a pattern means no weight, or none that can have an adapter, which
            are those that only products, embeddings, or convolutions in one group read; with `dora`, along one axis.
    """
    instance("a model", graph, Graph, "such as from_onnx(path) gives")
    rank = whole("rank", rank, 1)
    scale = number_in("alpha", alpha, math.ulp(0.0), math.inf) / rank
    dropout = number_in("dropout", dropout, 0.0, 1.0)
    dora = flag("dora", dora)
    patterns = None if targets is None else names_in("targets", targets)
    why = "lora trains adapters alone"
    base = [value for value in graph.parameters if not is_of_adapter(value.name)]
    source = graph
    graph = with_values(
        write_out_loops(graph), {value: dataclasses.replace(value, kind=Kind.FROZEN, why=why) for value in base}
    )
    uses = _uses(graph)
    chosen = _chosen(graph, uses, patterns)
    if dora:
        _check_axes(chosen, uses)
    at = {use.node: use for weight in chosen for use in uses[weight]}
    made: dict[Value, _Factors] = {}

    def replace(b: Builder, node: Node, inputs: tuple[Value, ...]) -> Sequence[Value] | None:
        use = at.get(node)
        if use is None:
            return None
        b.scope = f"{node.name}/"
        if use.weight not in made:
            made[use.weight] = _factors(b, use.weight, uses[use.weight], rank, scale, dora)
        op, values = _adapted(b, use, made[use.weight], inputs, dropout)
        b.scope = ""
        return replaced(b, node, op, values)

    def finish(b: Builder) -> None:
        kind = "DoRA" if dora else "LoRA"
        b.note(
            f"{kind} of rank {rank} and alpha {alpha:g}: {len(chosen)} weights have adapters, all weights are frozen"
        )

    adapted = rewrite(graph, replace, finish=finish)
    return dataclasses.replace(adapted, origin=source.origin if isinstance(source.origin, Graph) else source)


def _uses(graph: Graph) -> dict[Value, list[_Use]]:
    """The uses of each weight that can have an adapter."""
    found = {}
    for weight in graph.stored:
        if weight.kind in _WEIGHTS and weight.dtype.is_float and not is_of_adapter(weight.name):
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
                raise no_such_weight("targets", pattern, stored)
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
        if not names.isdisjoint(module_of(weight.name) + end for end in (*FACTORS, *OF_TABLES, MAGNITUDE)):
            raise UsageError(f"targets: {weight.name!r} has an adapter already")
    return chosen


def _check_axes(chosen: Iterable[Value], uses: Mapping[Value, Sequence[_Use]]) -> None:
    """Check that each weight has norms of one axis.

    Raises:
        UsageError: one is read along both, such as a table that is the head, too.
    """
    for weight in chosen:
        if len({use.out_axis for use in uses[weight]}) > 1:
            raise UsageError(
                f"targets: {weight.name!r} is read along both of its axes, and DoRA scales along one: "
                "leave it out, or leave dora out"
            )


def _last_product(graph: Graph, output: Value) -> Node | None:
    """The product that an output is, but for a bias, an activation, or another shape."""
    node = graph.producer.get(output)
    while node is not None and not isinstance(node.op, MatMul):
        computed = [value for value in node.inputs if value in graph.producer]
        node = graph.producer[computed[0]] if len(computed) == 1 else None
    return node


def _factors(b: Builder, weight: Value, uses: Sequence[_Use], rank: int, scale: float, dora: bool) -> _Factors:
    """New parameters beside a weight."""

    def parameter(end: str, shape: Sequence[int], init: Initializer) -> Value:
        name, type = module_of(weight.name) + end, TensorType(weight.dtype, tuple(shape))
        return b.adopt(Value(name, type, Kind.PARAMETER, init, f"the adapter of {weight.name!r}"), name)

    products = [use for use in uses if use.kind is MatMul]
    is_table = all(use.kind is Gather for use in uses)
    transposed = is_table or (bool(products) and not products[0].transposed)
    wide, narrow = (1, 0) if transposed else (0, 1)
    out, inner, taps = weight.shape[wide], weight.shape[narrow], weight.shape[2:]
    shapes = (rank, inner, *taps), (out, rank, *[1] * len(taps))
    bound = 1 / math.sqrt(max(1, inner * math.prod(taps)))
    zero = AdapterZero(scale, transposed)
    inits: tuple[Initializer, Initializer] = (zero, Normal(1.0)) if is_table else (Uniform(-bound, bound), zero)
    ends = OF_TABLES if is_table else FACTORS
    factors = map(parameter, ends, shapes, inits)
    of = _Factors(next(factors), next(factors), scale, transposed)
    if not dora:
        return of
    magnitude = parameter(MAGNITUDE, (1, out, *[1] * len(taps)) if taps else (out,), AdapterMagnitude())
    return dataclasses.replace(of, gain=_gain(b, weight, of, reshape(b, magnitude, (out,))))


def _gain(b: Builder, weight: Value, of: _Factors, magnitude: Value) -> Value:
    """m / ‖W + scale · B·A‖, [out], with the norm as a constant."""
    rank, outs = of.a.shape[0], of.b.shape[0]
    one, other = reshape(b, of.a, (rank, of.a.type.size // rank)), reshape(b, of.b, (outs, rank))
    product = matmul(b, one, other, True, True) if of.transposed else matmul(b, other, one)
    flat = reshape(b, weight, product.shape)
    squares = elementwise(b, lambda w, p: (w + p * of.scale) * (w + p * of.scale), flat, product)
    total = reduce(b, "sum", squares, 0 if of.transposed else 1, wide=True)
    norm = elementwise(b, lambda s: maximum(sqrt(s), LEAST_NORM), total, dtype=weight.dtype)
    return elementwise(b, lambda m, n: m / n, magnitude, b.apply(StopGradient(), norm))


def _adapted(
    b: Builder, use: _Use, of: _Factors, inputs: Sequence[Value], dropout: float
) -> tuple[Map, tuple[Value, ...]]:
    """The result of a node with its adapter, as a map of values that are made for it."""
    x = inputs[0] if use.kind is Gather else dropped(b, inputs[0], dropout)
    if of.gain is None:
        return Map(("(a0 + a1)",)), (b.apply(use.node.op, *inputs, name="base"), _added(b, use, of, x, inputs[1]))
    alone = b.apply(use.node.op, x, inputs[1], name="alone")
    whole = _added(b, use, of, x, inputs[1], alone)  # in one node, so that the gain's gradient keeps this alone

    def beside_channels(value: Value) -> Value:
        one_each = use.kind is Conv and len(value.shape) == 1
        return reshape(b, value, (-1, *[1] * (len(whole.shape) - 2))) if one_each else value

    gain = beside_channels(of.gain)
    if x is not inputs[0]:  # as PEFT has it: what m changes is computed of what is left of x
        base = b.apply(use.node.op, *inputs, name="base")
        return Map(("(a0 + ((a1 * a2) - a3))",)), (base, whole, gain, alone)
    if len(inputs) == 2:
        return Map(("(a0 * a1)",)), (whole, gain)
    return Map(("((a0 * a1) + a2)",)), (whole, gain, beside_channels(inputs[2]))


def _added(b: Builder, use: _Use, of: _Factors, x: Value, second: Value, *onto: Value) -> Value:
    """What an adapter adds to the result of a node, or the sum of it and another value.

    Args:
        x, second: the node's inputs, the first of which may be dropped in part.
        onto: the other value.
    """

    def scaled(value: Value) -> Value:
        return value if of.scale == 1 else elementwise(b, lambda v: v * of.scale, value)

    turned = isinstance(use.node.op, MatMul) and use.node.op.transpose_a
    by_b = of.transposed if use.kind is Gather else use.transposed != of.transposed  # B is the second of the product
    if use.kind is Conv:
        return conv(b, scaled(b.apply(use.node.op, x, of.a)), of.b, *onto)
    if use.kind is Gather:
        low = gather(b, transpose(b, of.a, (1, 0)) if by_b else of.b, second)
    else:
        low = matmul(b, x, of.a if by_b else of.b, turned, by_b)
    return b.apply(MatMul(transpose_b=by_b), scaled(low), of.b if by_b else of.a, *onto)

"""A model's graph as modules: nodes that PyTorch has one op for are put together, as its users write them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

from foreplan.base.errors import UsageError
from foreplan.base.patterns import close_names, matching_scope, scopes_of
from foreplan.eager import expressions
from foreplan.graph import Graph, Node, Value
from foreplan.ops import expr as ex
from foreplan.ops.expr import Arg, Expr

SUM = "(a0 + a1)"
_AFFINE = "((a0 * a1) + a2)"
_LONGEST = 12  # maps of one activation


@dataclass(frozen=True)
class Group:
    """Nodes that PyTorch has one op for. It runs in the place of the last.

    Attributes:
        nodes: those before the last.
        op: the name of an activation; `group_norm`; `attention`, of keys and values with fewer heads; `same`: its
            input; or `biased`: a linear layer or a transposed convolution.
        inputs: what it reads.
    """

    nodes: tuple[Node, ...]
    op: str
    inputs: tuple[Value, ...]


@dataclass(frozen=True)
class Module:
    """A model in PyTorch: the nodes of its graph, those that PyTorch has one op for put together.

    Attributes:
        graph: of the model, as it was traced or imported.
        readers: how many nodes and holders read each value.
        groups: by their last node.
        splits: of each node that cuts: all cuts that lie side by side in the same tensor, and the axis.
        attention: its kernel, as `Variant` has it.
        written_out: the name of an activation that is run call by call, as the model's author wrote it.
        in_place: whether ReLUs write over their input where they may, as most users have it.
        parts: all nodes in order, cut where a checkpointed part begins or ends, each with that part's name or none.
    """

    graph: Graph
    readers: Counter[Value]
    groups: Mapping[Node, Group]
    splits: Mapping[Node, tuple[int, tuple[Node, ...]]]
    attention: str
    written_out: str
    in_place: bool
    parts: tuple[tuple[str, tuple[Node, ...]], ...]

    @classmethod
    def of(
        cls,
        graph: Graph,
        in_place: bool = True,
        checkpoint: Iterable[str] = (),
        attention: str = "auto",
        gelu: str = "auto",
    ) -> Module:
        """Of a model's graph.

        Args:
            checkpoint: names of parts of the model, or patterns.
            attention, gelu: as `Variant` has them.

        Raises:
            UsageError: a name that means nothing, or a part that is not one stretch of the model.
        """
        readers = Counter(value for node in graph.nodes for value in dict.fromkeys(node.inputs))
        results = [*graph.outputs.values(), *(() if graph.loss is None else (graph.loss,))]
        readers.update([*results, *graph.inputs, *graph.stored])  # which the caller and the module hold
        groups = {
            **_activations(graph, readers, gelu),
            **_biases(graph, readers),
            **_group_norms(graph, readers),
            **_few_heads(graph, readers),
            **_guards(graph),
        }
        parts = _parts(graph, tuple(checkpoint))
        written_out = "gelu" if gelu == "parts" else ""
        return cls(graph, readers, groups, _splits(graph), attention, written_out, in_place, parts)

    @cached_property
    def inner(self) -> frozenset[Node]:
        """Nodes that run with a later one."""
        return frozenset(node for group in self.groups.values() for node in group.nodes)


def _parts(graph: Graph, entries: tuple[str, ...]) -> tuple[tuple[str, tuple[Node, ...]], ...]:
    """The stretches of a model that are checkpointed, and those between."""
    scopes = {node: list(scopes_of(node.name)) for node in graph.nodes}
    names = {}
    for entry in entries:
        pattern = entry.strip().lstrip("/")
        found = {node: name for node in graph.nodes if (name := matching_scope(scopes[node], pattern)) is not None}
        if not found:
            close = close_names(pattern, (node.name for node in graph.nodes))
            raise UsageError(f"checkpoint: no operation of the model is in {entry!r}; there are {close}")
        names.update(found)
    runs = [(name, tuple(nodes)) for name, nodes in groupby(graph.nodes, key=lambda node: names.get(node, ""))]
    twice = [name for name, count in Counter(name for name, _ in runs if name).items() if count > 1]
    if twice:
        raise UsageError(f"checkpoint: {twice[0]!r} is not one stretch of the model, with others' operations within")
    return tuple(runs)


def _activations(graph: Graph, readers: Counter[Value], gelu: str) -> dict[Node, Group]:
    """Maps that are an activation together, as ONNX files have GELU. One with a power is a model's own, which is run
    as it is written.
    """
    found: dict[Node, Group] = {}
    taken: set[Node] = set()
    place = {node: i for i, node in enumerate(graph.nodes)}
    for node in reversed(graph.nodes):
        if node in taken or not is_map(node):
            continue
        expr, inner, values = ex.parse_expr(text_of(node)), [node], list(node.inputs)
        for _ in range(_LONGEST):
            made = [graph.producer[value] for value in values if value in graph.producer]
            made = [each for each in dict.fromkeys(made) if is_map(each)]
            if not made:
                break
            last = max(made, key=place.__getitem__)
            expr, values = _substituted(expr, values, last)
            inner.append(last)
            name = expressions.known_as(expr)
            own = gelu == "parts" or (gelu == "auto" and any(_has_power(each) for each in inner))
            if name == "gelu" and own:
                break
            if name is not None and len(values) == 1 and _is_closed(graph, readers, inner):
                found[node] = Group(tuple(inner[1:]), name, tuple(values))
                taken.update(inner)
                break
    return found


def _has_power(node: Node) -> bool:
    return "**" in text_of(node) or "pow" in text_of(node)


def _few_heads(graph: Graph, readers: Counter[Value]) -> dict[Node, Group]:
    """Attention whose keys and values are repeated for groups of heads, which PyTorch's kernels do by themselves."""
    found = {}
    for node in graph.nodes:
        if node.op.name != "attention":
            continue
        inputs, inner = list(node.inputs), []
        for i in (1, 2):
            chain: list[Node] = []
            value = inputs[i]
            for name in ("reshape", "broadcast", "reshape"):
                made = graph.producer.get(value)
                if made is None or made.op.name != name or readers[value] != 1:
                    break
                chain.append(made)
                value = made.inputs[0]
            if len(chain) == 3 and len(value.shape) == 4 and _repeats(value, chain[1], inputs[i]):
                inputs[i] = value
                inner += chain
        if inner:
            found[node] = Group(tuple(inner), "attention", tuple(inputs))
    return found


def _repeats(few: Value, wide: Node, many: Value) -> bool:
    """Whether each head of [batch, heads, tokens, depth] is repeated, side by side."""
    batch, heads, tokens, depth = few.shape
    copies = many.shape[1] // heads
    return wide.outputs[0].shape == (batch, heads, copies, tokens, depth) and many.shape == (
        batch, heads * copies, tokens, depth
    )  # fmt: skip


def _guards(graph: Graph) -> dict[Node, Group]:
    """Probabilities that are NaN set to 0, as PyTorch's exporter writes attention, which has no such op."""
    found = {}
    for node in graph.nodes:
        inner: tuple[Node, ...] = ()
        if not is_map(node):
            continue
        if text_of(node) == "where(isnan(a0), 0.0, a0)":
            softmax = graph.producer.get(node.inputs[0])
        elif text_of(node) == "where(a0, 0.0, a1)":
            asked, softmax = (graph.producer.get(value) for value in node.inputs)
            if (
                asked is None
                or not is_map(asked)
                or text_of(asked) != "isnan(a0)"
                or asked.inputs[0] is not node.inputs[1]
            ):
                continue
            inner = (asked,)
        else:
            continue
        if softmax is not None and softmax.op.name == "softmax":
            found[node] = Group(inner, "same", softmax.outputs)
    return found


def _is_closed(graph: Graph, readers: Counter[Value], nodes: list[Node]) -> bool:
    """Whether nothing but these nodes reads what they make, the first node apart."""
    made = [node.outputs[0] for node in nodes[1:]]
    return all(
        set(graph.readers[value]) <= set(nodes) and readers[value] == len(graph.readers[value]) for value in made
    )


def is_map(node: Node) -> bool:
    """Whether it is a map of one expression."""
    return node.op.name == "map" and len(node.outputs) == 1


def text_of(node: Node) -> str:
    """The expression of a map."""
    op: Any = node.op
    return expressions.bare(op.exprs[0], *(value.dtype for value in node.inputs))


def _substituted(expr: Expr, values: list[Value], node: Node) -> tuple[Expr, list[Value]]:
    """An expression of values, with one of them written as the node that makes it has it."""
    known = list(dict.fromkeys([value for value in values if value is not node.outputs[0]] + list(node.inputs)))
    inner = ex.substitute(ex.parse_expr(text_of(node)), [Arg(known.index(value)) for value in node.inputs])
    args = [inner if value is node.outputs[0] else Arg(known.index(value)) for value in values]
    return ex.substitute(expr, args), known


def _biases(graph: Graph, readers: Counter[Value]) -> dict[Node, Group]:
    """Each addition of a bias to a product or a transposed convolution that nothing else reads."""
    found = {}
    for node in graph.nodes:
        if not is_map(node) or text_of(node) != SUM or len(node.inputs) != 2:
            continue
        for x, bias in (node.inputs, node.inputs[::-1]):
            made, stored = graph.producer.get(x), _stored(graph, bias)
            if made is None or stored is None or readers[x] != 1:
                continue
            rows = made.op.name == "matmul" and is_linear(graph, made) and stored.shape == x.shape[-1:]
            if rows or (made.op.name == "conv_data_grad" and stored.shape == x.shape[1:2]):
                found[node] = Group((made,), "biased", (*made.inputs[:2], stored))
    return found


def _group_norms(graph: Graph, readers: Counter[Value]) -> dict[Node, Group]:
    """Each scale and bias of channels behind a normalisation of groups of them."""
    found = {}
    for node in graph.nodes:
        if not is_map(node) or text_of(node) != _AFFINE or len(node.inputs) != 3:
            continue
        inner: list[Node] = []
        value = node.inputs[0]
        for name in ("reshape", "layer_norm", "reshape"):
            made = graph.producer.get(value)
            if made is None or made.op.name != name or readers[value] != 1 or len(made.inputs) > 1:
                break
            inner.append(made)
            value = made.inputs[0]
        weights = [_stored(graph, each) for each in node.inputs[1:]]
        if len(inner) == 3 and value.shape == node.outputs[0].shape and None not in weights:
            found[node] = Group(tuple(inner), "group_norm", (value, *(each for each in weights if each is not None)))
    return found


def _stored(graph: Graph, value: Value) -> Value | None:
    """The stored value that this is a reshape of, or itself."""
    made = graph.producer.get(value)
    if made is not None and made.op.name == "reshape":
        value = made.inputs[0]
    return value if value.kind.is_stored else None


def is_linear(graph: Graph, node: Node) -> bool:
    """Whether a product is of rows with a matrix that is stored: a linear layer."""
    op: Any = node.op
    a, b = node.inputs[:2]
    return op.transpose_b and not op.transpose_a and b.type.rank == 2 and b.kind.is_stored and a.type.rank > 1


def _splits(graph: Graph) -> dict[Node, tuple[int, tuple[Node, ...]]]:
    """Cuts of one tensor that lie side by side along one axis and take all of it: PyTorch's `split` and `chunk`."""
    found = {}
    for value, readers in graph.readers.items():
        cuts: dict[int, list[Node]] = {}
        for node in readers:
            op: Any = node.op
            if op.name == "slice" and all(step == 1 for step in op.steps):
                axes = [axis for axis, (a, b) in enumerate(zip(value.shape, op.shape)) if a != b]
                if len(axes) == 1:
                    cuts.setdefault(axes[0], []).append(node)
        for axis, nodes in cuts.items():
            at, end = sorted(nodes, key=lambda node: _start(node, axis)), 0
            for node in at:
                end = end + node.outputs[0].shape[axis] if _start(node, axis) == end else -1
            if end == value.shape[axis]:
                found.update(dict.fromkeys(at, (axis, tuple(at))))
    return found


def _start(node: Node, axis: int) -> int:
    op: Any = node.op
    start: int = op.starts[axis]
    return start

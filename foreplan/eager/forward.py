"""A model's graph as PyTorch runs it: node by node, modules as PyTorch's users write them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

from foreplan.eager import expressions
from foreplan.eager.autograd import Recomputed, Tape
from foreplan.eager.rules import contraction, elementwise, layers, losses, shape
from foreplan.eager.storage import Tensor
from foreplan.errors import UnsupportedError, UsageError
from foreplan.graph import Graph, Kind, Node, Value
from foreplan.ops import expr as ex
from foreplan.ops.expr import Arg, Expr
from foreplan.patterns import close_names, matching_scope, scopes_of

_SUM = "(a0 + a1)"
_LONGEST = 12  # maps of one activation


@dataclass(frozen=True)
class Group:
    """Nodes that PyTorch has one op for. It runs in the place of the last.

    Attributes:
        nodes: those before the last.
        activation: the name of the op; empty: a linear layer or a transposed convolution with its bias.
        x: what the activation is of.
    """

    nodes: tuple[Node, ...]
    activation: str = ""
    x: Value | None = None


@dataclass(frozen=True)
class Module:
    """A model in PyTorch: the nodes of its graph, those that PyTorch has one op for put together.

    Attributes:
        graph: of the model, as it was traced or imported.
        readers: how many nodes and holders read each value.
        groups: by their last node.
        splits: of each node that cuts: all cuts that lie side by side in the same tensor, and the axis.
        in_place: whether ReLUs write over their input where they may, as most users have it.
        parts: all nodes in order, cut where a checkpointed part begins or ends, each with that part's name or none.
    """

    graph: Graph
    readers: Counter[Value]
    groups: Mapping[Node, Group]
    splits: Mapping[Node, tuple[int, tuple[Node, ...]]]
    in_place: bool
    parts: tuple[tuple[str, tuple[Node, ...]], ...]

    @classmethod
    def of(cls, graph: Graph, in_place: bool = True, checkpoint: Iterable[str] = ()) -> Module:
        """Of a model's graph.

        Args:
            checkpoint: names of parts of the model, or patterns.

        Raises:
            UsageError: a name that means nothing, or a part that is not one stretch of the model.
        """
        readers = Counter(value for node in graph.nodes for value in dict.fromkeys(node.inputs))
        results = [*graph.outputs.values(), *(() if graph.loss is None else (graph.loss,))]
        readers.update([*results, *graph.inputs, *graph.stored])  # which the caller and the module hold
        groups = {**_activations(graph, readers), **_biases(graph, readers)}
        return cls(graph, readers, groups, _splits(graph), in_place, _parts(graph, tuple(checkpoint)))

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


def _activations(graph: Graph, readers: Counter[Value]) -> dict[Node, Group]:
    """Maps that are an activation together, as ONNX files have GELU."""
    found: dict[Node, Group] = {}
    taken: set[Node] = set()
    place = {node: i for i, node in enumerate(graph.nodes)}
    for node in reversed(graph.nodes):
        if node in taken or not _is_map(node):
            continue
        expr, inner, values = ex.parse_expr(_text(node)), [node], list(node.inputs)
        for _ in range(_LONGEST):
            made = [graph.producer[value] for value in values if value in graph.producer]
            made = [each for each in dict.fromkeys(made) if _is_map(each)]
            if not made:
                break
            last = max(made, key=place.__getitem__)
            expr, values = _substituted(expr, values, last)
            inner.append(last)
            name = expressions.ACTIVATIONS.get(expressions.form(expr))
            if name is not None and len(values) == 1 and _is_closed(graph, readers, inner):
                found[node] = Group(tuple(inner[1:]), name, values[0])
                taken.update(inner)
                break
    return found


def _is_closed(graph: Graph, readers: Counter[Value], nodes: list[Node]) -> bool:
    """Whether nothing but these nodes reads what they make, the first node apart."""
    made = [node.outputs[0] for node in nodes[1:]]
    return all(
        set(graph.readers[value]) <= set(nodes) and readers[value] == len(graph.readers[value]) for value in made
    )


def _is_map(node: Node) -> bool:
    return node.op.name == "map" and len(node.outputs) == 1


def _text(node: Node) -> str:
    op: Any = node.op
    text: str = op.exprs[0]
    return text


def _substituted(expr: Expr, values: list[Value], node: Node) -> tuple[Expr, list[Value]]:
    """An expression of values, with one of them written as the node that makes it has it."""
    known = list(dict.fromkeys([value for value in values if value is not node.outputs[0]] + list(node.inputs)))
    inner = ex.substitute(ex.parse_expr(_text(node)), [Arg(known.index(value)) for value in node.inputs])
    args = [inner if value is node.outputs[0] else Arg(known.index(value)) for value in values]
    return ex.substitute(expr, args), known


def _biases(graph: Graph, readers: Counter[Value]) -> dict[Node, Group]:
    """Each addition of a bias to a product or a transposed convolution that nothing else reads."""
    found = {}
    for node in graph.nodes:
        if not _is_map(node) or _text(node) != _SUM or len(node.inputs) != 2:
            continue
        for x, bias in (node.inputs, node.inputs[::-1]):
            made, stored = graph.producer.get(x), _stored(graph, bias)
            if made is None or stored is None or readers[x] != 1:
                continue
            rows = made.op.name == "matmul" and _is_weight(graph, made) and stored.shape == x.shape[-1:]
            if rows or (made.op.name == "conv_data_grad" and stored.shape == x.shape[1:2]):
                found[node] = Group((made,))
    return found


def _stored(graph: Graph, value: Value) -> Value | None:
    """The stored value that this is a reshape of, or itself."""
    made = graph.producer.get(value)
    if made is not None and made.op.name == "reshape":
        value = made.inputs[0]
    return value if value.kind.is_stored else None


def _is_weight(graph: Graph, node: Node) -> bool:
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


class Run:
    """One forward pass.

    Attributes:
        values: the tensors that Python's variables hold now.

    Args:
        training: whether normalisation and dropout are in training mode.
        keeps: whether variables hold all results to the end.
    """

    def __init__(
        self, tape: Tape, module: Module, stored: Mapping[Value, Tensor], training: bool, keeps: bool = False
    ) -> None:
        self.tape, self.module, self.stored, self.training = tape, module, stored, training
        self.values: dict[Value, Tensor] = dict(stored)
        self.left = Counter(module.readers)
        if keeps:
            self.left.update(module.readers.keys())

    def forward(self, inputs: Mapping[Value, Tensor]) -> None:
        """Run all nodes. What nobody reads any more is dropped, but the model's outputs."""
        self.values.update(inputs)
        for name, nodes in self.module.parts:
            if name and self.tape.records:
                self.checkpointed(nodes)
            else:
                self.stretch(nodes)
        self.tape.memory.node = ""

    def stretch(self, nodes: Sequence[Node]) -> None:
        """Run some nodes."""
        for node in nodes:
            self.tape.memory.node = node.name
            if node not in self.module.inner:
                if node.outputs[0] not in self.values:
                    self.run(node)
                self.drop(node)

    def checkpointed(self, nodes: Sequence[Node]) -> None:
        """Run some nodes within `torch.utils.checkpoint`, which keeps what they read from outside."""
        read = {value for node in nodes for value in node.inputs}
        given = {value: tensor for value, tensor in self.values.items() if value in read and value not in self.stored}
        tape, module, stored, training = self.tape, self.module, self.stored, self.training

        def again() -> None:
            run = Run(tape, module, stored, training)
            run.values.update(given)
            run.stretch(nodes)

        self.tape.segment = Recomputed(again)
        self.stretch(nodes)
        self.tape.segment = None

    def drop(self, node: Node) -> None:
        """The inputs of a node, or of a group, that were read for the last time."""
        group = self.module.groups.get(node)
        for each in (node, *(() if group is None else group.nodes)):
            for value in dict.fromkeys(each.inputs):
                self.left[value] -= 1
                if not self.left[value]:
                    self.values.pop(value, None)

    def run(self, node: Node) -> None:
        """One node, or one of several that PyTorch has one op for."""
        if node in self.module.splits:
            axis, nodes = self.module.splits[node]
            extents = [each.outputs[0].shape[axis] for each in nodes]
            parts = shape.split(self.tape, self.values[node.inputs[0]], axis, extents)
            for each, part in zip(nodes, parts):
                self.values[each.outputs[0]] = part
            return
        if (group := self.module.groups.get(node)) is not None:
            self.values[node.outputs[0]] = self.group(node, group)
            return
        rule = RULES.get(node.op.name)
        if rule is None:
            raise UnsupportedError(
                f"{node.source or node.name}: what PyTorch saves for the op {node.op.name} is not known here, so a "
                "step as PyTorch runs it cannot be counted"
            )
        results = rule(self, node, [self.values[value] for value in node.inputs])
        for value, result in zip(node.outputs, results):
            if self.left[value]:
                self.values[value] = result

    def group(self, node: Node, group: Group) -> Tensor:
        """An activation, or a product or a transposed convolution with a bias."""
        if group.x is not None:
            return elementwise.unary(self.tape, group.activation, self.values[group.x])
        (made,) = group.nodes
        (bias,) = (v for each in node.inputs if (v := _stored(self.module.graph, each)) is not None)
        x, weight = (self.values[value] for value in made.inputs[:2])
        if made.op.name == "matmul":
            return contraction.linear(self.tape, x, weight, self.values[bias])
        return contraction.convolution(self.tape, x, weight, self.values[bias], node.outputs[0].shape, "conv_transpose")

    def writes_over(self, node: Node) -> bool:
        """Whether a ReLU may take its input's place: nobody else reads it, and what made it does not save it."""
        value = node.inputs[0]
        made = self.module.graph.producer.get(value)
        if not self.module.in_place or made is None or self.module.readers[value] != 1:
            return False
        if made.op.name == "map":
            return _is_map(made) and _text(made) == _SUM
        return made.op.name in ("conv", "batch_norm")


Rule = Callable[[Run, Node, Sequence[Tensor]], Sequence[Tensor]]


def _map(run: Run, node: Node, x: Sequence[Tensor]) -> Sequence[Tensor]:
    op: Any = node.op
    return [expressions.apply(run.tape, text, x, run.writes_over(node)) for text in op.exprs]


def _matmul(run: Run, node: Node, x: Sequence[Tensor]) -> Sequence[Tensor]:
    op: Any = node.op
    tape, (a, b) = run.tape, x[:2]
    if _is_weight(run.module.graph, node):
        return [contraction.linear(tape, a, b, None)]
    if op.transpose_a:
        a = shape.permute(tape, a, _swapped(a.rank))
    if op.transpose_b:
        b = shape.permute(tape, b, _swapped(b.rank))
    return [contraction.matmul(tape, a, b)]


def _swapped(rank: int) -> list[int]:
    return [*range(rank - 2), rank - 1, rank - 2]


def _conv(run: Run, node: Node, x: Sequence[Tensor]) -> Sequence[Tensor]:
    bias = x[2] if len(x) > 2 else None
    return [contraction.convolution(run.tape, x[0], x[1], bias, node.outputs[0].shape)]


def _conv_transpose(run: Run, node: Node, x: Sequence[Tensor]) -> Sequence[Tensor]:
    return [contraction.convolution(run.tape, x[0], x[1], None, node.outputs[0].shape, "conv_transpose")]


def _batch_norm(run: Run, node: Node, x: Sequence[Tensor]) -> Sequence[Tensor]:
    op: Any = node.op
    return [layers.batch_norm(run.tape, x[0], x[1], x[2], x[3:5], op.frozen or not run.training)]


def _layer_norm(run: Run, node: Node, x: Sequence[Tensor]) -> Sequence[Tensor]:
    op: Any = node.op
    return [layers.layer_norm(run.tape, x[0], x[1], x[2], op.axis)]


def _attention(run: Run, node: Node, x: Sequence[Tensor]) -> Sequence[Tensor]:
    op: Any = node.op
    q, k, v = x[:3]
    mask = x[3] if len(x) > 3 else None
    if op.heads_last:
        q, k, v = (shape.permute(run.tape, each, (0, 2, 1, 3)) for each in (q, k, v))
    result = layers.attention(run.tape, q, k, v, mask)
    return [shape.permute(run.tape, result, (0, 2, 1, 3)) if op.heads_last else result]


def _gather(run: Run, node: Node, x: Sequence[Tensor]) -> Sequence[Tensor]:
    op: Any = node.op
    table, indices = x[:2]
    stored = node.inputs[0].kind in (Kind.PARAMETER, Kind.FROZEN)
    if getattr(op, "axis", 0) == 0 and table.rank == 2 and stored:
        return [layers.embedding(run.tape, table, indices)]
    return [layers.gather(run.tape, table, indices, node.outputs[0].shape)]


def _softmax(run: Run, node: Node, x: Sequence[Tensor]) -> Sequence[Tensor]:
    return [layers.softmax(run.tape, x[0], node.op.name)]


def _reduce(run: Run, node: Node, x: Sequence[Tensor]) -> Sequence[Tensor]:
    op: Any = node.op
    return [shape.reduce(run.tape, op.how, x[0], op.axes, op.keepdims)]


def _dropout(run: Run, node: Node, x: Sequence[Tensor]) -> Sequence[Tensor]:
    op: Any = node.op
    return [layers.dropout(run.tape, x[0], op.ratio) if run.training else x[0]]


def _without_gradient(run: Run, node: Node, x: Sequence[Tensor]) -> Sequence[Tensor]:
    return [run.tape.new(value.shape, value.dtype, node.op.name) for value in node.outputs]


def _cross_entropy(run: Run, node: Node, x: Sequence[Tensor]) -> Sequence[Tensor]:
    """Of each item; the second result, the logarithm of the sum of exponentials, is PyTorch's `logsumexp`."""
    result = losses.item_losses(run.tape, x[0], x[1])
    sums = run.tape.like(result, "logsumexp") if run.left[node.outputs[1]] else result
    return [result, sums]


def _shaped(make: Callable[..., Tensor]) -> Rule:
    """The rule of an op of one tensor whose result has another shape."""
    return lambda run, node, x: [make(run.tape, x[0], node.outputs[0].shape)]


RULES: dict[str, Rule] = {
    "map": _map,
    "matmul": _matmul,
    "conv": _conv,
    "conv_data_grad": _conv_transpose,
    "batch_norm": _batch_norm,
    "layer_norm": _layer_norm,
    "attention": _attention,
    "cross_entropy": _cross_entropy,
    "gather": _gather,
    "gather_elements": _gather,
    "softmax": _softmax,
    "log_softmax": _softmax,
    "reduce": _reduce,
    "dropout": _dropout,
    "reshape": _shaped(shape.reshape),
    "broadcast": _shaped(shape.expand),
    "transpose": lambda run, node, x: [shape.permute(run.tape, x[0], node.op.perm)],  # type: ignore[attr-defined]
    "slice": lambda run, node, x: [shape.cut(run.tape, x[0], node.op.shape, node.op.steps)],  # type: ignore[attr-defined]
    "concat": lambda run, node, x: [shape.concat(run.tape, x, node.op.axis)],  # type: ignore[attr-defined]
    "pad": _shaped(shape.pad),
    "max_pool": _shaped(layers.max_pool),
    "avg_pool": _shaped(layers.avg_pool),
    "resize": _shaped(layers.resize),
    "cumsum": lambda run, node, x: [layers.cumsum(run.tape, x[0])],
    "stop_gradient": lambda run, node, x: [x[0].detached()],
    "random": _without_gradient,
    "arg_reduce": _without_gradient,
    "top_k": _without_gradient,
}

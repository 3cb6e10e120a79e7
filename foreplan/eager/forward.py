"""A model's graph as PyTorch runs it, node by node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from foreplan.base.errors import UnsupportedError
from foreplan.eager import expressions
from foreplan.eager.autograd import Recomputed, Tape
from foreplan.eager.modules import SUM, Group, Module, is_linear, is_map, text_of
from foreplan.eager.rules import attention, contraction, elementwise, layers, losses, shape
from foreplan.eager.storage import Tensor
from foreplan.graph import Kind, Node, Value


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
            with tape.casting():
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
                "step as PyTorch runs it cannot be counted from a graph; fp.eager_memory counts that of a torch module"
            )
        results = rule(self, node, [self.values[value] for value in node.inputs])
        for value, result in zip(node.outputs, results):
            if self.left[value]:
                self.values[value] = result

    def group(self, node: Node, group: Group) -> Tensor:
        """Nodes that are one op of PyTorch's."""
        op: Any
        x, *weights = (self.values[value] for value in group.inputs)
        if group.op == "attention":
            k, v, *mask = weights
            return _attended(self, node.op, x, k, v, mask[0] if mask else None)
        if group.op == "same":
            return x
        if group.op == "group_norm":
            (groups,) = (each.inputs[0].shape[1] for each in group.nodes if each.op.name == "layer_norm")
            return layers.group_norm(self.tape, x, weights[0], weights[1], groups)
        if group.op != "biased":
            return elementwise.unary(self.tape, group.op, x)
        op = group.nodes[0].op
        if op.name == "matmul":
            return contraction.linear(self.tape, x, weights[0], weights[1])
        return contraction.convolution(self.tape, x, weights[0], weights[1], op, node.outputs[0].shape)

    def writes_over(self, node: Node) -> bool:
        """Whether a ReLU may take its input's place: nobody else reads it, and what made it does not save it."""
        value = node.inputs[0]
        made = self.module.graph.producer.get(value)
        if not self.module.in_place or made is None or self.module.readers[value] != 1:
            return False
        if made.op.name == "map":
            return is_map(made) and text_of(made) == SUM
        return made.op.name in ("conv", "batch_norm")


Rule = Callable[[Run, Node, Sequence[Tensor]], Sequence[Tensor]]


def _map(run: Run, node: Node, x: Sequence[Tensor]) -> Sequence[Tensor]:
    op: Any = node.op
    if len(op.exprs) > 1:
        return expressions.together(run.tape, op.exprs, x)
    return [expressions.apply(run.tape, text, x, run.writes_over(node), run.module.written_out) for text in op.exprs]


def _matmul(run: Run, node: Node, x: Sequence[Tensor]) -> Sequence[Tensor]:
    op: Any = node.op
    tape, (a, b) = run.tape, x[:2]
    if is_linear(run.module.graph, node):
        return [contraction.linear(tape, a, b, None)]
    if op.transpose_a:
        a = shape.permute(tape, a, _swapped(a.rank))
    if op.transpose_b:
        b = shape.permute(tape, b, _swapped(b.rank))
    return [contraction.matmul(tape, a, b)]


def _swapped(rank: int) -> list[int]:
    return [*range(rank - 2), rank - 1, rank - 2]


def _conv(run: Run, node: Node, x: Sequence[Tensor]) -> Sequence[Tensor]:
    op: Any = node.op
    bias = x[2] if len(x) > 2 else None
    return [contraction.convolution(run.tape, x[0], x[1], bias, op, node.outputs[0].shape)]


def _conv_transpose(run: Run, node: Node, x: Sequence[Tensor]) -> Sequence[Tensor]:
    op: Any = node.op
    return [contraction.convolution(run.tape, x[0], x[1], None, op, node.outputs[0].shape)]


def _batch_norm(run: Run, node: Node, x: Sequence[Tensor]) -> Sequence[Tensor]:
    op: Any = node.op
    return [layers.batch_norm(run.tape, x[0], x[1], x[2], x[3:5], op.frozen or not run.training)]


def _layer_norm(run: Run, node: Node, x: Sequence[Tensor]) -> Sequence[Tensor]:
    op: Any = node.op
    return [layers.layer_norm(run.tape, x[0], x[1:3], op.axis)]


def _rms_norm(run: Run, node: Node, x: Sequence[Tensor]) -> Sequence[Tensor]:
    op: Any = node.op
    return [layers.rms_norm(run.tape, x[0], x[1] if len(x) > 1 else None, op.axis)]


def _attention(run: Run, node: Node, x: Sequence[Tensor]) -> Sequence[Tensor]:
    op: Any = node.op
    q, k, v = x[:3]
    mask = x[3] if len(x) > 3 else None
    if op.heads_last:
        q, k, v = (shape.permute(run.tape, each, (0, 2, 1, 3)) for each in (q, k, v))
    return [_attended(run, op, q, k, v, mask)]


def _attended(run: Run, op: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    result = attention.attention(run.tape, run.module.attention, q, k, v, mask, op.causal)
    return shape.permute(run.tape, result, (0, 2, 1, 3)) if op.heads_last else result


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


def _loop(run: Run, node: Node, x: Sequence[Tensor]) -> Sequence[Tensor]:
    """A loop in Python: slices are unbound, the body runs step by step, and results are stacked at the end."""
    op: Any = node.op
    carries = set(op.graph.inputs[: op.carries])
    if any(each.op.name == "matmul" and carries.intersection(each.inputs) for each in op.graph.nodes):
        raise UnsupportedError(
            f"{node.source or node.name}: PyTorch runs recurrent layers in oneDNN, in cuDNN or by cells of its own, "
            "and what these keep is not known here; fp.eager_memory counts that of a torch module"
        )
    tape, body = run.tape, Module.of(op.graph, run.module.in_place)
    carried, stacks, read = list(x[: op.carries]), x[op.carries :][: op.slices], x[op.carries + op.slices :]
    slices = [shape.unbind(tape, stack) for stack in stacks]
    order = range(op.steps)[:: -1 if op.reverse else 1]
    histories: list[list[Tensor]] = [[carried[i]] for i in op.histories]
    results: list[list[Tensor]] = [[] for _ in range(len(op.graph.outputs) - op.carries)]
    for t in order:
        inner = Run(tape, body, {}, run.training)
        inner.forward(dict(zip(op.graph.inputs, [*carried, *(each[t] for each in slices), *read])))
        for each in slices:
            each[t] = each[t].detached()
        found = [inner.values[value] for value in op.graph.outputs.values()]
        carried = found[: op.carries]
        for i, history in zip(op.histories, histories):
            history.append(carried[i])
        for result, one in zip(results, found[op.carries :]):
            result.append(one)
        tape.memory.node = node.name
        del inner, found
    stacked = [shape.stack(tape, each[:: -1 if op.reverse else 1]) for each in (*results, *histories)]
    return [*carried, *stacked]


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
    "rms_norm": _rms_norm,
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
    "loop": _loop,
}

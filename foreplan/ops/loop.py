"""A loop of a known number of steps as one op: its body is a graph, which is planned once and runs in every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import ClassVar, NoReturn

from foreplan.base.errors import ModelError, ShapeError, UnsupportedError
from foreplan.graph import Builder, Cost, Graph, GraphBuilder, Op, TensorType, Value, register
from foreplan.graph.op import Cotangents, Training, Types, Values
from foreplan.graph.text import parse_graph
from foreplan.ops.join import concat
from foreplan.ops.map import Map
from foreplan.ops.shape import reshape, slice_axis
from foreplan.ops.unstack import MOST_STEPS, unstack
from foreplan.ops.valid import valid_in

MOST_RUNS = 1 << 21  # of nodes, in all steps together
WORTH_KEEPING = 64  # operations an element: what takes more is kept for backward, and anything else computed again


@lru_cache(maxsize=256)
def parsed_body(text: str) -> Graph:
    """The graph that an op has as text; the same object for the same text, as long as that is remembered."""
    body = parse_graph(text, "the body of a loop")
    return replace(body, nodes=tuple(replace(node, source="") for node in body.nodes))


@register
@dataclass(frozen=True)
class Loop(Op):
    """carry, y_t = body(carry, x_t, c) for t = 0, 1, …: `jax.lax.scan`.

    Inputs: the first carries, stacks [steps, …] of slices, and what every step reads. Outputs: the last carries; the
    other results of all steps, stacked [steps, …]; and histories [steps + 1, …]: a carry before the first step and
    after each, in the order of the slices.

    Backward is another loop, which runs from the last step to the first. Each of its steps computes the body's step
    again, from histories and from those of its results that are expensive.

    Attributes:
        body: a graph as text, without stored values. Its inputs are carries, slices, and what every step reads; its
            outputs are the next carries, and one result of the step for each stack.
        steps: their number, at least 1.
        carries: how many inputs, and outputs, are carries.
        slices: how many inputs are stacks.
        reverse: whether the last slice comes first. Stacks stay in the order of the slices.
        kept: how many of the last stacks are there for backward alone; -1: that is not decided yet.
        histories: the carries whose histories are outputs, by number.
    """

    name: ClassVar[str] = "loop"
    body: str
    steps: int
    carries: int
    slices: int
    reverse: bool = False
    kept: int = -1
    histories: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        body = self.graph
        fits = 0 <= self.carries <= len(body.outputs) and 0 <= self.slices <= len(body.inputs) - self.carries
        known = set(self.histories) <= set(range(self.carries)) and len(set(self.histories)) == len(self.histories)
        if not fits or not known or not -1 <= self.kept <= len(body.outputs) - self.carries:
            raise ValueError(f"a body of {len(body.inputs)} inputs and {len(body.outputs)} outputs does not fit")
        if body.stored or body.updates or body.gradients or body.loss is not None:
            raise ValueError("the body of a loop has no stored values, no updates, no gradients and no loss")
        if not 1 <= self.steps <= MOST_STEPS or self.steps * len(body.nodes) > MOST_RUNS:
            raise ValueError(f"{self.steps} steps of {len(body.nodes)} nodes are too many, or none")

    @cached_property
    def graph(self) -> Graph:
        """The body; its values are the op's own, known by identity, whatever the cache of parsed texts forgets."""
        return parsed_body(self.body)

    @property
    def results(self) -> tuple[Value, ...]:
        """The outputs of the body: next carries, then results that are stacked."""
        return tuple(self.graph.outputs.values())

    def is_slice(self, index: int) -> bool:
        """Whether an input is a stack of slices."""
        return self.carries <= index < self.carries + self.slices

    def stacked(self, type: TensorType) -> TensorType:
        """The type of what all steps give, or read."""
        return type.with_shape((self.steps, *type.shape))

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """Inputs are those of the body, slices stacked; carries stay of one type."""
        body = self.graph
        self.check_count(inputs, len(body.inputs))
        for i, (given, value) in enumerate(zip(inputs, body.inputs)):
            wanted = self.stacked(value.type) if self.is_slice(i) else value.type
            if given != wanted:
                raise ShapeError(f"input {i} is {given}, and the body of the loop takes {wanted}")
        for value, after in zip(body.inputs, self.results[: self.carries]):
            if after.type != value.type:
                raise ShapeError(f"a carry of the loop changes from {value.type} to {after.type}")
        carried, rest = [value.type for value in self.results[: self.carries]], self.results[self.carries :]
        histories = [carried[i].with_shape((self.steps + 1, *carried[i].shape)) for i in self.histories]
        return (*carried, *(self.stacked(value.type) for value in rest), *histories)

    def overwrites(self, inputs: Types, outputs: Types) -> tuple[tuple[int, int], ...]:
        """A carry may begin where it ends."""
        return tuple((i, i) for i in range(self.carries))

    def accepts_strides(self, index: int, input: TensorType, strides: tuple[int, ...]) -> bool:
        """First carries are copied."""
        return index < self.carries

    def valid_range(self, index: int, inputs: Types) -> tuple[int, ...] | None:
        """What the ops of the body can take, which select by that input."""
        return valid_in(self.graph, self.graph.inputs[index])

    def flops(self, inputs: Types, outputs: Types) -> int:
        """Those of the body, in every step."""
        return self.cost(inputs, outputs).flops

    def cost(self, inputs: Types, outputs: Types) -> Cost:
        """That of the body, in every step."""
        costs = [
            node.op.cost([x.type for x in node.inputs], [y.type for y in node.outputs])
            for node in self.graph.nodes
            if not node.op.is_view
        ]
        return Cost(self.steps * sum(c.flops for c in costs), self.steps * sum(c.nbytes for c in costs))

    def decompose(self, b: Builder, inputs: Values) -> Values:
        """The loop written out: the nodes of the body once for each step."""
        body = self.graph
        carried, scope = list(inputs[: self.carries]), b.scope
        stacks = [unstack(b, x) for x in inputs[self.carries : self.carries + self.slices]]
        fixed = dict(zip(body.inputs[self.carries + self.slices :], inputs[self.carries + self.slices :]))
        rows: list[list[Value]] = [[] for _ in self.results[self.carries :]]
        histories = [[carried[i]] for i in self.histories]
        for t in reversed(range(self.steps)) if self.reverse else range(self.steps):
            at = fixed | dict(zip(body.inputs, (*carried, *(stack[t] for stack in stacks))))
            b.scope = f"{scope}{t}/"
            for node in body.nodes:
                at.update(zip(node.outputs, b.repeat(node, [at[value] for value in node.inputs])))
            carried = [at[value] for value in self.results[: self.carries]]
            for row, value in zip(rows, self.results[self.carries :]):
                row.append(at[value])
            for history, i in zip(histories, self.histories):
                history.append(carried[i])
        b.scope = scope
        ordered = [row[::-1] if self.reverse else row for row in (*rows, *histories)]
        return [*carried, *(concat(b, [reshape(b, y, (1, *y.shape)) for y in row], 0) for row in ordered)]

    def slices_of(self, b: Builder, history: Value, *, after: bool) -> Value:
        """A carry before each step, or after each, as a stack: a part of its history."""
        return slice_axis(b, history, 0, int(after != self.reverse), self.steps)

    def for_training(self, b: Builder, inputs: Values, training: Training) -> Values | None:
        """With what backward reads as further outputs, and the nodes of the body in their training form."""
        return None if self.kept >= 0 else b.node(self.keeping(), *inputs)[: len(self.results)]

    def keeping(self) -> Loop:
        """The same loop that also gives what its backward reads."""
        from foreplan.ops.loop_gradient import read_by_backward

        body = _in_training(self.graph)
        after = list(body.outputs.values())[: self.carries]
        dear = [value for value in _expensive(body) if value not in after]
        everything = _with_outputs(body, dear)
        more = len(everything.outputs) - len(body.outputs)
        loop = replace(self, body=everything.as_text(), kept=more, histories=tuple(range(self.carries)))
        read, histories = read_by_backward(loop)
        body = _with_outputs(body, read)
        return replace(self, body=body.as_text(), kept=len(read), histories=histories)

    def vjp(self, b: Builder, inputs: Values, outputs: Values, cotangents: Cotangents) -> Cotangents:
        """A loop that runs backward."""
        from foreplan.ops.loop_gradient import gradient

        loop = self
        if self.kept < 0:
            loop = self.keeping()
            outputs = b.node(loop, *inputs)
            cotangents = (*cotangents, *[None] * (len(outputs) - len(cotangents)))
        return gradient(b, loop, inputs, outputs, cotangents)


class _InLoop:
    """The training form of a body's nodes, which have no state."""

    ranks = 1

    def update(self, stored: Value, new: Value) -> NoReturn:
        raise UnsupportedError("an op within a loop would update what is stored once a step")

    def next_content(self, stored: Value) -> Value:
        return stored

    def random_state(self) -> NoReturn:
        raise UnsupportedError("an op within a loop would draw the same numbers in each step")

    def next_stream(self) -> NoReturn:
        raise UnsupportedError("an op within a loop would draw the same numbers in each step")


def _in_training(body: Graph) -> Graph:
    """The body with every node in its training form."""
    b, training, at = GraphBuilder(body.name), _InLoop(), {value: value for value in body.inputs}
    b.inputs = list(body.inputs)
    b.reserve(body.inputs, body.nodes)
    for node in body.nodes:
        inputs = tuple(at[value] for value in node.inputs)
        b.kind, b.scope = node.outputs[0].kind, f"{node.name}/"
        made = node.op.for_training(b, inputs, training)
        if made is None:
            b.append(replace(node, inputs=inputs), inferred=True)
            made = node.outputs
        at.update(zip(node.outputs, made))
    return b.finish({name: at[value] for name, value in body.outputs.items()})


def _expensive(body: Graph) -> list[Value]:
    """The results that take many operations an element, each with the element-wise ops that alone follow it and whose
    derivatives do not read it: what is then kept is no larger, and the other operands of those ops need not be kept.
    """
    found = []
    for node in body.nodes:
        if len(node.outputs) == 1 and not node.op.is_view:
            types = [x.type for x in node.inputs], [node.outputs[0].type]
            if node.op.cost(*types).flops >= WORTH_KEEPING * max(1, node.outputs[0].type.size):
                found.append(_last_of_chain(body, node.outputs[0]))
    return found


def _last_of_chain(body: Graph, value: Value) -> Value:
    while value not in body.returned and len(body.readers[value]) == 1:
        (reader,) = body.readers[value]
        op = reader.op
        if not isinstance(op, Map) or len(reader.outputs) > 1 or reader.outputs[0].type.nbytes > value.type.nbytes:
            break
        if reader.inputs.index(value) in op.read_by_vjp:
            break
        value = reader.outputs[0]
    return value


def _with_outputs(body: Graph, values: Sequence[Value]) -> Graph:
    """The body with further outputs behind its own."""
    further = {f"kept{i}": value for i, value in enumerate(dict.fromkeys(values))}
    if not further.keys().isdisjoint(body.outputs):
        raise ModelError("a body has an output of the name of what is kept")
    return replace(body, outputs={**body.outputs, **further})

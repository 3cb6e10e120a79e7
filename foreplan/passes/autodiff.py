"""Forward graph → training graph: reverse-mode differentiation in the same graph, each update as soon as it can be."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from foreplan.base.errors import ModelError, UnsupportedError, UsageError
from foreplan.graph import Array, Builder, Fill, Graph, GraphBuilder, Kind, Node, TensorType, Value
from foreplan.ops.map import convert, elementwise
from foreplan.ops.pullback import Pullback, depending
from foreplan.ops.shape import broadcast_to
from foreplan.passes.base import Pass
from foreplan.passes.loss_scale import LossScale
from foreplan.passes.missing_gradients import missing_gradient_notes
from foreplan.passes.optimizer import Optimizer
from foreplan.passes.optimizer.updater import Updater


class Consumer(Protocol):
    """The consumer of gradients: takes each as soon as it is complete, and adds the nodes that use it."""

    def update(self, parameter: Value, gradient: Value) -> None:
        """Use the gradient of a parameter whose old content nothing else will read."""

    def finish(self) -> dict[Value, Value]:
        """The next content of every stored value that changes; first adds the nodes that had to wait for all
        gradients."""


# From the builder, the scale of gradients if there is one, and the number of micro-batches that they are sums of if
# there are several, to what uses them.
Consume = Callable[[Builder, LossScale | None, Value | None], Consumer]
MakeUpdater = Callable[[Builder, LossScale | None, Value | None], Updater]


@dataclass(frozen=True)
class Differentiate(
    Pass, requires=("forward", "loss", "training form", "no inner gradients"), ensures=("loss", "backward")
):
    """Forward, loss and backward in one graph.

    Requires: `graph.loss` is set; ops are in the form wanted (see `training_form`). Ensures: the gradient of every
    PARAMETER that the loss depends on is consumed as soon as it is complete, right behind the last reader of its old
    content; or, with no consumer, returned in `graph.gradients`. A parameter that the forward pass writes is updated as
    it was written. No gradient is computed that nobody reads.

    Attributes:
        consume: makes what uses the gradients, such as `updating(optimizer)`.
        scaled: whether the gradients that are consumed are too large by a scale (see `LossScale`).
        inputs: names of inputs whose gradients are returned in `graph.gradients` too.
        in_turn: whether each part of what runs in parts up to the loss is listed just before its backward pass.

    Raises:
        ModelError: there is no loss, or the loss depends on no parameter and no such input.
        UsageError: there is no such input, or it holds integers.
        UnsupportedError: an op on the way has no derivative; names the node.
    """

    consume: Consume | None = None
    scaled: bool = False
    inputs: Iterable[str] = ()
    in_turn: bool = False

    def _run(self, graph: Graph) -> Graph:
        if graph.loss is None:
            raise ModelError(f"graph {graph.name!r} has no loss to differentiate; attach one first")
        asked = _asked(graph, self.inputs)
        wanted = depending((*graph.parameters, *asked), graph.nodes)
        if graph.loss not in wanted:
            remedy = next((f": {note}" for note in graph.notes if "no gradient" in note), "")
            raise ModelError(
                f"graph {graph.name!r}: the loss {graph.loss!r} depends on no parameter; nothing can be trained{remedy}"
            )
        b = GraphBuilder(base=graph)
        b.kind, b.wanted = Kind.GRADIENT, wanted
        scale = LossScale.stored(b) if self.scaled and self.consume is not None else None
        consumer = None if self.consume is None else self.consume(b, scale, None)
        walk = _Backward(b, graph, consumer, scale)
        walk.run()
        for note in missing_gradient_notes(graph):
            b.note(note)
        gradients = {value.name: walk.of_input(value) for value in asked}
        updates = dict(graph.updates)
        if consumer is not None:
            start = len(b.nodes)
            updates |= consumer.finish()
            walk.read_as_written(start)
        else:
            gradients |= {value.name: walk.gradients[value] for value in graph.parameters if value in walk.gradients}
        step = b.finish(graph.outputs, updates, graph.loss, gradients)
        return _in_turn(step, set(graph.nodes)) if self.in_turn else step


differentiate = Differentiate()


def check_not_written(graph: Graph) -> None:
    """Check that the forward pass writes no parameter, where ranks have parts or copies of them.

    Raises:
        UnsupportedError: it does; names the first one.
    """
    written = next((value.name for value in graph.parameters if value in graph.updates), None)
    if written is not None:
        raise UnsupportedError(
            f"the forward pass writes {written!r}, of which ranks have parts or copies; leave out shard and stages, or "
            f"freeze=[{written!r}]"
        )


def pull_back(cotangents: Pullback, node: Node) -> None:
    """Pull cotangents back through a node; the nodes of its derivative have its name and source.

    Raises:
        ModelError: it has no derivative; names it.
    """
    cotangents.b.scope, cotangents.b.source = f"{node.name}/grad/", node.source
    try:
        cotangents.through(node)
    except ModelError as error:
        where = f" ({node.source})" if node.source else ""
        raise type(error)(f"node {node.name!r}{where} cannot be differentiated: {error}") from None


def updating(optimizer: Optimizer) -> MakeUpdater:
    """What updates every parameter. The learning rate is an input with a default."""
    return lambda b, scale, micro_batches: Updater(b, optimizer, micro_batches, scale)


def _asked(graph: Graph, names: Iterable[str]) -> list[Value]:
    """The inputs whose gradients are returned."""
    inputs = {value.name: value for value in graph.inputs}
    for name in names:
        if name not in inputs:
            raise UsageError(f"gradients: there is no input {name!r}; the inputs are {', '.join(inputs)}")
        if not inputs[name].dtype.is_float:
            raise UsageError(f"gradients: the input {name!r} is {inputs[name].type}, which has no gradient")
    return [inputs[name] for name in dict.fromkeys(names)]


def _in_turn(step: Graph, forward: Collection[Node]) -> Graph:
    """A training step in which nodes of the forward pass run as late as the backward pass allows.

    So a part of a segment runs forward just before it runs back. Without parts, the last layer's gradient needs almost
    all of the forward pass, and next to nothing changes.

    Args:
        forward: those nodes.
    """
    position = {node: i for i, node in enumerate(step.nodes)}
    order: dict[Node, None] = {}
    for node in (*(node for node in step.nodes if node not in forward), *step.nodes):
        if node in order:
            continue
        needed, stack = {node}, [node]
        while stack:
            for value in stack.pop().inputs:
                made_by = step.producer.get(value)
                if made_by is not None and made_by not in needed and made_by not in order:
                    needed.add(made_by)
                    stack.append(made_by)
        order.update(dict.fromkeys(sorted(needed, key=position.__getitem__)))
    return dataclasses.replace(step, nodes=tuple(order))


class _Backward:
    """The reverse walk, with parameters' gradients consumed as soon as they are complete."""

    def __init__(self, b: Builder, graph: Graph, consumer: Consumer | None, scale: LossScale | None) -> None:
        self.b, self.graph, self.consumer, self.scale = b, graph, consumer, scale
        self.cotangents = Pullback(b)
        self.gradients: dict[Value, Value] = {}
        self.readers_left = Counter(value for node in graph.nodes for value in set(node.inputs))

    def run(self) -> None:
        loss = self.graph.loss
        assert loss is not None
        if self.scale is None:
            one = self.b.store("one", loss.type, Kind.CONSTANT, Array(np.ones((), loss.dtype.numpy)))
            self.cotangents.add(loss, one)
        else:
            self.cotangents.add(loss, convert(self.b, self.scale.scale, loss.dtype))
        for node in reversed(self.graph.nodes):
            pull_back(self.cotangents, node)
            for value in dict.fromkeys(node.inputs):
                self.readers_left[value] -= 1
                if value.kind is Kind.PARAMETER and not self.readers_left[value]:
                    self.finish_parameter(value)

    def of_input(self, value: Value) -> Value:
        """The gradient of an input, when all nodes have been seen; zero if the loss does not depend on it."""
        self.b.scope, self.b.source = f"{value.name}/", ""
        gradient = self.cotangents.take(value)
        if gradient is None:
            zero = self.b.store("zero", TensorType(value.dtype, ()), Kind.CONSTANT, Fill(0.0))
            gradient = broadcast_to(self.b, zero, value.shape)
        elif self.scale is not None:
            gradient = elementwise(self.b, lambda g, s: g / s, gradient, self.scale.scale, dtype=value.dtype)
        self.b.scope = ""
        return gradient

    def finish_parameter(self, parameter: Value) -> None:
        gradient = self.cotangents.take(parameter)
        if gradient is None:
            return
        self.gradients[parameter] = gradient
        if self.consumer is not None:
            self.b.scope, self.b.source = f"{parameter.name}/", ""
            start = len(self.b.nodes)
            self.consumer.update(parameter, gradient)
            self.read_as_written(start)
            self.b.scope = ""

    def read_as_written(self, start: int) -> None:
        """Let updates read parameters as the forward pass has written them, where it has: in the nodes from `start`."""
        if any(value in self.graph.updates for value in self.graph.parameters):
            for i in range(start, len(self.b.nodes)):
                node = self.b.nodes[i]
                inputs = tuple(self.graph.updates.get(x, x) if x.kind is Kind.PARAMETER else x for x in node.inputs)
                self.b.nodes[i] = node if inputs == node.inputs else dataclasses.replace(node, inputs=inputs)

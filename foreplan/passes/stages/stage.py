"""Forward graph → the training step of one stage, for all micro-batches, in the order of 1F1B."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foreplan.graph import Array, Builder, Fill, Graph, GraphBuilder, Kind, Node, TensorType, Value
from foreplan.ops.collective import Begin, Finish, Group
from foreplan.ops.map import elementwise
from foreplan.ops.pullback import Pullback
from foreplan.ops.shape import broadcast_to, reshape, slice_axis
from foreplan.passes.autodiff import Consumer, check_not_written, pull_back
from foreplan.passes.base import Pass
from foreplan.passes.loss_scale import LossScale
from foreplan.passes.optimizer import Optimizer
from foreplan.passes.ranks import ALONE, Phase, Ranks, uses_of_gradients
from foreplan.passes.stages.layout import Layout, Price, laid_out
from foreplan.passes.stages.schedule import Unit, units_of
from foreplan.passes.stages.updates import StageUpdater
from foreplan.passes.stages.wire import Begun, Wire


@dataclass(frozen=True)
class StageStep(Pass, requires=("forward", "loss", "training form"), ensures=("loss", "backward")):
    """The training step of one stage, in the place of `differentiate`: it receives, runs forward, sends, and the same
    backward, for each micro-batch; then it updates its parameters with the mean of their gradients.

    Inputs without a default have a further leading axis for the micro-batches, if there are several. The loss, on every
    stage, is the mean of the micro-batches' losses. Running statistics and the random state pass from one micro-batch
    to the next. What a unit of work receives is begun before the one before it has what it waits for, and what it sends
    is waited for when the one behind it has been computed.

    Where a stage has several ranks, each sends to the rank of the same number in another stage. Parameters that lie in
    parts are gathered for each unit of work.

    Attributes:
        stages: how many there are.
        stage: which one this is, from 0 on.
        micro_batches: 1 or more.
        price: nanoseconds of a node, by which stages are cut.
        scaled: whether gradients are too large by a scale (see `LossScale`).
        ranks: those of one stage.

    Raises:
        UsageError: the model has fewer operations than stages.
        UnsupportedError: an op on the way has no derivative, or the forward pass writes a parameter.
    """

    stages: int
    stage: int
    micro_batches: int
    optimizer: Optimizer
    price: Price
    scaled: bool = False
    ranks: Ranks = ALONE

    def _run(self, graph: Graph) -> Graph:
        check_not_written(graph)
        layout = laid_out(graph, self.stages, self.price)
        return _Stage(layout, self.stage, self.micro_batches, self.optimizer, self.scaled, self.ranks).run()


class _MicroBatch:
    """One micro-batch in one stage.

    Attributes:
        now: by value of the forward graph, that of this micro-batch.
        nodes: in order, among them those that all micro-batches share.
    """

    def __init__(self) -> None:
        self.now: dict[Value, Value] = {}
        self.nodes: list[Node] = []


class _Stage:
    """The step of one stage while it is built."""

    def __init__(
        self, layout: Layout, stage: int, micro_batches: int, optimizer: Optimizer, scaled: bool, ranks: Ranks
    ) -> None:
        graph = layout.graph
        self.layout, self.stage, self.count, self.optimizer = layout, stage, micro_batches, optimizer
        self.last = layout.stages - 1
        self.b = b = GraphBuilder(graph.name)
        b.notes = list(graph.notes)
        b.stored = [value for value in graph.stored if value in layout.reads[stage]]
        b.reserve(b.stored, ())
        self.inputs = {value: self.input(value) for value in graph.inputs if value in layout.reads[stage]}
        self.changing = {value for value in b.stored if value in graph.updates}
        self.fixed: dict[Node, Node] = {}  # by node of the forward graph that reads fixed values alone, its one copy
        self.content = {value: value for value in self.changing}  # of stored values, after the micro-batches so far
        self.batches: dict[int, _MicroBatch] = {}
        self.wanted: set[Value] = {value for value in b.stored if value in layout.wanted}
        self.sums: dict[Value, Value] = {}
        self.loss: Value | None = None
        self.scale = LossScale.stored(b) if scaled else None
        self.share: Value | None = None  # what backward begins with, without a scale
        self.stages = Group(layout.stages, ranks.count)
        self.wire = Wire(b, stage, self.stages)
        self.uses = uses_of_gradients(optimizer, ranks, lambda b, scale, count: _Sums(self), self.updater)
        self.updating: Consumer | None = None  # what uses the sums, when the last micro-batch has begun to go back
        self.phases: dict[Node, Phase] = {}
        if self.uses.sharding is not None:
            self.uses.sharding.lay_out(layout.forward(stage), layout.trained, layout.tied)

    def input(self, value: Value) -> Value:
        """An input of the step: of all micro-batches."""
        type = value.type.with_shape((self.count, *value.shape)) if self.has_parts(value) else value.type
        return self.b.input(value.name, type, value.init)

    def has_parts(self, value: Value) -> bool:
        """Whether each micro-batch has its own part of an input."""
        return value.init is None and self.count > 1

    def run(self) -> Graph:
        """The step."""
        units = units_of(self.stage, self.last + 1, self.count)
        begun, sending = self.begin(units[0]), list[Begun]()
        for at, unit in enumerate(units):
            behind = self.begin(units[at + 1]) if at + 1 < len(units) else {}
            received = {value: self.received(unit, value, each) for value, each in begun.items()}
            results = self.forward(unit.number, received) if unit.forward else self.backward(unit.number, received)
            self.phases |= dict.fromkeys(self.b.nodes[len(self.phases) :], Phase(at, unit.forward))
            self.wire.finish(sending)
            to, first = self.stage + (1 if unit.forward else -1), unit.number * len(results)
            self.wire.work_done(self.ends(unit))
            sending = [self.wire.send(value, to, first + i) for i, value in enumerate(results)]
            begun = behind
        self.wire.finish(sending)
        self.b.kind, self.b.scope, self.b.source = Kind.GRADIENT, "", ""
        updates = {old: new for old, new in self.content.items() if old is not new}
        assert self.updating is not None
        updates |= self.updating.finish()
        loss = self.shared_loss([new for old, new in updates.items() if old.kind is Kind.PARAMETER])
        return self.with_homes(self.b.finish({}, updates, loss), Phase(len(units) - 1, False))

    def with_homes(self, step: Graph, last: Phase) -> Graph:
        """The step, with weights in the rows where ranks have them."""
        if self.uses.sharding is None:
            return step
        now = {old.outputs[0]: new.outputs[0] for old, new in self.fixed.items()}
        return self.uses.sharding.with_homes(step, lambda node: self.phases.get(node, last), now)

    def updater(self, b: Builder, scale: LossScale | None, count: Value | None) -> StageUpdater:
        """What updates the parameters of this stage."""
        first = self.count * max(map(len, self.layout.crossing))
        return StageUpdater(b, self.optimizer, scale, self.layout, self.wire, first)

    def ends(self, unit: Unit) -> list[Value]:
        """What a unit of work ends with, beside what it sends: no plan puts it off until other units have run."""
        if not unit.forward:
            return list(self.sums.values())
        return [] if self.loss is None else [self.loss]

    def begin(self, unit: Unit) -> dict[Value, Begun]:
        """Begin to receive what a unit of work reads, by value of the forward graph."""
        cut, source = (self.stage - 1, self.stage - 1) if unit.forward else (self.stage, self.stage + 1)
        if not 0 <= cut < self.last:
            return {}
        values = (self.layout.crossing if unit.forward else self.layout.returning)[cut]
        self.b.kind, self.b.scope, self.b.source = self.kind_of(unit), self.scope_of(unit.number), ""
        first = unit.number * len(values)
        return {value: self.wire.receive(value.type, source, first + i) for i, value in enumerate(values)}

    def received(self, unit: Unit, value: Value, begun: Begun) -> Value:
        """Wait for one of these."""
        self.b.kind, self.b.scope, self.b.source = self.kind_of(unit), self.scope_of(unit.number), ""
        return self.wire.received(begun, value.name if unit.forward else f"{value.name}/grad")

    @staticmethod
    def kind_of(unit: Unit) -> Kind:
        """Of what is computed."""
        return Kind.ACTIVATION if unit.forward else Kind.GRADIENT

    def scope_of(self, number: int) -> str:
        """What the names of a micro-batch begin with."""
        return f"micro{number}/" if self.count > 1 else ""

    def forward(self, number: int, received: dict[Value, Value]) -> list[Value]:
        """Run a micro-batch forward; gives what the next stage reads."""
        graph, b, batch = self.layout.graph, self.b, _MicroBatch()
        self.batches[number] = batch
        batch.now |= received | self.content
        b.kind, b.scope = Kind.ACTIVATION, self.scope_of(number)
        for value, whole in self.inputs.items():
            own = whole
            if self.has_parts(value):
                own = reshape(b, slice_axis(b, whole, 0, number, 1), value.shape)
            batch.now[value] = own
        for node in self.layout.nodes[self.stage]:
            batch.nodes.append(self.copied(node, batch))
        self.wanted.update(new for old, new in batch.now.items() if old in self.layout.wanted)
        for old in self.changing:
            self.content[old] = batch.now.get(graph.updates[old], graph.updates[old])
        if self.stage == self.last:
            assert graph.loss is not None
            loss = batch.now[graph.loss]
            total = self.loss
            self.loss = loss if total is None else elementwise(b, lambda x, y: x + y, total, loss, name="loss_sum")
            return []
        return [batch.now[value] for value in self.layout.crossing[self.stage]]

    def copied(self, node: Node, batch: _MicroBatch) -> Node:
        """A node of the forward graph, for one micro-batch or, if it is the same for all, once."""
        b = self.b
        same = node in self.layout.of_stored and all(
            value not in self.changing and (not (maker := self.maker(value)) or maker in self.fixed)
            for value in node.inputs
        )
        if same and node in self.fixed:
            made = self.fixed[node]
        else:
            scope = b.scope
            b.scope, b.source = "" if same else scope, node.source
            b.repeat(node, [batch.now.get(value, value) for value in node.inputs])
            b.scope, made = scope, b.nodes[-1]
            if same:
                self.fixed[node] = made
        batch.now.update(zip(node.outputs, made.outputs))
        return made

    def maker(self, value: Value) -> Node | None:
        """The node of the forward graph that computes a value."""
        return self.layout.graph.producer.get(value)

    def backward(self, number: int, received: dict[Value, Value]) -> list[Value]:
        """Run a micro-batch back; gives the cotangents of what it has received."""
        b, batch = self.b, self.batches.pop(number)
        b.kind, b.scope, b.source, b.wanted = Kind.GRADIENT, "", "", self.wanted
        if number == self.count - 1:
            self.updating = self.uses.of_sums(b, self.scale, None)
        using = self.uses.of_micro_batch(b, self.scale, None)
        walk = Pullback(b)
        if self.stage == self.last:
            assert self.layout.graph.loss is not None
            loss = batch.now[self.layout.graph.loss]
            walk.add(loss, self.seed(loss.type))
        for value, cotangent in received.items():
            walk.add(batch.now[value], cotangent)
        left = Counter(value for node in batch.nodes for value in set(node.inputs))
        for node in reversed(batch.nodes):
            pull_back(walk, node)
            for value in dict.fromkeys(node.inputs):
                left[value] -= 1
                if value.kind is Kind.PARAMETER and not left[value]:
                    self.use_gradient(value, walk.take(value), using)
        before = () if self.stage == 0 else self.layout.returning[self.stage - 1]
        b.scope, b.source = self.scope_of(number), ""
        return [self.cotangent(walk, batch.now[value]) for value in before]

    def seed(self, type: TensorType) -> Value:
        """The cotangent of the loss of each micro-batch: its share of the mean."""
        b, share = self.b, 1.0 / self.count
        if self.scale is not None:
            return elementwise(b, lambda x: x * share, self.scale.scale, dtype=type.dtype, name="loss_scale/share")
        if self.share is None:
            self.share = b.store("share", type, Kind.CONSTANT, Array(np.full((), share, type.dtype.numpy)))
        return self.share

    def use_gradient(self, parameter: Value, gradient: Value | None, using: Consumer) -> None:
        """Use the gradient that a micro-batch gives."""
        self.b.scope, self.b.source = f"{parameter.name}/", ""
        if gradient is None and parameter in self.layout.tied:
            gradient = self.zeros(parameter)  # other stages wait for one
        if gradient is not None:
            using.update(parameter, gradient)

    def add(self, parameter: Value, gradient: Value) -> None:
        """Add one micro-batch's gradient to those before it; with the last one the sum is used."""
        total = self.sums.get(parameter)
        if total is not None:
            gradient = elementwise(self.b, lambda x, y: x + y, total, gradient, name="gradient")
        self.sums[parameter] = gradient
        if self.updating is not None:
            self.updating.update(parameter, self.sums.pop(parameter))

    def cotangent(self, walk: Pullback, value: Value) -> Value:
        """The cotangent of what was received: zero if nothing differentiates through it."""
        found = walk.take(value)
        return self.zeros(value) if found is None else found

    def zeros(self, like: Value) -> Value:
        """Zeros of a value's type."""
        zero = self.b.store("zero", TensorType(like.dtype, ()), Kind.CONSTANT, Fill(0.0))
        return broadcast_to(self.b, zero, like.shape)

    def shared_loss(self, updated: Sequence[Value]) -> Value:
        """The mean loss, which the last stage gives to all: behind all messages, so that none waits for it, and waited
        for behind all updates.
        """
        b, loss = self.b, self.layout.graph.loss
        assert loss is not None
        b.kind = Kind.ACTIVATION
        if self.stage < self.last:
            own = b.store("no_loss", loss.type, Kind.CONSTANT, Fill(0.0))
        else:
            assert self.loss is not None
            share = 1.0 / self.count
            own = elementwise(b, lambda x: x * share, self.loss, dtype=loss.dtype, name="mean_loss")
        begun = b.apply(self.stages.op(Begin, kind="broadcast", peer=self.last), own, *self.wire.ends, name="loss")
        return b.apply(self.stages.op(Finish), begun, own, *updated, name="loss")


class _Sums:
    """Adds up gradients of micro-batches."""

    def __init__(self, stage: _Stage) -> None:
        self.stage = stage

    def update(self, parameter: Value, gradient: Value) -> None:
        """Of a parameter, or of a rank's part of several."""
        self.stage.add(parameter, gradient)

    def finish(self) -> dict[Value, Value]:
        """Nothing is stored."""
        return {}

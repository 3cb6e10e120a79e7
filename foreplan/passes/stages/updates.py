"""The update of one stage: what several stages share is summed over them."""

from __future__ import annotations

from collections.abc import Sequence

from foreplan.graph import Builder, Fill, Kind, TensorType, Value
from foreplan.graph.types import FLOAT64
from foreplan.ops.map import elementwise
from foreplan.passes.loss_scale import LossScale
from foreplan.passes.optimizer import Optimizer
from foreplan.passes.optimizer.updater import Updater
from foreplan.passes.stages.layout import Layout
from foreplan.passes.stages.wire import Begun, Wire


class StageUpdater(Updater):
    """Updates the parameters of one stage.

    The norm of all gradients is that of all stages. A parameter that several have, such as a tied embedding, gets the
    sum of their gradients on each of them, in the order of stages, so that it stays the same everywhere (as in
    Megatron-LM); it counts once.
    """

    def __init__(
        self, b: Builder, optimizer: Optimizer, scale: LossScale | None, layout: Layout, wire: Wire, first: int
    ) -> None:
        """
        Args:
            first: the number of the first message that is about no micro-batch.
        """
        super().__init__(b, optimizer, scale=scale)
        self.layout, self.wire, self.first = layout, wire, first
        self.seen = [value.name for value in layout.graph.parameters]  # patterns may be about those of other stages
        tied = (value for value in layout.graph.parameters if len(layout.holders(value)) > 1)
        self.number = {value: first + 1 + i for i, value in enumerate(tied)}
        self.sums: list[tuple[Value, Sum]] = []

    def update(self, parameter: Value, gradient: Value, home: Value | None = None) -> None:
        """Add the update of one parameter, or begin to sum its gradient over stages."""
        if parameter in self.number:
            holders = self.layout.holders(parameter)
            self.sums.append((parameter, Sum(self.wire, gradient, holders, self.number[parameter])))
        else:
            super().update(parameter, gradient, home)

    def finish(self) -> dict[Value, Value]:
        """Every stored value's content for the next step, after adding the updates that had to wait."""
        for parameter, of_stages in self.sums:
            self.b.scope = f"{parameter.name}/"
            total = of_stages.finish(self.b)
            super().update(parameter, total)
            if self.squares and self.wire.stage != self.layout.holders(parameter)[0]:
                self.squares.pop()
        self.b.scope = ""
        return super().finish()

    def _sum_of_all_squares(self) -> Value:
        """Of all stages."""
        if not self.squares:
            self.squares.append(self.b.store("no_squares", TensorType(FLOAT64, ()), Kind.CONSTANT, Fill(0.0)))
        own = super()._sum_of_all_squares()
        return Sum(self.wire, own, self.layout.training, self.first).finish(self.b)


class Sum:
    """A sum over some stages, each of which sends what it has to all others."""

    def __init__(self, wire: Wire, own: Value, stages: Sequence[int], number: int) -> None:
        """Begin.

        Args:
            own: what this stage has.
            stages: ascending, this one among them.
            number: of the message.
        """
        self.wire, self.own, self.stages = wire, own, stages
        others = [stage for stage in stages if stage != wire.stage]
        self.begun: dict[int, Begun] = {stage: wire.receive(own.type, stage, number) for stage in others}
        for stage in others:
            wire.send(own, stage, number)

    def finish(self, b: Builder) -> Value:
        """The sum, added in the order of stages."""
        received = {stage: self.wire.received(begun, "received") for stage, begun in self.begun.items()}
        terms = [received.get(stage, self.own) for stage in self.stages]
        total = terms[0]
        for term in terms[1:]:
            total = elementwise(b, lambda x, y: x + y, total, term, name="sum_of_stages")
        return total

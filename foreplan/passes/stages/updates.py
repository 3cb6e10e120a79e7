"""The update of one stage: what several stages share is summed over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from foreplan.graph import Builder, Fill, Kind, TensorType, Value
from foreplan.graph.flat import Flat
from foreplan.graph.types import FLOAT64
from foreplan.ops.collective import ALONE, Group
from foreplan.ops.map import elementwise
from foreplan.passes.loss_scale import LossScale
from foreplan.passes.optimizer import Optimizer
from foreplan.passes.optimizer.updater import Updater
from foreplan.passes.stages.layout import Layout
from foreplan.passes.stages.wire import Wire


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
        self.shared = {value.name: value for value in layout.tied}
        self.number = {value.name: first + 1 + i for i, value in enumerate(layout.tied)}
        self.tied: dict[str, tuple[Value, Value, Value, Group]] = {}  # what `update` was given

    def update(self, parameter: Value, gradient: Value, home: Value | None = None, group: Group = ALONE) -> None:
        """Add the update of one parameter. One of several stages waits until this one has sent all else: others would
        wait for what is sent behind it.
        """
        home = parameter if home is None else home
        name = home.init.members[0].name if isinstance(home.init, Flat) else home.name
        if name in self.shared:
            self.tied[name] = parameter, gradient, home, group
        else:
            super().update(parameter, gradient, home, group)

    def finish(self) -> dict[Value, Value]:
        """Every stored value's content for the next step, after adding the updates that had to wait."""
        for name in sorted(self.tied, key=self.number.__getitem__):
            parameter, gradient, home, group = self.tied[name]
            self.b.scope, holders = f"{name}/", self.layout.holders(self.shared[name])
            super().update(parameter, self.sum_over(holders, gradient, self.number[name]), home, group)
            if self.waiting and self.wire.stage != holders[0]:
                self.waiting[-1] = replace(self.waiting[-1], square=None)
        self.b.scope = ""
        return super().finish()

    def _sum_of_squares(self) -> Value:
        """Of all stages."""
        if any(each.square is not None for each in self.waiting):
            own = super()._sum_of_squares()
        else:
            own = self.b.store("no_squares", TensorType(FLOAT64, ()), Kind.CONSTANT, Fill(0.0))
        return self.sum_over(self.layout.training, own, self.first)

    def sum_over(self, stages: Sequence[int], own: Value, number: int) -> Value:
        """The sum of what some stages have, in their order: each sends it to all others.

        Args:
            number: of the message.
        """
        wire, others = self.wire, [stage for stage in stages if stage != self.wire.stage]
        begun = {stage: wire.receive(own.type, stage, number) for stage in others}
        sending = [wire.send(own, stage, number) for stage in others]
        terms = {stage: wire.received(each, "received") for stage, each in begun.items()} | {wire.stage: own}
        wire.finish(sending)
        total, *rest = (terms[stage] for stage in stages)
        for term in rest:
            total = elementwise(self.b, lambda x, y: x + y, total, term, name="sum_of_stages")
        return total

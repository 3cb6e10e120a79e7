"""The second half of a step that accumulates gradients: what runs once, after the micro-batches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from foreplan.base.errors import VerificationError
from foreplan.lower.program import Program, Slot
from foreplan.planner import verify
from foreplan.planner.plan import Plan


@dataclass(frozen=True)
class Update:
    """A program and its plan, to run after several runs of another program of the same stored values: the body.

    Attributes:
        micro_batches: how often the body runs in a step; at least 2.
        program: what runs then.
        plan: where and when.
    """

    micro_batches: int
    program: Program
    plan: Plan

    def verify(self, body: Program, plan: Plan) -> None:
        """Prove this half's plan, and that it keeps every stored value in the bytes where the body keeps it.

        Raises:
            VerificationError: names the rule that is broken, or the stored value that differs.
        """
        verify(self.plan, self.program)
        if self.micro_batches < 2:
            raise VerificationError(
                f"a step that accumulates gradients needs 2 micro-batches, and has {self.micro_batches}"
            )
        if (body.target, body.regions) != (self.program.target, self.program.regions):
            raise VerificationError("the two halves of the step are for different targets or regions")
        first, second = _kept(body.stored, body, plan), _kept(self.program.stored, self.program, self.plan)
        for name in {**first, **second}:
            if first.get(name) != second.get(name):
                raise VerificationError(f"the two halves of the step do not keep {name!r} in the same bytes")
        if _kept(body.ahead, body, plan) != _kept(self.program.ahead, self.program, self.plan):
            raise VerificationError("the two halves of the step do not keep the next batch in the same bytes")

        given = {slot.name for slot in body.inputs}
        for slot in self.program.inputs:
            if slot.init is None or slot.name in given:
                raise VerificationError(f"the second half of the step takes {slot.name!r}, and has no default for it")
        if self.program.outputs or self.program.gradients or self.program.loss is not None:
            raise VerificationError("the second half of the step returns something, which nobody reads")

    def heights(self, body: Plan) -> tuple[int, ...]:
        """Bytes of each region in which both halves run."""
        return tuple(max(pair) for pair in zip(body.heights, self.plan.heights, strict=True))


def _kept(slots: Iterable[Slot], program: Program, plan: Plan) -> dict[str, tuple[object, ...]]:
    """What each slot is that lasts from step to step, and where it lies."""
    starts = dict(plan.starts)
    return {
        slot.name: (slot.kind, slot.operand.type, program.values[slot.operand.value].region, starts[slot.operand.value])
        for slot in slots
    }

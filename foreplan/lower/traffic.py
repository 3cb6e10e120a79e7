"""What a step sends to other ranks."""

from __future__ import annotations

from dataclasses import dataclass

from foreplan.lower.program import Program
from foreplan.ops.collective import Begin
from foreplan.planner import Plan


@dataclass(frozen=True)
class Traffic:
    """The exchanges of one rank.

    Attributes:
        ranks: how many take part.
        exchanges: how many there are in a step.
        sent: bytes that a rank sends; as many arrive.
    """

    ranks: int
    exchanges: int = 0
    sent: int = 0

    @staticmethod
    def of(program: Program, plan: Plan) -> Traffic:
        """Of one run of a plan."""
        calls = [program.calls[step.action] for step in plan.steps]
        begun = [(call.op, call.inputs[0].type) for call in calls if isinstance(call.op, Begin)]
        return Traffic(program.ranks, len(begun), sum(op.sent(type) for op, type in begun))

    def __add__(self, other: Traffic) -> Traffic:
        """Of one and then the other."""
        return Traffic(max(self.ranks, other.ranks), self.exchanges + other.exchanges, self.sent + other.sent)

    def __mul__(self, times: int) -> Traffic:
        """Of several."""
        return Traffic(self.ranks, self.exchanges * times, self.sent * times)

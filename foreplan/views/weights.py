"""What a step trains, and what of the model it leaves as it is: a line for people, and a table that gives reasons."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from foreplan.graph import Kind, TensorType, Value
from foreplan.lower.program import Slot
from foreplan.units import format_count

_SHOWN = (Kind.PARAMETER, Kind.FROZEN, Kind.BUFFER)


@dataclass(frozen=True)
class Weight:
    """One tensor of the model.

    Attributes:
        trained: whether the step updates it by its gradient, or returns that.
        why: for people; empty where the model itself says so, or where a plan file has forgotten it.
    """

    name: str
    type: TensorType
    trained: bool
    why: str = ""


@dataclass(frozen=True)
class Weights:
    """The tensors that a model has, in its order."""

    rows: tuple[Weight, ...]

    @staticmethod
    def of(stored: Iterable[Value | Slot]) -> Weights:
        """Among the stored values of a graph, or of a program: parameters, buffers, and constants of a file."""
        found = []
        for each in stored:
            type = each.type if isinstance(each, Value) else each.operand.type
            why = each.why if isinstance(each, Value) else ""
            if each.kind in _SHOWN or (each.kind is Kind.CONSTANT and why):
                reason = why or ("a running statistic" if each.kind is Kind.BUFFER else "")
                found.append(Weight(each.name, type, each.kind is Kind.PARAMETER, reason))
        return Weights(tuple(found))

    @property
    def line(self) -> str:
        """Such as `trains 161 tensors, 25.6 M numbers; 106 frozen`."""
        trained = [row for row in self.rows if row.trained]
        frozen = len(self.rows) - len(trained)
        numbers = format_count(sum(row.type.size for row in trained))
        return f"trains {len(trained):,} tensors, {numbers} numbers; {frozen:,} frozen"

    def to_json(self) -> dict[str, Any]:
        """How many tensors and numbers are trained, and are not."""
        found = {}
        for what, trained in (("trained", True), ("frozen", False)):
            some = [row for row in self.rows if row.trained is trained]
            found[what] = {"tensors": len(some), "numbers": sum(row.type.size for row in some)}
        return found

    def __repr__(self) -> str:
        return f"<Weights: {self.line}>"

    def __str__(self) -> str:
        """A table: name, type, whether it is trained, and why."""
        cells = [(row.name, str(row.type), "trained" if row.trained else "frozen", row.why) for row in self.rows]
        name, type = (max((len(row[i]) for row in cells), default=0) for i in range(2))
        return "".join(f"{a:<{name}}  {b:<{type}}  {c:<7}  {d}".rstrip() + "\n" for a, b, c, d in cells)

"""What a step trains, and what of the model it leaves as it is: a line for people, and a table that gives reasons."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from foreplan.base.units import format_count
from foreplan.graph import Kind, TensorType, Value
from foreplan.graph.flat import Flat
from foreplan.lower.program import Slot

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
        for name, type, kind, why in _tensors(stored):
            if kind in _SHOWN or (kind is Kind.CONSTANT and why):
                reason = why or ("a running statistic" if kind is Kind.BUFFER else "")
                found.append(Weight(name, type, kind is Kind.PARAMETER, reason))
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


def _tensors(stored: Iterable[Value | Slot]) -> Iterator[tuple[str, TensorType, Kind, str]]:
    """Name, type, kind and reason of each tensor; a row of tensors has several."""
    for each in stored:
        if isinstance(each, Slot):
            yield each.name, each.operand.type, each.kind, ""
        elif isinstance(each.init, Flat):
            yield from ((member.name, member.type, each.kind, member.why) for member in each.init.members)
        else:
            yield each.name, each.type, each.kind, each.why

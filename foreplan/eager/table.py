"""A step as PyTorch runs it, as people and programs read it: phase by phase, and what fills its peak."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from foreplan.units import format_bytes

if TYPE_CHECKING:
    from foreplan.eager.step import Eager

_TITLES = {
    "inputs": "after the inputs",
    "model": "after the model",
    "forward": "forward",
    "backward": "backward",
    "micro_batches": "more micro-batches",
    "step": "optimizer step",
}
Planned = Mapping[str, tuple[int, int]]  # of each phase of a plan: bytes alive at its end, and the most within it


@dataclass(frozen=True)
class Row:
    """Bytes after one phase, and the most within it; None: the plan has no such phase.

    Attributes:
        phase: inputs, model, forward, backward, micro_batches or step.
        iteration: of the loop, from 1; 0 before it.
        live, most: of PyTorch's live tensors.
        allocated, reserved: by the caching allocator of a card.
        planned, planned_most: alive in the plan.
    """

    phase: str
    iteration: int
    live: int
    most: int
    allocated: int | None
    reserved: int | None
    planned: int | None
    planned_most: int | None


def rows_of(eager: Eager, planned: Planned) -> tuple[Row, ...]:
    """All phases of the loop."""
    found = []
    for i, phase in enumerate(eager.phases):
        card = eager.replayed[i] if eager.cuda else None
        allocator = (None, None) if card is None else (card.allocated, card.reserved)
        ours = planned.get(phase.name, (None, None))
        found.append(Row(phase.name, phase.iteration, phase.live, phase.most, *allocator, *ours))
    return tuple(found)


def json_of(eager: Eager, rows: Sequence[Row]) -> dict[str, Any]:
    """The same for programs, in bytes."""
    largest = eager.largest_workspace
    return {
        "device": "cuda" if eager.cuda else "cpu",
        "variant": asdict(eager.variant),
        "peak_bytes": eager.peak,
        "at_peak": {str(use): nbytes for use, nbytes in eager.at_peak.items()},
        "largest_workspace": None if largest is None else {"of": largest.name, "bytes": largest.nbytes},
        "phases": [asdict(row) for row in rows],
        "notes": list(eager.notes),
    }


def table_of(eager: Eager, rows: Sequence[Row], beside: bool) -> list[str]:
    """Lines of the table.

    Args:
        beside: whether the plan has columns of its own.
    """
    unit = "MiB" if eager.peak >= 10 << 20 else "KiB"
    reserved, ours = ["reserved"] * eager.cuda, ["foreplan", "most"] * beside
    lines = [_line([unit, "PyTorch", "most", *reserved, *ours])]
    before = 0
    for row in rows:
        if row.iteration != before:
            lines.append(f"step {row.iteration}")
            before = row.iteration
        cells = [row.live, row.most, *[row.reserved] * eager.cuda, *([row.planned, row.planned_most] if beside else [])]
        name = f"{'  ' if row.iteration else ''}{_TITLES[row.phase]}"
        lines.append(_line([name, *(_number(cell, unit) for cell in cells)]))
    return lines


def remarks_of(eager: Eager) -> list[str]:
    """What people are told below the table."""
    largest = eager.largest_workspace
    return [
        *([] if largest is None else [f"largest {largest.name}, {format_bytes(largest.nbytes)}"]),
        *(f"note: {note}" for note in eager.notes),
    ]


def _number(nbytes: int | None, unit: str) -> str:
    return "" if nbytes is None else f"{nbytes / (1 << 20 if unit == 'MiB' else 1 << 10):,.1f}"


def _line(cells: list[str]) -> str:
    return (f"{cells[0]:<18}" + "".join(f"{cell:>13}" for cell in cells[1:])).rstrip()

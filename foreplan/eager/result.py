"""A step as PyTorch runs it, as people and programs read it: phase by phase, and what fills its peak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from foreplan.base.units import format_bytes
from foreplan.eager.allocator import Replayed, replayed
from foreplan.eager.storage import Block, Memory, Use
from foreplan.eager.variant import Variant

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


@dataclass(frozen=True)
class Phase:
    """Bytes of live tensors.

    Attributes:
        name: of the phase that has ended.
        iteration: of the loop, from 1; 0 before it.
        live: at its end.
        most: the most of them within it.
        end: the number of events until then.
    """

    name: str
    iteration: int
    live: int
    most: int
    end: int


@dataclass(frozen=True)
class Eager:
    """A step as PyTorch runs it.

    Attributes:
        phases: in order.
        memory: all blocks and events until the last phase ends.
        variant: how the training loop is written.
        cuda: whether it runs on a card.
        notes: what is not counted, for people.
    """

    phases: tuple[Phase, ...]
    memory: Memory
    variant: Variant
    cuda: bool
    notes: tuple[str, ...] = ()

    @cached_property
    def largest_workspace(self) -> Block | None:
        """The largest workspace of a convolution; None: no convolution takes one."""
        found = [block for block in self.memory.blocks if block.use is Use.WORKSPACE]
        return max(found, key=lambda block: block.nbytes, default=None)

    @property
    def peak(self) -> int:
        """The most bytes of the last iteration: the steady state."""
        return max(phase.most for phase in self.phases if phase.iteration == self.phases[-1].iteration)

    @cached_property
    def alive_at_peak(self) -> tuple[Block, ...]:
        """The blocks that are alive at the peak."""
        begin = max((phase.end for phase in self.phases if phase.iteration < self.phases[-1].iteration), default=0)
        events, blocks, live = self.memory.events, self.memory.blocks, 0
        high, end = -1, 0
        for i, event in enumerate(events):
            live += blocks[event].nbytes if event >= 0 else -blocks[~event].nbytes
            if i >= begin and live > high:
                high, end = live, i + 1
        alive = dict.fromkeys(event for event in events[:end] if event >= 0)
        for event in events[:end]:
            if event < 0:
                del alive[~event]
        return tuple(blocks[event] for event in alive)

    @cached_property
    def at_peak(self) -> dict[Use, int]:
        """Bytes at the peak, by what they are; the most first."""
        found: Counter[Use] = Counter()
        for block in self.alive_at_peak:
            found[block.use] += block.nbytes
        return dict(found.most_common())

    def parts(self, depth: int = 1) -> dict[str, int]:
        """Bytes at the peak by part of the model, such as `layers.0`; the most first.

        Args:
            depth: how many names of the path of a part count.
        """
        found: Counter[str] = Counter()
        for block in self.alive_at_peak:
            path = block.name.partition(":")[0] if block.use is not Use.INPUT else ""
            found[".".join(path.replace("/", ".").split(".")[:depth])] += block.nbytes
        return dict(found.most_common())

    def as_json(self) -> dict[str, Any]:
        """The same for programs, in bytes."""
        return json_of(self, rows_of(self, {}))

    def __str__(self) -> str:
        filled = ", ".join(f"{use} {format_bytes(nbytes)}" for use, nbytes in self.at_peak.items())
        lines = [
            *table_of(self, rows_of(self, {}), beside=False),
            "",
            f"peak of PyTorch's live tensors {format_bytes(self.peak)}: {filled}",
            *remarks_of(self),
        ]
        return "\n".join(lines) + "\n"

    @cached_property
    def replayed(self) -> tuple[Replayed, ...]:
        """What the caching allocator of a card has after each phase."""
        return replayed(self.memory, [phase.end for phase in self.phases])


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

"""Alias sets as they are in time and memory: a whole grows with its parts, and shrinks with what takes its bytes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from foreplan.planner.memory.alias_sets import AliasSets, merge
from foreplan.planner.memory.bounds import may_lie_within
from foreplan.planner.memory.liveness import LiveRanges
from foreplan.planner.problem import Part, Problem, Role


class Box(NamedTuple):
    """Bytes [low, high) of an alias set during the steps [lower, upper); step -1 is when the first one begins."""

    lower: int
    upper: int
    low: int
    high: int

    def meets(self, other: Box) -> bool:
        """Whether two boxes of the same bytes overlap."""
        return self.lower < other.upper and other.lower < self.upper and self.low < other.high and other.low < self.high


@dataclass(frozen=True)
class Outlines:
    """What alias sets hold.

    Attributes:
        alias_sets: of an order, with every overwrite and every part that can be in place.
        boxes: of each alias set; those of one do not overlap. None of those of stored values, which hold their bytes
            throughout.
    """

    alias_sets: AliasSets
    boxes: list[list[Box]]

    @property
    def is_solid(self) -> bool:
        """Whether each alias set holds the same bytes as long as it lives."""
        return all(len(boxes) <= 1 for boxes in self.boxes)


def outlines(
    problem: Problem,
    order: Sequence[int],
    ranges: LiveRanges,
    apart: Collection[int] = frozenset(),
    copied: Collection[int] = frozenset(),
) -> Outlines:
    """The outlines of an order.

    Args:
        apart: instances that take no bytes that they need not take.
        copied: instances that lie in no whole.
    """
    found = _Outlines(problem, ranges, merge(problem, order, ranges, solid=False, apart=apart))
    for step, index in enumerate(order):
        for part in problem.actions[index].parts:
            if may_lie_within(problem, problem.actions[index], part) and ranges.reads[step][part.read] not in copied:
                found.join(step, part)
    return found.close()


class _Outlines:
    """Alias sets, their boxes so far, and which lie within others."""

    def __init__(self, problem: Problem, ranges: LiveRanges, alias_sets: AliasSets) -> None:
        self.problem, self.ranges, self.alias_sets = problem, ranges, alias_sets
        self.alignment, self.residue = list(alias_sets.alignment), list(alias_sets.residue)
        self.inside: dict[int, tuple[int, int]] = {}  # by alias set, the alias set in which it lies, and where
        self.wholes: set[int] = set()
        self.overwritten = set(alias_sets.over)
        self.boxes: list[list[Box]] = [[] for _ in alias_sets.region]
        for instance, alias_set in enumerate(alias_sets.of):
            value = problem.values[ranges.values[instance]]
            starts = value.role in (Role.INPUT, Role.STORED)
            lower = -1 if starts else ranges.lower[instance] + (alias_sets.over[instance] >= 0)
            if value.nbytes and lower < ranges.upper[instance] and alias_sets.stored[alias_set] < 0:
                self.boxes[alias_set].append(Box(lower, ranges.upper[instance], 0, value.nbytes))

    def join(self, step: int, part: Part) -> None:
        """Put a part into its whole, if it is gone after the step and its place is free by then."""
        piece, whole = self.ranges.reads[step][part.read], self.ranges.writes[step][part.write]
        own, into = self.alias_sets.of[piece], self.alias_sets.of[whole]
        taken = self.alias_sets.over[whole] >= 0 or piece in self.overwritten
        if taken or self.ranges.kept[piece] or self.ranges.upper[piece] != step + 1 or self.alias_sets.stored[own] >= 0:
            return
        placed = self._aligned(own, into, part.offset)
        moved = [
            Box(box.lower, min(box.upper, step), box.low + part.offset, box.high + part.offset)
            for box in self.boxes[own]
            if box.lower < step
        ]
        if placed is None or any(box.meets(other) for box in moved for other in self.boxes[into]):
            return
        self.alignment[into], self.residue[into] = placed
        self.boxes[into] += moved
        self.inside[own] = into, part.offset
        self.wholes.add(whole)

    def _aligned(self, own: int, into: int, offset: int) -> tuple[int, int] | None:
        """Alignment and residue of an alias set once another lies in it; None where no offset suits both."""
        first = self.alignment[into], self.residue[into]
        second = self.alignment[own], (self.residue[own] - offset) % self.alignment[own]
        narrow, wide = sorted((first, second))
        return wide if wide[1] % narrow[0] == narrow[1] else None

    def close(self) -> Outlines:
        """The alias sets that remain, numbered anew."""
        old, boxes = self.alias_sets, list(map(_fused, self.boxes))
        held = replace(
            old,
            nbytes=[max([nbytes, *(box.high for box in own)]) for nbytes, own in zip(old.nbytes, boxes)],
            alignment=self.alignment,
            residue=self.residue,
            lower=[min([box.lower for box in own], default=lower) for lower, own in zip(old.lower, boxes)],
            upper=[max([box.upper for box in own], default=upper) for upper, own in zip(old.upper, boxes)],
        )
        left = [own for alias_set, own in enumerate(boxes) if alias_set not in self.inside]
        return Outlines(held.nested(self.inside, self.wholes), left)


def _fused(boxes: Sequence[Box]) -> list[Box]:
    """The boxes, of which those that follow one another in the same bytes are one."""
    found: list[Box] = []
    for box in sorted(boxes, key=lambda box: (box.low, box.high, box.lower)):
        if found and (found[-1].upper, *found[-1][2:]) == (box.lower, *box[2:]):
            box = found.pop()._replace(upper=box.upper)
        found.append(box)
    return found

"""In-place concatenations: their operands are made where they will lie within the result, whose bytes are held."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from foreplan.base.units import align_up
from foreplan.planner.memory.alias_sets import AliasSets
from foreplan.planner.memory.bounds import granularities, reserved_bytes
from foreplan.planner.memory.liveness import LiveRanges
from foreplan.planner.problem import Action, Part, Problem, Role


def join(problem: Problem, order: Sequence[int], ranges: LiveRanges, alias_sets: AliasSets) -> AliasSets:
    """The alias sets of an order with parts in their places, where that raises no peak.

    The whole holds its bytes from the step that writes the first part in its place. So only parts that die in the step
    that joins them are placed, those that are made last first: as many as possible, while the most bytes reserved over
    these steps do not rise.
    """
    steps = [step for step, index in enumerate(order) if problem.actions[index].parts]
    if not steps:
        return alias_sets
    joins = _Joins(problem, ranges, alias_sets, reserved_bytes(problem, order, ranges, alias_sets))
    for step in steps:
        joins.run(step, problem.actions[order[step]])
    return joins.alias_sets() if joins.inside else alias_sets


class _Joins:
    """Alias sets that lie within others, and the bytes reserved at each step."""

    def __init__(self, problem: Problem, ranges: LiveRanges, alias_sets: AliasSets, live: np.ndarray) -> None:
        self.problem, self.ranges, self.before, self.live = problem, ranges, alias_sets, live
        self.grain = granularities(problem)
        self.lower, self.alignment = list(alias_sets.lower), list(alias_sets.alignment)
        self.inside: dict[int, tuple[int, int]] = {}  # by alias set, the alias set in which it lies, and where
        self.wholes: set[int] = set()

    def run(self, step: int, action: Action) -> None:
        """Place as many of one step's parts as possible."""
        for write, whole in enumerate(self.ranges.writes[step]):
            into = self.before.of[whole]
            if self.before.over[whole] >= 0 or self.problem.values[action.writes[write]].home >= 0:
                continue
            found = [(self.ranges.reads[step][part.read], part) for part in action.parts if part.write == write]
            found = [(piece, part) for piece, part in found if self._may_lie_within(piece, part, step)]
            if found and self._place(step, into, found):
                self.wholes.add(whole)

    def _may_lie_within(self, piece: int, part: Part, step: int) -> bool:
        """Whether a part dies in the step, and no earlier value in its alias set is larger."""
        value, alias_set = self.problem.values[self.ranges.values[piece]], self.before.of[piece]
        return (
            value.role is Role.TRANSIENT
            and value.nbytes > 0
            and not self.ranges.kept[piece]
            and self.ranges.upper[piece] == step + 1
            and self.before.stored[alias_set] < 0
            and self.before.nbytes[alias_set] <= value.nbytes
            and part.offset % self.alignment[alias_set] == 0
        )

    def _place(self, step: int, into: int, found: Sequence[tuple[int, Part]]) -> bool:
        """Put as many parts as possible into an alias set, those that begin last first; whether there are any."""
        pieces = [(self.before.of[piece], part) for piece, part in found]
        begins = np.array([max(self.lower[alias_set], 0) for alias_set, _ in pieces])
        first = int(begins.min())
        live = self.live[first : step + 1]
        begun = np.zeros(len(live), np.int64)
        np.add.at(begun, begins - first, [self._bytes(alias_set) for alias_set, _ in pieces])
        within = np.cumsum(begun)  # bytes of the parts that live at each step
        before = np.maximum.accumulate(live[::-1])[::-1]
        rest = live - within
        rest[-1] -= self._bytes(into)  # the step itself counts the whole already
        rest = np.maximum.accumulate(rest[::-1])[::-1]
        for at in np.unique(begins) - first:  # the first step of the whole; what began earlier stays apart
            apart = within[at] - begun[at]
            if rest[at] + self._bytes(into) + apart <= before[at]:
                break
        else:
            return False
        live[at:] -= within[at:] - apart
        live[at:-1] += self._bytes(into)
        self.lower[into] = first + int(at)
        for alias_set, part in pieces:
            if max(self.lower[alias_set], 0) >= first + at:
                self.inside[alias_set] = into, part.offset
                self.alignment[into] = max(self.alignment[into], self.alignment[alias_set])
                # One in the place of an input is there before the first step, beside inputs that nothing reads.
                self.lower[into] = min(self.lower[into], self.lower[alias_set])
        return True

    def _bytes(self, alias_set: int) -> int:
        region = self.before.region[alias_set]
        counts = self.problem.regions[region].on_device
        return align_up(self.before.nbytes[alias_set], self.grain[region]) if counts else 0

    def alias_sets(self) -> AliasSets:
        """The alias sets that remain, numbered anew."""
        return replace(self.before, alignment=self.alignment, lower=self.lower).nested(self.inside, self.wholes)

"""Joins: concatenations written in place, their operands made where they will lie within the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from foreplan.planner.memory.alias_sets import AliasSets
from foreplan.planner.memory.bounds import granularities, reserved_bytes
from foreplan.planner.memory.liveness import LiveRanges
from foreplan.planner.problem import Action, Part, Problem, Role
from foreplan.units import align_up


def join(problem: Problem, order: Sequence[int], ranges: LiveRanges, alias_sets: AliasSets) -> AliasSets:
    """The alias sets of an order with parts in their places, where that nowhere makes more bytes live.

    The whole holds its bytes from the step on that writes the first part in its place. So of those parts that die in
    the step that joins them, the ones made last are placed, as many as can be without more bytes set aside than before
    at the highest step of that stretch.
    """
    steps = [step for step, index in enumerate(order) if problem.actions[index].parts]
    if not steps:
        return alias_sets
    joins = _Joins(problem, ranges, alias_sets, reserved_bytes(problem, order, ranges, alias_sets))
    for step in steps:
        joins.run(step, problem.actions[order[step]])
    return joins.alias_sets() if joins.inside else alias_sets


class _Joins:
    """AliasSets that lie within others, and the bytes reserved at each step."""

    def __init__(self, problem: Problem, ranges: LiveRanges, alias_sets: AliasSets, live: np.ndarray) -> None:
        self.problem, self.ranges, self.before, self.live = problem, ranges, alias_sets, live
        self.grain = granularities(problem)
        self.lower, self.alignment = list(alias_sets.lower), list(alias_sets.alignment)
        self.inside: dict[int, tuple[int, int]] = {}  # by chain, the chain in which it lies, and where
        self.wholes: set[int] = set()

    def run(self, step: int, action: Action) -> None:
        """Place what can be placed of one step's parts."""
        for write, whole in enumerate(self.ranges.writes[step]):
            into = self.before.of[whole]
            if self.before.over[whole] >= 0 or self.problem.values[action.writes[write]].home >= 0:
                continue
            found = [(self.ranges.reads[step][part.read], part) for part in action.parts if part.write == write]
            found = [(piece, part) for piece, part in found if self._may_lie_within(piece, part, step)]
            found.sort(key=lambda pair: (-self.lower[self.before.of[pair[0]]], pair[1].offset))
            while found and not self._place(step, into, found):
                earliest = self.lower[self.before.of[found[-1][0]]]
                found = [pair for pair in found if self.lower[self.before.of[pair[0]]] > earliest]
            if found:
                self.wholes.add(whole)

    def _may_lie_within(self, piece: int, part: Part, step: int) -> bool:
        """Whether a part dies in the step, and nothing that had its bytes before it reaches beyond them."""
        value, chain = self.problem.values[self.ranges.values[piece]], self.before.of[piece]
        return (
            value.role is Role.TRANSIENT
            and value.nbytes > 0
            and not self.ranges.kept[piece]
            and self.ranges.upper[piece] == step + 1
            and self.before.stored[chain] < 0
            and self.before.nbytes[chain] <= value.nbytes
            and part.offset % self.alignment[chain] == 0
        )

    def _place(self, step: int, into: int, found: Sequence[tuple[int, Part]]) -> bool:
        """Put parts into a chain, if no more bytes are live than before."""
        pieces = [(self.before.of[piece], part) for piece, part in found]
        first = min(self.lower[chain] for chain, _ in pieces)
        more = np.zeros(step + 1 - first, np.int64)
        more[:-1] += self._bytes(into)
        for chain, _ in pieces:
            more[self.lower[chain] - first :] -= self._bytes(chain)
        now = self.live[first : step + 1]
        if np.max(now + more) > np.max(now):
            return False
        now += more
        for chain, part in pieces:
            self.inside[chain] = into, part.offset
            self.alignment[into] = max(self.alignment[into], self.alignment[chain])
        self.lower[into] = first
        return True

    def _bytes(self, chain: int) -> int:
        region = self.before.region[chain]
        counts = self.problem.regions[region].on_device
        return align_up(self.before.nbytes[chain], self.grain[region]) if counts else 0

    def alias_sets(self) -> AliasSets:
        """What is left of the alias sets, numbered anew."""
        old = self.before
        left = [chain for chain in range(len(old.region)) if chain not in self.inside]
        number = {chain: i for i, chain in enumerate(left)}
        of, at = [], []
        for chain in old.of:
            offset = 0
            while chain in self.inside:
                chain, more = self.inside[chain]
                offset += more
            of.append(number[chain])
            at.append(offset)
        return replace(
            old,
            of=of,
            at=at,
            wholes=frozenset(self.wholes),
            region=[old.region[chain] for chain in left],
            nbytes=[old.nbytes[chain] for chain in left],
            alignment=[self.alignment[chain] for chain in left],
            lower=[self.lower[chain] for chain in left],
            upper=[old.upper[chain] for chain in left],
            stored=[old.stored[chain] for chain in left],
        )

"""Lower bounds of any placement of a schedule."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np

from foreplan.base.units import align_up
from foreplan.planner.memory.alias_sets import AliasSets, matched
from foreplan.planner.memory.liveness import LiveRanges, live_ranges
from foreplan.planner.problem import ALIGNMENT, Action, Part, Problem, Role


def granularities(problem: Problem) -> list[int]:
    """For each region the smallest alignment of anything in it.

    All offsets in a region are multiples of it, and so is its height, hence every buffer takes a multiple of it too.
    """
    smallest = [ALIGNMENT] * len(problem.regions)
    for value in problem.values:
        if value.nbytes and value.alignment < smallest[value.region]:
            smallest[value.region] = value.alignment
    return smallest


def live_bytes(problem: Problem, order: Sequence[int]) -> np.ndarray:
    """Bytes on the device that every plan of an order needs at each step, int64[steps]: the live set.

    It holds for every placement and every choice of overwrites; docs/planner.md defines it. For step 0, the values
    that are there when it begins count instead, if they are more.

    Raises:
        PlanError: as `live_ranges`.
    """
    ranges, sizes = live_ranges(problem, order), DeviceBytes(problem)
    change = [0] * (ranges.steps + 1)
    for instance, v in enumerate(ranges.values):
        change[ranges.lower[instance]] += sizes.of[v]
        change[ranges.upper[instance]] -= sizes.of[v]
    live = np.cumsum(np.array(change[:-1], dtype=np.int64))
    for step, index in enumerate(order):
        action = problem.actions[index]
        live[step] += sizes.workspace(action.workspace, action.workspace_region)
        if action.overwrites or action.parts:
            dying = [not ranges.kept[read] and ranges.upper[read] == step + 1 for read in ranges.reads[step]]
            live[step] -= saved_bytes(problem, action, dying, sizes)
    live[0] = max(live[0], sizes.given(problem))
    return live


def saved_bytes(problem: Problem, action: Action, dying: Sequence[bool], sizes: DeviceBytes) -> int:
    """The most bytes that an action's writes share with those of its reads that nobody needs later.

    Each read serves one write, or lies in one whole. Required overwrites come first. Of the other writes, the set with
    the most bytes is taken in which each has a read of its own.
    """
    values = problem.values
    free = [dies and values[v].role is not Role.STORED and values[v].home < 0 for dies, v in zip(dying, action.reads)]
    wishes: dict[int, list[int]] = {}  # by write, or by part counted down from -1, the reads that may serve it
    nbytes: dict[int, int] = {}
    saved = 0
    for pair in action.overwrites:
        taken = sizes.of[action.writes[pair.write]]
        if pair.required and free[pair.read] and taken:  # a write of no bytes takes none
            free[pair.read] = False
            saved += taken
    must = {pair.write for pair in action.overwrites if pair.required}
    for pair in action.overwrites:
        if free[pair.read] and pair.write not in must:
            wishes.setdefault(pair.write, []).append(pair.read)
            nbytes[pair.write] = sizes.of[action.writes[pair.write]]
    for part in action.parts:
        if free[part.read] and may_lie_within(problem, action, part):
            wishes[-1 - part.read] = [part.read]
            nbytes[-1 - part.read] = sizes.of[action.reads[part.read]]
    return saved + sum(nbytes[key] for key in matched(wishes, nbytes))


def may_lie_within(problem: Problem, action: Action, part: Part) -> bool:
    """Whether a part that nobody needs later can share bytes with its whole."""
    whole, piece = problem.values[action.writes[part.write]], problem.values[action.reads[part.read]]
    lasts = piece.role is Role.STORED or piece.home >= 0
    return not lasts and piece.nbytes > 0 and part.offset % min(whole.alignment, piece.alignment) == 0


def reserved_bytes(problem: Problem, order: Sequence[int], ranges: LiveRanges, alias_sets: AliasSets) -> np.ndarray:
    """Bytes on the device that solid alias sets of an order take at each step, int64[steps].

    As `live_bytes`, but with the overwrites and parts that the alias sets have. A whole that is made of parts in place
    counts from its first part on.
    """
    sizes, within = DeviceBytes(problem), alias_sets.within()
    change = [0] * (ranges.steps + 1)
    for instance, v in enumerate(ranges.values):
        if instance not in within:
            lower = ranges.lower[instance] + (alias_sets.over[instance] >= 0)
            if instance in alias_sets.wholes:
                lower = max(alias_sets.lower[alias_sets.of[instance]], 0)
            change[lower] += sizes.of[v]
            change[ranges.upper[instance]] -= sizes.of[v]
    for step, index in enumerate(order):
        nbytes = sizes.workspace(problem.actions[index].workspace, problem.actions[index].workspace_region)
        change[step] += nbytes
        change[step + 1] -= nbytes
    live = np.cumsum(np.array(change[:-1], dtype=np.int64))
    live[0] = max(live[0], sizes.given(problem))
    return live


class DeviceBytes:
    """Sizes as a lower bound may count them: rounded to the region's granularity; 0 on the host and at home."""

    def __init__(self, problem: Problem) -> None:
        self.grain = granularities(problem)
        self.on_device = [region.on_device for region in problem.regions]
        self.of = [
            align_up(value.nbytes, self.grain[value.region]) if self.on_device[value.region] and value.home < 0 else 0
            for value in problem.values
        ]

    def total(self, values: Iterable[int]) -> int:
        """Of all values together."""
        return sum(self.of[v] for v in values)

    def given(self, problem: Problem) -> int:
        """What is there when the step begins."""
        return self.total(v for v, value in enumerate(problem.values) if value.role in (Role.INPUT, Role.STORED))

    def workspace(self, nbytes: int, region: int) -> int:
        """Of scratch memory."""
        return align_up(nbytes, self.grain[region]) if self.on_device[region] else 0

    def while_running(self, problem: Problem, index: int, kept: Collection[int]) -> int:
        """What lies there, stored values left out, while an action runs and some values are there before and after."""
        action = problem.actions[index]
        there = {v for v in action.reads if problem.values[v].role is not Role.STORED}.union(action.writes, kept)
        saved = saved_bytes(problem, action, [v not in kept for v in action.reads], self)
        return self.total(there) - saved + self.workspace(action.workspace, action.workspace_region)

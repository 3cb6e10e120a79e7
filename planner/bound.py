"""Lower bounds: what no placement of a schedule can go below, and what no schedule can."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from foreplan.planner.alias import Chains
from foreplan.planner.liveness import LiveRanges
from foreplan.planner.problem import ALIGNMENT, Problem, Role
from foreplan.units import align_up


def granularities(problem: Problem) -> list[int]:
    """For each region the smallest alignment of anything in it.

    All offsets in a region are multiples of it, and so is its height, hence every buffer takes a multiple of it too.
    """
    smallest = [ALIGNMENT] * len(problem.regions)
    for value in problem.values:
        if value.nbytes and value.alignment < smallest[value.region]:
            smallest[value.region] = value.alignment
    return smallest


def live_bytes(problem: Problem, order: Sequence[int], ranges: LiveRanges, chains: Chains) -> np.ndarray:
    """Bytes on the device that every placement of a schedule needs at each step, int64[steps].

    Stored values count throughout, a write that takes a read's bytes from the step after, a workspace at its step.
    """
    grain = granularities(problem)
    on_device = [region.on_device for region in problem.regions]
    change = [0] * (ranges.steps + 1)
    for instance, v in enumerate(ranges.values):
        value = problem.values[v]
        if value.home >= 0 or not on_device[value.region]:
            continue
        nbytes = align_up(value.nbytes, grain[value.region])
        change[ranges.lower[instance] + (chains.over[instance] >= 0)] += nbytes
        change[ranges.upper[instance]] -= nbytes
    for step, index in enumerate(order):
        action = problem.actions[index]
        if action.workspace and on_device[action.workspace_region]:
            nbytes = align_up(action.workspace, grain[action.workspace_region])
            change[step] += nbytes
            change[step + 1] -= nbytes
    return np.cumsum(np.array(change[:-1], dtype=np.int64))


def schedule_bound(problem: Problem, order: Sequence[int], ranges: LiveRanges, chains: Chains) -> tuple[int, int]:
    """The highest live set of a schedule in bytes, and the first step at which it is reached."""
    live = live_bytes(problem, order, ranges, chains)
    step = int(np.argmax(live))
    return int(live[step]), step


def order_bound(problem: Problem) -> int:
    """Bytes below which no schedule of the problem's actions goes, recomputing ones included.

    Whatever the order, some sets of bytes coexist on the device: stored values always, all inputs when the step
    begins, all outputs when it ends, and, while an action runs that every schedule must run, what it reads and writes
    (less what it may write in place) and its workspace. An action must run if it has an effect or is the only
    producer of a value that an output or such an action needs. Values that a join reads may lie inside the joined
    value, so they count only in sets without one.
    """
    sizes = _DeviceBytes(problem)
    everywhere = [v for v, value in enumerate(problem.values) if value.role is Role.STORED]
    persistent = sizes.total(everywhere)
    starts = [v for v, value in enumerate(problem.values) if value.role is Role.INPUT]
    ends = [v for v, value in enumerate(problem.values) if value.role is Role.OUTPUT]
    highest = max(sizes.total(starts), sizes.total(ends))
    for index in _unavoidable(problem):
        action = problem.actions[index]
        if action.parts:
            continue
        reads = [v for v in action.reads if problem.values[v].role is not Role.STORED]
        in_place = {action.writes[pair.write] for pair in action.overwrites}
        writes = [v for v in action.writes if v not in in_place]
        working_set = sizes.total([*reads, *writes]) + sizes.workspace(action.workspace, action.workspace_region)
        highest = max(highest, working_set)
    return persistent + highest


class _DeviceBytes:
    """Sizes as a lower bound may count them: rounded to the region's granularity, none on the host or at home."""

    def __init__(self, problem: Problem) -> None:
        self.grain = granularities(problem)
        self.on_device = [region.on_device for region in problem.regions]
        self.of = [
            align_up(value.nbytes, self.grain[value.region]) if self.on_device[value.region] and value.home < 0 else 0
            for value in problem.values
        ]
        self.parts: set[int] = set()
        self.joined: set[int] = set()
        for action in problem.actions:
            if action.parts:
                self.parts.update(action.reads)
                self.joined.update(action.writes)
        for v in self.parts:
            self.of[v] = min(self.of[v], problem.values[v].nbytes)

    def total(self, values: Iterable[int]) -> int:
        values = list(values)
        inside = self.parts if not self.joined.isdisjoint(values) else ()
        return sum(self.of[v] for v in values if v not in inside)

    def workspace(self, nbytes: int, region: int) -> int:
        return align_up(nbytes, self.grain[region]) if self.on_device[region] else 0


def _unavoidable(problem: Problem) -> list[int]:
    """Actions that every schedule runs, ascending."""
    must = {index for index, action in enumerate(problem.actions) if action.effect}
    needed = [v for v, value in enumerate(problem.values) if value.role is Role.OUTPUT]
    for index in sorted(must):
        needed += problem.actions[index].reads
    seen: set[int] = set()
    while needed:
        v = needed.pop()
        if v in seen or problem.values[v].role in (Role.INPUT, Role.STORED):
            continue
        seen.add(v)
        if len(problem.producers[v]) == 1 and problem.producers[v][0] not in must:
            must.add(problem.producers[v][0])
            needed += problem.actions[problem.producers[v][0]].reads
    return sorted(must)

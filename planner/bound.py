"""Lower bounds: what no placement of a schedule can go below, and what no schedule can."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from foreplan.planner.alias import Chains
from foreplan.planner.liveness import LiveRanges
from foreplan.planner.problem import ALIGNMENT, Problem, Role
from foreplan.planner.rivals import without_rivals
from foreplan.units import align_up

HELD = 32  # values that the bound over all schedules follows from one end of the step to the other


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

    Stored values count throughout, a write that takes a read's bytes from the step after, what is made of parts in
    place from the first of them, a workspace at its step.
    """
    grain = granularities(problem)
    on_device = [region.on_device for region in problem.regions]
    within = chains.within()
    change = [0] * (ranges.steps + 1)
    for instance, v in enumerate(ranges.values):
        value = problem.values[v]
        if value.home >= 0 or not on_device[value.region]:
            continue
        if instance in within:
            continue
        nbytes = align_up(value.nbytes, grain[value.region])
        lower = ranges.lower[instance] + (chains.over[instance] >= 0)
        change[chains.lower[chains.of[instance]] if instance in chains.wholes else lower] += nbytes
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
    begins, all outputs when it ends, and, when an action that every schedule must run does so for the first time, what
    it reads and writes (less what it may write in place), its workspace, and what is held meanwhile (`_held`). An
    action must run if it has an effect or is the only producer of a value that an output or such an action needs.
    Parts may lie within the whole that an action makes of them, so they count only in sets without one.
    """
    problem = without_rivals(problem, [0] * len(problem.actions)).problem
    sizes = _DeviceBytes(problem)
    everywhere = [v for v, value in enumerate(problem.values) if value.role is Role.STORED]
    persistent = sizes.total(everywhere)
    starts = [v for v, value in enumerate(problem.values) if value.role is Role.INPUT]
    ends = [v for v, value in enumerate(problem.values) if value.role is Role.OUTPUT]
    highest = max(sizes.total(starts), sizes.total(ends))
    unavoidable = _unavoidable(problem)
    held = _held(problem, unavoidable, sizes)
    for index in unavoidable:
        action = problem.actions[index]
        there = {v for v in action.reads if problem.values[v].role is not Role.STORED} | held.get(index, set())
        working_set = sizes.total(there.union(action.writes)) - _in_place(problem, index, held.get(index, set()), sizes)
        highest = max(highest, working_set + sizes.workspace(action.workspace, action.workspace_region))
    return persistent + highest


def _in_place(problem: Problem, index: int, held: set[int], sizes: _DeviceBytes) -> int:
    """The most bytes of its writes that an action may put over what it reads, no read serving two of them."""
    action = problem.actions[index]
    reads: set[int] = set()
    writes: set[int] = set()
    for pair in action.overwrites:
        old = action.reads[pair.read]
        if old not in held and problem.values[old].role is not Role.STORED:
            reads.add(old)
            writes.add(action.writes[pair.write])
    return sum(sorted((sizes.of[v] for v in writes), reverse=True)[: len(reads)])


def _held(problem: Problem, unavoidable: list[int], sizes: _DeviceBytes) -> dict[int, set[int]]:
    """By action, what must be there when it runs for the first time, in every schedule, because it can be made neither
    later nor again: inputs, and results of actions with an effect that must precede it, if something else, that needs
    the action's results, must read them. The largest such values only, which keeps this near-linear.
    """
    needs = _needs(problem, unavoidable)
    feeds: dict[int, list[int]] = {index: [] for index in unavoidable}
    for index, earlier in needs.items():
        for other in earlier:
            feeds[other].append(index)
    once = [v for v, value in enumerate(problem.values) if value.role is Role.INPUT and not problem.producers[v]]
    effects = [index for index in unavoidable if problem.actions[index].effect]
    once += [v for index in effects for v in problem.actions[index].writes if len(problem.producers[v]) == 1]
    largest = sorted((v for v in once if sizes.of[v] and problem.readers[v]), key=lambda v: (-sizes.of[v], v))[:HELD]
    held: dict[int, set[int]] = {}
    for v in largest:
        actions = _reach([earlier for index in problem.readers[v] for earlier in needs.get(index, ())], needs)
        if problem.producers[v]:
            actions &= _reach(feeds[problem.producers[v][0]], feeds)
        for index in actions:
            held.setdefault(index, set()).add(v)
    return held


def _needs(problem: Problem, unavoidable: list[int]) -> dict[int, list[int]]:
    """By unavoidable action, those that must have run before it: the only producers of what it reads."""
    must = set(unavoidable)
    needs: dict[int, list[int]] = {}
    for index in unavoidable:
        makers = [_first_producers(problem, v) for v in problem.actions[index].reads]
        needs[index] = [maker[0] for maker in makers if len(maker) == 1 and maker[0] in must]
    return needs


def _reach(starts: list[int], edges: dict[int, list[int]]) -> set[int]:
    """What can be reached along edges, the starts included."""
    seen = set(starts)
    stack = list(starts)
    while stack:
        for other in edges[stack.pop()]:
            if other not in seen:
                seen.add(other)
                stack.append(other)
    return seen


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
                self.parts.update(action.reads[part.read] for part in action.parts)
                self.joined.update(action.writes[part.write] for part in action.parts)
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
        makers = _first_producers(problem, v)
        if len(makers) == 1 and makers[0] not in must:
            must.add(makers[0])
            needed += problem.actions[makers[0]].reads
    return sorted(must)


def _first_producers(problem: Problem, v: int) -> tuple[int, ...]:
    """The actions that can write a value for the first time: all but the copy of itself from off the device."""
    back = problem.round_trips.get(v, (-1, -1))[1]
    return tuple(index for index in problem.producers[v] if index != back)

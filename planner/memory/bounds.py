"""Lower bounds: of any placement of a schedule, and of any schedule."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from foreplan.planner.candidates import merge_candidates
from foreplan.planner.memory.alias_sets import AliasSets
from foreplan.planner.memory.liveness import LiveRanges, live_ranges
from foreplan.planner.problem import ALIGNMENT, Action, Problem, Role
from foreplan.units import align_up

# How many values the bound over all schedules follows through the step. It is no field of an effort: the bound is
# computed again when a plan file is read.
HELD = 32


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
    ranges, sizes = live_ranges(problem, order), _DeviceBytes(problem)
    change = [0] * (ranges.steps + 1)
    given, read = 0, {instance for reads in ranges.reads for instance in reads}
    for instance, v in enumerate(ranges.values):
        role = problem.values[v].role
        given += sizes.of[v] if role in (Role.INPUT, Role.STORED) else 0
        if role is not Role.INPUT or instance in read:
            change[ranges.lower[instance]] += sizes.of[v]
            change[ranges.upper[instance]] -= sizes.of[v]
    live = np.cumsum(np.array(change[:-1], dtype=np.int64))
    for step, index in enumerate(order):
        action = problem.actions[index]
        live[step] += sizes.workspace(action.workspace, action.workspace_region)
        if action.overwrites or action.parts:
            dying = [not ranges.kept[read] and ranges.upper[read] == step + 1 for read in ranges.reads[step]]
            live[step] -= _saved(problem, action, dying, sizes)
    live[0] = max(live[0], given)
    return live


def _saved(problem: Problem, action: Action, dying: Sequence[bool], sizes: _DeviceBytes) -> int:
    """The most bytes that an action's writes share with those of its reads that nobody needs later.

    Each read serves one write, or lies in one whole. Required overwrites come first. Of the other writes, the set with
    the most bytes is taken in which each has a read of its own. A greedy choice with augmenting paths finds it: such
    sets are the independent sets of a matroid (Edmonds and Fulkerson, "Transversals and matroid partition", 1965).
    """
    values = problem.values
    free = [dies and values[v].role is not Role.STORED and values[v].home < 0 for dies, v in zip(dying, action.reads)]
    wishes: dict[tuple[int, int], list[int]] = {}  # by write, or whole and part, the reads that may serve it
    nbytes: dict[tuple[int, int], int] = {}
    saved = 0
    for pair in action.overwrites:
        taken = sizes.of[action.writes[pair.write]]
        if pair.required and free[pair.read] and taken:  # a write of no bytes takes none
            free[pair.read] = False
            saved += taken
    must = {pair.write for pair in action.overwrites if pair.required}
    for pair in action.overwrites:
        if free[pair.read] and pair.write not in must:
            wishes.setdefault((pair.write, -1), []).append(pair.read)
            nbytes[pair.write, -1] = sizes.of[action.writes[pair.write]]
    for part in action.parts:
        whole, piece = values[action.writes[part.write]], values[action.reads[part.read]]
        if free[part.read] and part.offset % min(whole.alignment, piece.alignment) == 0:
            wishes[part.write, part.read] = [part.read]
            nbytes[part.write, part.read] = sizes.of[action.reads[part.read]]
    served: dict[tuple[int, int], int] = {}  # by write, the read that it has
    for write in sorted(wishes, key=lambda write: -nbytes[write]):
        saved += nbytes[write] if _serve(write, wishes, served) else 0
    return saved


def _serve(
    write: tuple[int, int], wishes: dict[tuple[int, int], list[int]], served: dict[tuple[int, int], int]
) -> bool:
    """Give a write a read of its own; other writes may change theirs. Returns whether that is possible."""
    holder = {read: other for other, read in served.items()}
    asked: dict[int, tuple[int, int]] = {}  # by read, the write that asked for it first
    queue = [write]
    for asking in queue:
        for read in wishes[asking]:
            if read in asked:
                continue
            asked[read] = asking
            if read in holder:
                queue.append(holder[read])
                continue
            while read >= 0:
                other = asked[read]
                read, served[other] = served.get(other, -1), read
            return True
    return False


def reserved_bytes(problem: Problem, order: Sequence[int], ranges: LiveRanges, alias_sets: AliasSets) -> np.ndarray:
    """Bytes on the device that the planner sets aside at each step for the alias sets of an order, int64[steps].

    Stored values count throughout, inputs at least at step 0, a workspace at its step. A write that takes a read's
    bytes counts from the next step on. A whole that is made of parts in place counts from its first part on.
    """
    sizes, within = _DeviceBytes(problem), alias_sets.within()
    change = [0] * (ranges.steps + 1)
    for instance, v in enumerate(ranges.values):
        if instance not in within:
            lower = ranges.lower[instance] + (alias_sets.over[instance] >= 0)
            change[alias_sets.lower[alias_sets.of[instance]] if instance in alias_sets.wholes else lower] += sizes.of[v]
            change[ranges.upper[instance]] -= sizes.of[v]
    for step, index in enumerate(order):
        nbytes = sizes.workspace(problem.actions[index].workspace, problem.actions[index].workspace_region)
        change[step] += nbytes
        change[step + 1] -= nbytes
    return np.cumsum(np.array(change[:-1], dtype=np.int64))


def order_bound(problem: Problem) -> int:
    """Bytes below which no schedule of the problem's actions goes, even with recomputation.

    In every order, these lie on the device together: stored values always; all inputs when the step begins; all
    outputs when it ends. And when an action that must run does so for the first time: its reads and writes (less what
    may lie in place), its workspace, and the values held meanwhile (`_held`). An action must run if it has an effect,
    or is the only producer of a value that an output or such an action needs.
    """
    problem = merge_candidates(problem, [0] * len(problem.actions)).problem
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
        dying = [v not in held.get(index, ()) for v in action.reads]
        working_set = sizes.total(there.union(action.writes)) - _saved(problem, action, dying, sizes)
        highest = max(highest, working_set + sizes.workspace(action.workspace, action.workspace_region))
    return persistent + highest


def _held(problem: Problem, unavoidable: list[int], sizes: _DeviceBytes) -> dict[int, set[int]]:
    """By action, the values that every schedule must hold when the action first runs, since they cannot be made later
    or again: inputs, and results of actions with an effect that must precede it. Each is read by some action that must
    follow it. Only the largest such values count, which keeps this near-linear.
    """
    needs = _needs(problem, unavoidable)
    feeds: dict[int, list[int]] = {index: [] for index in unavoidable}
    for index, earlier in needs.items():
        for other in earlier:
            feeds[other].append(index)
    once = [v for v, value in enumerate(problem.values) if value.role is Role.INPUT]
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
    """The nodes that can be reached along edges, the starts included."""
    seen = set(starts)
    stack = list(starts)
    while stack:
        for other in edges[stack.pop()]:
            if other not in seen:
                seen.add(other)
                stack.append(other)
    return seen


class _DeviceBytes:
    """Sizes as a lower bound may count them: rounded to the region's granularity; 0 on the host and at home."""

    def __init__(self, problem: Problem) -> None:
        self.grain = granularities(problem)
        self.on_device = [region.on_device for region in problem.regions]
        self.of = [
            align_up(value.nbytes, self.grain[value.region]) if self.on_device[value.region] and value.home < 0 else 0
            for value in problem.values
        ]

    def total(self, values: Iterable[int]) -> int:
        return sum(self.of[v] for v in values)

    def workspace(self, nbytes: int, region: int) -> int:
        return align_up(nbytes, self.grain[region]) if self.on_device[region] else 0


def _unavoidable(problem: Problem) -> list[int]:
    """Actions that every schedule runs, ascending."""
    must = {index for index, action in enumerate(problem.actions) if action.effect}
    needed = [v for v, value in enumerate(problem.values) if value.role is Role.OUTPUT]
    for index in sorted(must):
        needed += problem.actions[index].reads
    while needed:
        makers = _first_producers(problem, needed.pop())
        if len(makers) == 1 and makers[0] not in must:
            must.add(makers[0])
            needed += problem.actions[makers[0]].reads
    return sorted(must)


def _first_producers(problem: Problem, v: int) -> tuple[int, ...]:
    """The actions that can write a value for the first time: all but the copy that brings it back to the device."""
    back = problem.round_trips.get(v, (-1, -1))[1]
    return tuple(index for index in problem.producers[v] if index != back)

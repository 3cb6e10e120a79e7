"""Rematerialisation and offload: schedules that compute some values again, or copy them off the device and back,
instead of keeping them, from the cheapest to the smallest.

The choice is, for every value and every gap between two of its uses, whether its bytes are kept meanwhile. What is
dropped is computed again when an action needs it, from what is there, as late as possible; what was copied off the
device first is copied back, at the price that the problem's actions for it have. All schedules found lie on one curve,
bytes against cost, which depends on the problem alone; a budget picks from it.

References: Jain et al., "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization", MLSys 2020, for
the problem; Bartan et al., "Moccasin: Efficient Tensor Rematerialization for Neural Networks", ICML 2023, for deciding
about intervals of retention on one order of the actions; XLA's HloRematerialization for dropping at the current peak
what saves the most bytes for its cost; Beaumont et al., "Efficient Combination of Rematerialization and Offloading
for Training DNNs", NeurIPS 2021, for choosing between both in one search.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from foreplan.planner.effort import USUAL, Effort, RecomputeEffort
from foreplan.planner.placement.layout import schedule
from foreplan.planner.problem import Problem, Role
from foreplan.planner.recompute.arrays import NEVER, Gaps, make_gaps, plain_state
from foreplan.planner.recompute.compact import compact
from foreplan.planner.recompute.order import reorder

if TYPE_CHECKING:
    from foreplan.planner.recompute.search import Archive

SEED = 88172645463325252


@dataclass(frozen=True)
class Point:
    """A schedule that recomputes or copies.

    Attributes:
        order: actions, one a step.
        bound: its highest live set in bytes.
        cost: of the copies and the runs beyond the first, in what the search minimised.
    """

    order: tuple[int, ...]
    bound: int
    cost: int


def recompute(
    problem: Problem,
    order: Sequence[int],
    bound: int,
    cost: Sequence[int],
    effort: RecomputeEffort = USUAL.recompute,
    *,
    caps: Sequence[int] = (),
    most_cost: int | None = None,
    thorough: bool = True,
    again: bool = True,
) -> list[Point]:
    """Schedules that need less than an order as it is, by ascending cost and descending live bytes.

    Args:
        order: actions, each once.
        bound: highest live set of that order, in bytes.
        cost: of one more run of each action of the problem.
        effort: how long to search.
        caps: costs for each of which the lowest schedule is wanted.
        most_cost: beyond which no schedule is wanted.
        thorough: search on after the first descent.
        again: whether values may be computed again; else they may only be copied off the device.
    """
    from foreplan.planner.recompute import coarse, kernels, search

    order = late_updates(problem, order)
    smallest = 1 if len(order) <= effort.exact else _smallest(problem, effort.small)
    whole = make_gaps(problem, order, cost, smallest, again=again)
    if not len(whole.gap_value):
        return []
    gaps = whole if len(order) <= effort.exact else compact(whole, smallest)
    scratch = kernels.make_scratch(gaps)
    plain = plain_state(whole)
    targets = [bound]
    step = effort.step if len(plain) <= effort.many else effort.coarse_step
    while targets[-1] > max(bound // effort.lowest, step):
        targets.append(targets[-1] * (step - 1) // step)
    archive = search.make_archive(targets, caps, len(plain))
    limit = int(NEVER) if most_cost is None else most_cost
    long = len(gaps.order) * len(plain) > effort.long
    found: list[np.ndarray] = []
    for way in _ways(gaps):
        if long or thorough:
            coarse.descend_coarsely(way, scratch, plain.copy(), archive, limit, effort.coarse_work, effort.batches)
        for aim in () if long else effort.aims if thorough else effort.aims[:1]:
            scored = aim, effort.boost, effort.hope
            search.descend(way, scratch, plain.copy(), *scored, archive, limit, effort.descent_work)
        if not long:
            work = effort.polish_work if thorough else effort.short_work
            patience = effort.patience if len(order) > effort.sequences.actions else effort.sequences.patience
            _polish(way, plain, archive, work, patience, effort)
        found += [state.copy() for state, least in zip(archive.states, archive.cost) if least < NEVER]
        found += [state.copy() for state, peak in zip(archive.cap_states, archive.peak) if peak < bound]
    return _spelled_out(whole, found, bound) if found else []


def _spelled_out(gaps: Gaps, states: Sequence[np.ndarray], bound: int) -> list[Point]:
    """The schedules of states, as far as no other beats them: see `frontier`."""
    from foreplan.planner.recompute import kernels

    scratch, rows = kernels.make_scratch(gaps), np.array(states)
    figures = np.zeros((3, len(rows)), np.int64)
    kernels.measure_states(gaps, scratch, rows, *figures)
    lengths, peaks, costs = figures.tolist()
    points = []
    for i in _undominated(costs, peaks, lengths, bound):
        length, _ = kernels.generate(gaps, scratch, rows[i])
        points.append(Point(tuple(scratch.counting.steps[:length].tolist()), peaks[i], costs[i]))
    return points


def _ways(gaps: Gaps) -> list[Gaps]:
    """The gaps; where values can be copied or recomputed, the same without copies before it, so that copies only ever
    better what recomputation alone comes to.
    """
    if not np.any(gaps.save >= 0) or np.all(gaps.maker < 0):
        return [gaps]
    none = np.full_like(gaps.save, -1)
    return [gaps._replace(save=none, fetch=none), gaps]


def reordered(
    problem: Problem, points: Sequence[Point], caps: Sequence[int], bound: int, most: int, effort: Effort
) -> list[Point]:
    """The points, and some of them with their runs in a better order: those that the caps allow, and others spread
    evenly between them, as far as that is quick.
    """
    within = [max((i for i, point in enumerate(points) if point.cost <= cap), default=-1) for cap in caps]
    count = min(effort.recompute.reordered // max([len(point.order) for point in points], default=1), most)
    even = range(len(points)) if count >= len(points) else range(0, len(points), len(points) // max(count, 1) + 1)
    found = list(points)
    for i in sorted({i for i in within if i >= 0}.union(even)):
        order = reorder(problem, points[i].order, effort.order)
        found.append(Point(order, schedule(problem, "", order).bound, points[i].cost))
    return frontier(found, bound)


def _polish(gaps: Gaps, plain: np.ndarray, archive: Archive, work: int, patience: int, effort: RecomputeEffort) -> None:
    """Search on from all schedules found, in sweeps of several workers, each with its own random numbers. They share
    what they found after every sweep, so the speed of each does not matter.
    """
    from foreplan.planner.recompute import kernels, search

    workers, aims = effort.workers, effort.aims
    scratches = [kernels.make_scratch(gaps) for _ in range(workers)]
    most = min(work, len(gaps.order) * len(plain) * effort.polish_pair)

    def sweep(worker: int, number: int, own: Archive) -> int:
        seed = np.uint64((SEED + number * workers + worker) * SEED % 2**64)
        scored = aims[number % len(aims)], effort.boost, effort.hope
        limits = effort.targets, effort.rounds, effort.eager, effort.tries
        return int(search.polish(gaps, scratches[worker], plain, *scored, own, *limits, number, most, seed))

    done, number, still, before = 0, 0, 0, None
    with ThreadPoolExecutor(workers) as pool:
        while done < most and number < effort.sweeps and still < patience:
            others = [search.copy_archive(archive) for _ in range(1, workers)]
            done += sum(pool.map(sweep, range(workers), [number] * workers, [archive, *others]))
            for other in others:
                search.merge(archive, other)
            number += 1
            after = archive.cost.tobytes(), archive.peak.tobytes(), archive.cap_cost.tobytes()
            still, before = (still + 1 if after == before else 0), after


def _smallest(problem: Problem, share: int) -> int:
    """The least bytes of a value that may be dropped."""
    on_device = [region.on_device for region in problem.regions]
    sizes = sorted(v.nbytes for v in problem.values if v.role is Role.TRANSIENT and on_device[v.region])
    small = sum(sizes) // share
    for nbytes in sizes:
        small -= nbytes
        if small < 0:
            return nbytes
    return 1


def frontier(points: Sequence[Point], bound: int) -> list[Point]:
    """Those points below `bound` that no other beats in both bytes and cost, by ascending cost."""
    figures = ([point.cost for point in points], [point.bound for point in points], [len(p.order) for p in points])
    return [points[i] for i in _undominated(*figures, bound)]


def _undominated(costs: Sequence[int], peaks: Sequence[int], lengths: Sequence[int], bound: int) -> list[int]:
    kept: list[int] = []
    for i in sorted(range(len(costs)), key=lambda i: (costs[i], peaks[i], lengths[i])):
        if peaks[i] < (peaks[kept[-1]] if kept else bound):
            kept.append(i)
    return kept


def late_updates(problem: Problem, order: Sequence[int]) -> list[int]:
    """The order with updates that free nothing moved to its end. What they replace, such as the step's number on which
    random values depend, is then there for recomputation.
    """
    values, actions = problem.values, problem.actions
    stored = {v for v, value in enumerate(values) if value.role is Role.STORED}
    read: set[int] = set()
    replaced: Counter[int] = Counter()  # by how many actions
    for index in order:
        read.update(actions[index].reads)
        replaced.update({values[v].home for v in actions[index].writes if values[v].home >= 0})

    def idle(index: int) -> bool:
        """Whether nothing waits for the action, and it waits for nothing, not even to see what others replace."""
        action = actions[index]
        homes = {values[v].home for v in action.writes}
        return (
            all(values[v].home >= 0 and v not in read for v in action.writes)
            and bool(action.writes)
            and stored.issuperset(action.reads)
            and all(replaced[v] == (v in homes) for v in action.reads)
        )

    last = [index for index in order if idle(index)]
    moved = set(last)
    return [index for index in order if index not in moved] + last

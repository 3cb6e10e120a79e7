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

from foreplan.planner.placement.layout import schedule
from foreplan.planner.problem import Problem, Role
from foreplan.planner.recompute.arrays import NEVER, Gaps, make_gaps, plain_state
from foreplan.planner.recompute.compact import compact
from foreplan.planner.recompute.order import reorder

if TYPE_CHECKING:
    from foreplan.planner.recompute.search import Archive

STEP = 512  # from one target to the next the peak falls by one part in so many,
COARSE_STEP = 64  # or so where there are many gaps
MANY = 5000
LOWEST = 16  # the last target is this part of the first
EXACT = 200  # actions up to which the search counts every byte
SMALL = 200  # the smallest values, which come to one part in so many of all bytes, are always kept
AIMS = (252, 230, 128, 64)  # what greedy looks at beside the peak: all above this share of it, in 256ths
BOOST = 260
ROUNDS = 2
WORKERS = 2  # threads; what they find does not depend on how many processors there are
SWEEPS = 200
REORDERED = 4_000  # steps of schedules whose orders are searched, all but those that the caps allow,
FEW = 8  # or so many schedules where `recompute.runs` goes on from there
STILL = 24  # sweeps in vain that end the search,
SOON = 4  # or so many where `recompute.runs` goes on from there
TRIES = 16
SEED = 88172645463325252
# Work is counted in actions of the schedules evaluated, some tens of nanoseconds each.
LONG = 5_000_000  # actions times gaps beyond which values are dropped in batches
COARSE_WORK = 300_000_000
DESCENT_WORK = 20_000_000
POLISH_WORK = 200_000_000
SHORT_WORK = 4_000_000
POLISH_PAIR = 3000  # and so much for every pair of an action and a gap


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
        caps: costs for each of which the lowest schedule is wanted.
        most_cost: beyond which no schedule is wanted.
        thorough: search on after the first descent.
        again: whether values may be computed again; else they are copied off the device at most.
    """
    from foreplan.planner.recompute import coarse, kernels, search

    order = late_updates(problem, order)
    smallest = 1 if len(order) <= EXACT else _smallest(problem)
    whole = make_gaps(problem, order, cost, smallest, again=again)
    if not len(whole.gap_value):
        return []
    gaps = whole if len(order) <= EXACT else compact(whole, smallest)
    scratch = kernels.make_scratch(gaps)
    plain = plain_state(whole)
    targets = [bound]
    step = STEP if len(plain) <= MANY else COARSE_STEP
    while targets[-1] > max(bound // LOWEST, step):
        targets.append(targets[-1] * (step - 1) // step)
    archive = search.make_archive(targets, caps, len(plain))
    limit = int(NEVER) if most_cost is None else most_cost
    long = len(gaps.order) * len(plain) > LONG
    found: list[np.ndarray] = []
    for way in _ways(gaps):
        if long or thorough:
            coarse.descend_coarsely(way, scratch, plain.copy(), archive, limit, COARSE_WORK)
        for aim in () if long else AIMS if thorough else AIMS[:1]:
            search.descend(way, scratch, plain.copy(), aim, BOOST, archive, limit, DESCENT_WORK)
        if not long:
            patience = STILL if len(order) > EXACT else SOON
            _polish(way, plain, archive, POLISH_WORK if thorough else SHORT_WORK, patience)
        found += [state.copy() for state, least in zip(archive.states, archive.cost) if least < NEVER]
        found += [state.copy() for state, peak in zip(archive.cap_states, archive.peak) if peak < bound]
    points = []
    scratch = kernels.make_scratch(whole)
    for state in found:
        length, extra = kernels.generate(whole, scratch, state)
        if length >= 0:
            peak, _, _ = kernels.measure_above(whole, scratch, length, 0)
            points.append(Point(tuple(scratch.counting.steps[:length].tolist()), int(peak), int(extra)))
    return frontier(points, bound)


def _ways(gaps: Gaps) -> list[Gaps]:
    """The gaps; where values can be copied or recomputed, the same without copies before it, so that copies only ever
    better what recomputation alone comes to.
    """
    if not np.any(gaps.save >= 0) or np.all(gaps.maker < 0):
        return [gaps]
    none = np.full_like(gaps.save, -1)
    return [gaps._replace(save=none, fetch=none), gaps]


def reordered(
    problem: Problem, points: Sequence[Point], caps: Sequence[int], bound: int, most: int = MANY
) -> list[Point]:
    """Points and, with their runs in better orders, as many of them as is quick: what the caps allow, and at most so
    many evenly between.
    """
    within = [max((i for i, point in enumerate(points) if point.cost <= cap), default=-1) for cap in caps]
    count = min(REORDERED // max([len(point.order) for point in points], default=1), most)
    even = range(len(points)) if count >= len(points) else range(0, len(points), len(points) // max(count, 1) + 1)
    found = list(points)
    for i in sorted({i for i in within if i >= 0}.union(even)):
        order = reorder(problem, points[i].order)
        found.append(Point(order, schedule(problem, "", order).bound, points[i].cost))
    return frontier(found, bound)


def _polish(gaps: Gaps, plain: np.ndarray, archive: Archive, work: int, patience: int) -> None:
    """Search on from all that was found, in sweeps of several workers, each with its own random numbers; after every
    sweep they share what they found, so it does not matter how fast each of them is.
    """
    from foreplan.planner.recompute import kernels, search

    scratches = [kernels.make_scratch(gaps) for _ in range(WORKERS)]
    most = min(work, len(gaps.order) * len(plain) * POLISH_PAIR)

    def sweep(worker: int, number: int, own: Archive) -> int:
        seed = np.uint64((SEED + number * WORKERS + worker) * SEED % 2**64)
        aim = AIMS[number % len(AIMS)]
        return int(search.polish(gaps, scratches[worker], plain, aim, BOOST, own, ROUNDS, TRIES, number, most, seed))

    done, number, still, before = 0, 0, 0, None
    with ThreadPoolExecutor(WORKERS) as pool:
        while done < most and number < SWEEPS and still < patience:
            others = [search.copy_archive(archive) for _ in range(1, WORKERS)]
            done += sum(pool.map(sweep, range(WORKERS), [number] * WORKERS, [archive, *others]))
            for other in others:
                search.merge(archive, other)
            number += 1
            after = archive.cost.tobytes(), archive.peak.tobytes(), archive.cap_cost.tobytes()
            still, before = (still + 1 if after == before else 0), after


def _smallest(problem: Problem) -> int:
    """Bytes from which on a value may be dropped."""
    on_device = [region.on_device for region in problem.regions]
    sizes = sorted(v.nbytes for v in problem.values if v.role is Role.TRANSIENT and on_device[v.region])
    small = sum(sizes) // SMALL
    for nbytes in sizes:
        small -= nbytes
        if small < 0:
            return nbytes
    return 1


def frontier(points: Sequence[Point], bound: int) -> list[Point]:
    """Those points below `bound` that no other beats in both bytes and cost, by ascending cost."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda p: (p.cost, p.bound, len(p.order))):
        if point.bound < (kept[-1].bound if kept else bound):
            kept.append(point)
    return kept


def late_updates(problem: Problem, order: Sequence[int]) -> list[int]:
    """The order with updates that free nothing moved to its end: what they replace, such as the number of the step
    that random values depend on, is then there for whatever runs again.
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

"""Recomputation in small problems: a search over sequences of runs, in any order, beyond what gaps can say.

A state of gaps recomputes as late as possible, in one order of the actions, and each value at most once between two of
its uses. With tens of actions, a search without these restrictions is affordable: anneal.py changes sequences run by
run, towards one ceiling of bytes after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from foreplan.planner.effort import SequenceEffort
from foreplan.planner.memory.order_bound import order_bound
from foreplan.planner.placement.layout import schedule
from foreplan.planner.problem import ALIGNMENT, Problem
from foreplan.planner.recompute.arrays import NEVER, Gaps, make_gaps, may_run_again
from foreplan.planner.recompute.schedules import Point, frontier

if TYPE_CHECKING:
    from foreplan.planner.recompute.anneal import Sequences
    from foreplan.planner.recompute.kernels import Scratch
    from foreplan.planner.recompute.search import Archive

SEED = 2685821657736338717


def annealed(
    problem: Problem,
    orders: Sequence[Sequence[int]],
    points: Sequence[Point],
    caps: Sequence[int],
    bound: int,
    cost: Sequence[int],
    effort: SequenceEffort,
    *,
    again: bool = True,
) -> list[Point]:
    """Points and what the search finds from them, by ascending cost and descending live bytes.

    Args:
        orders: of the same actions, each once.
        points: what else to begin with.
        caps: costs for each of which the lowest sequence is wanted.
        bound: highest live set of the first order, in bytes.
        cost: of one more run of each action of the problem.
        effort: how long to search.
        again: whether values may be computed again.
    """
    from foreplan.planner.recompute import search

    if not orders[0]:
        return list(points)
    gaps = make_gaps(problem, orders[0], cost, 1, again=again)
    room = effort.room * len(orders[0]) + 64
    floor = order_bound(problem)
    step = max(-(-(bound - floor) // effort.slots), 1)  # values may be aligned to less than ALIGNMENT
    archive = search.make_archive(range(bound, floor - step, -step), caps, room)
    workers = [_Worker(gaps, problem, room, effort) for _ in range(effort.workers)]
    for sequence in [*orders, *(point.order for point in points)]:
        if len(sequence) <= room:
            workers[0].note(archive, sequence)
    if bound <= 0 or not np.any(archive.cost < NEVER):  # nothing to save
        return list(points)
    with ThreadPoolExecutor(effort.workers) as pool:
        for number in range(effort.passes):
            others = [search.copy_archive(archive) for _ in range(1, effort.workers)]
            seeds = [SEED * (1 + number * effort.workers + i) % 2**64 for i in range(effort.workers)]
            list(pool.map(_Worker.descend, workers, [archive, *others], seeds))
            for other in others:
                search.merge(archive, other)
    found = _best(archive)
    whole = workers[0].base
    scored = [Point(order, schedule(problem, "", order).bound, sum(cost[i] for i in order) - whole) for order in found]
    return frontier([*points, *scored], bound)


def _best(archive: Archive) -> list[tuple[int, ...]]:
    """The sequences that no other in the archive beats in both bytes and cost, and those for its caps."""
    chosen, least = [], NEVER
    for state, cost in zip(archive.states[::-1], archive.cost[::-1]):
        if cost < least:
            chosen.append(state)
            least = cost
    chosen += [state for state, cost in zip(archive.cap_states, archive.cap_cost) if cost < NEVER]
    return list(dict.fromkeys(tuple(state[state >= 0].tolist()) for state in chosen))


class _Worker:
    """The memory of one thread."""

    def __init__(self, gaps: Gaps, problem: Problem, room: int, effort: SequenceEffort) -> None:
        from foreplan.planner.recompute import anneal as remat_anneal
        from foreplan.planner.recompute import kernels as remat_kernels

        self.kernels = remat_anneal
        self.gaps, self.effort = gaps, effort
        self.base = int(gaps.cost[gaps.order].sum())
        self.scratch: Scratch = remat_kernels.make_scratch(gaps)
        self.sequences: Sequences = remat_anneal.make_sequences(gaps, free_actions(problem), room)

    def note(self, archive: Archive, sequence: Sequence[int]) -> None:
        """Put a sequence into the archive."""
        self._anneal(archive, np.array(sequence, np.int64), 0, 0, 1)

    def descend(self, archive: Archive, seed: int) -> None:
        """Go down from ceiling to ceiling, on each from the cheapest sequence within it, or the lowest of all; then
        try to go below the lowest for each cap, and below the lowest of all.
        """
        lowest = int(archive.targets[np.flatnonzero(archive.cost < NEVER)[-1]])
        effort, actions = self.effort, len(self.gaps.order)
        goals = effort.ceilings + len(archive.caps) + effort.attempts
        trials = min(effort.trials * actions, effort.work // (effort.passes * effort.workers * goals * actions))
        for number in range(1, effort.ceilings + 1):
            share = (effort.lower * lowest / archive.targets[0]) ** (number / effort.ceilings)
            ceiling = int(archive.targets[0] * share)
            known = np.flatnonzero(archive.cost < NEVER)
            within = known[archive.targets[known] <= ceiling]
            chosen = within[np.argmin(archive.cost[within])] if len(within) else known[-1]
            seed = self._anneal(archive, archive.states[chosen], ceiling, trials, seed)
        for state, peak in zip(archive.cap_states, archive.peak):
            if peak < NEVER:
                seed = self._anneal(archive, state, int(peak) - 1, trials, seed)
        for _ in range(effort.attempts):
            lowest = np.flatnonzero(archive.cost < NEVER)[-1]
            seed = self._anneal(archive, archive.states[lowest], int(archive.targets[lowest]) - ALIGNMENT, trials, seed)

    def _anneal(self, archive: Archive, start: np.ndarray, ceiling: int, trials: int, seed: int) -> int:
        length = int(np.count_nonzero(start >= 0))
        self.sequences.now[:length] = start[:length]
        hot = max(self.effort.hot * self.base, 1.0)
        sizes = self.gaps.problem.size[self.gaps.problem.size > 0]
        price = self.effort.price * hot / (float(sizes.mean()) if len(sizes) else 1.0)
        return int(
            self.kernels.anneal(
                self.gaps, self.scratch, self.sequences, length, ceiling, self.base, price, hot, trials,
                archive, np.uint64(seed),
            )
        )  # fmt: skip


def free_actions(problem: Problem) -> np.ndarray:
    """For each action whether a sequence may have any number of its runs, and none."""
    return np.array([may_run_again(problem, action) for action in problem.actions], np.int64)

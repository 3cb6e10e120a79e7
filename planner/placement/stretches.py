"""Busy stretches of time first: the buffers that live near the peak are placed alone, then ever more around them.

A large irregular graph is near its peak in a few short stretches of time. Their buffers can be packed tightly as long
as no others are in the way. All others find some room around them, since fewer bytes live then. So the stretches grow
level by level, and each level is mended (mending.py). Timetabling, too, places the hardest first and extends that
(Carter, Laporte and Lee, "Examination timetabling: algorithmic strategies and applications", Journal of the Operational
Research Society 1996).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from foreplan.planner.effort import PlacementEffort
from foreplan.planner.placement.mending import Push, mended
from foreplan.planner.placement.orders import by_area, by_lifetime, by_size, pairs
from foreplan.planner.placement.problem import PlacementProblem


def outward(
    problem: PlacementProblem,
    height: int,
    goal: int,
    effort: PlacementEffort,
    first: Callable[[PlacementProblem], np.ndarray],
    push: Push,
) -> np.ndarray | None:
    """A placement that begins with the busiest stretches, or None if it does not become lower than `height`.

    Args:
        problem: buffers, all with bytes, none fixed.
        height: of a known placement.
        goal: a height that is low enough, not below the bound rounded up to the smallest alignment.
        effort: `stretches` says which levels there are, `stretch` and `stretch_large` how much work each may take.
        first: places the first level.
        push: the greedy placer by first fit, as of `mended`.
    """
    work = effort.stretch if len(problem.size) <= effort.skyline else effort.stretch_large
    if effort.chains + effort.chains_pair * pairs(problem) > work:
        return None  # a level would end in the midst of its first run of chains
    offsets = np.full(len(problem.size), -1)
    busiest = _busiest(problem)
    for percent in effort.stretches:
        some = np.flatnonzero(100 * busiest >= percent * busiest.max())
        new = offsets[some] < 0
        if not new.any():
            continue
        inner = problem.some(some)
        if not new.all():
            start = _around(inner, offsets[some], push)
        elif len(some) < len(offsets):
            start = first(inner)
        else:
            return None  # all is busy: nothing is hardest
        found = mended(inner, start, goal, pairs(inner), work, effort, push, area=_crowded_area(inner, effort))
        offsets[some] = found
        if int((found + inner.size).max()) >= height:
            return None
    return offsets


def _around(problem: PlacementProblem, offsets: np.ndarray, push: Push) -> np.ndarray:
    """Buffers that lie stay; those at -1 go into the first gaps, in the order that gives the least height."""
    trials = []
    for order in (by_size(problem), by_area(problem), by_lifetime(problem)):
        trials.append(np.zeros_like(offsets))
        push(replace(problem, fixed=offsets), order, trials[-1])
    return min(trials, key=lambda found: int((found + problem.size).max()))


def _busiest(problem: PlacementProblem) -> np.ndarray:
    """The most bytes that live at one time of each buffer's life."""
    _, live, lower, upper = problem.live()
    levels = [live]  # levels[k][i]: the most of live[i : i + 2**k]
    while 2 ** len(levels) <= len(live):
        half = 2 ** (len(levels) - 1)
        levels.append(np.maximum(levels[-1][:-half], levels[-1][half:]))
    level = np.frexp(upper - lower)[1] - 1
    found = np.empty(len(lower), np.int64)
    for k in np.unique(level):
        some = level == k
        found[some] = np.maximum(levels[k][lower[some]], levels[k][upper[some] - 2**k])
    return found


def _crowded_area(problem: PlacementProblem, effort: PlacementEffort) -> np.ndarray:
    """Size times life of each buffer, where time counts the more the less room it leaves below the highest live set."""
    times, live, lower, upper = problem.live()
    counted = np.diff(times, append=times[-1]) * (1 + effort.crowd_room - live / live.max()) ** -effort.crowd_power
    until = np.concatenate([[0.0], np.cumsum(counted)])
    return problem.size * (until[upper] - until[lower])

"""Exact offset search: does an instance fit into a capacity, and what is the least it fits into?

Runs of one systematic search (`planner.search`) that differ in where they decide and what they try first, each given up
after some failures, twice as many in every round: such searches have heavy tails, which restarts cut off (Gomes, Selman
and Kautz, "Boosting combinatorial search through randomization", AAAI 1998). What runs prove dead, the others skip. All
is bounded by counted work, never by a clock, so the same instance gives the same placement anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foreplan.planner.inference import WORK, empty_state
from foreplan.planner.search import FEWEST, FOUND, LOWEST, NARROWEST, NONE, TIGHTEST, empty_path, search
from foreplan.planner.sections import Sections

_FAILURES = 64  # that end a run of the first round
_NOISE = 300  # thousandths of choices changed in later rounds
_MOST_FAILURES = 1 << 40
_DEAD = 1 << 18  # no-goods kept
_FIRST_SHARE = 6  # the first tries of `descend` may do 2**-6 of all work each


@dataclass(frozen=True)
class Verdict:
    """What a search for a placement within a capacity came to.

    Attributes:
        offsets: one a buffer, int64; None if none was found.
        proved: whether there is none.
        work: buffers and sections looked at.
    """

    offsets: np.ndarray | None
    proved: bool
    work: int


def fit(sections: Sections, capacity: int, work: int) -> Verdict:
    """Look for a placement within a capacity, until about so much work is done."""
    state, path = empty_state(sections), empty_path(sections)
    if (state.least + sections.need > capacity).any():
        return Verdict(None, True, 0)
    dead = np.zeros(_DEAD, np.uint64)
    grain = int(sections.alignment.min())
    roof = -(-capacity // grain) * grain
    any_fixed = bool((sections.fixed >= 0).any())
    ranks = _ranks(sections)
    seed = 0
    failures, noise = _FAILURES, 0
    while state.scalars[WORK] < work:
        for rule in (LOWEST, FEWEST, NARROWEST, TIGHTEST):
            for rank in ranks:
                seed += 1
                setting = (rank, rule, noise, seed, capacity, roof, any_fixed, dead, failures, work)
                outcome = search(sections, state, path, *setting)
                if outcome == FOUND:
                    return Verdict(state.least.copy(), False, int(state.scalars[WORK]))
                if outcome == NONE:
                    return Verdict(None, True, int(state.scalars[WORK]))
        failures, noise = min(2 * failures, _MOST_FAILURES), _NOISE
    return Verdict(None, False, int(state.scalars[WORK]))


def _ranks(sections: Sections) -> tuple[np.ndarray, ...]:
    """Orders in which to try options, by size in the fullest sections first, by life, by area, and by size.

    The first is what MiniMalloc calls contention, see `planner.inference`.
    """
    totals = sections.totals()
    life = sections.upper - sections.lower
    contention = np.array([totals[low:up].max() for low, up in zip(sections.lower, sections.upper)], np.int64)
    size = sections.size
    return tuple(
        np.argsort(np.lexsort((np.arange(len(size)), *keys[::-1])))
        for keys in ((-contention, -size), (-life,), (-life * size.astype(np.float64),), (-size,))
    )


@dataclass(frozen=True)
class Descent:
    """What lowering a height came to.

    Attributes:
        offsets: of the lowest placement found, int64; None if none is lower than what there was.
        height: of it.
        bound: what no placement goes below.
    """

    offsets: np.ndarray | None
    height: int
    bound: int


def descend(sections: Sections, height: int, bound: int, goal: int, work: int) -> Descent:
    """Lower a height that is known to be possible, in rounds: to the goal at once, then by halves of what remains.

    Each round spends twice as much on a try as the one before, and goes on until an eighth of what remained is left.

    Args:
        height: of a placement.
        bound: what no placement goes below.
        goal: a height that will do, not below `bound`.
        work: about how much to do in all.
    """
    offsets: np.ndarray | None = None
    share = max(1, work >> _FIRST_SHARE)
    while work > 0 and height > goal:
        enough = max(1, (height - bound) >> 3)
        failed, capacity = bound - 1, goal
        while work > 0 and height > goal and height - failed > enough:
            verdict = fit(sections, capacity, min(work, share))
            work -= max(1, verdict.work)
            if verdict.offsets is not None:
                offsets = verdict.offsets
                height = int((offsets + sections.need).max())
            else:
                failed = capacity
                if verdict.proved:
                    bound = capacity + 1
                    goal = max(goal, bound)
            capacity = min(max(goal, failed + (height - failed) // 2), height - 1)
        share *= 2
    return Descent(offsets, height, bound)

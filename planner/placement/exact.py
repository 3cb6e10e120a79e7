"""Exact offset search: does a problem fit into a capacity, and what is the least it fits into?

One systematic search (search.py) runs many times. Runs differ in where they decide and what they try first. Each gives
up after some failures, twice as many in every round: the times of such searches have heavy tails, which restarts cut
off (Gomes, Selman and Kautz, "Boosting combinatorial search through randomization", AAAI 1998). Runs skip what earlier
runs proved dead. A known placement guides many short runs: they try the buffers in its order, and so look for a lower
placement that is much like it (Beck, "Solution-guided multi-point constructive search for job shop scheduling", Journal
of Artificial Intelligence Research 2007). Counted work bounds all this, never a clock, so the same problem gives the
same placement anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from foreplan.planner.effort import USUAL, PlacementEffort
from foreplan.planner.placement.propagation import WORK, empty_state
from foreplan.planner.placement.search import FEWEST, FOUND, LOWEST, NARROWEST, NONE, TIGHTEST, empty_path, search
from foreplan.planner.placement.sections import Sections

_RULES = (LOWEST, FEWEST, NARROWEST, TIGHTEST)
_MOST_FAILURES = 1 << 40
_DEAD = 1 << 18  # no-goods kept


Run = tuple[int, np.ndarray, int, int]  # rule, rank, noise and failures, as the arguments of `search`


@dataclass(frozen=True)
class Verdict:
    """The result of a search for a placement within a capacity.

    Attributes:
        offsets: one a buffer, int64; None if none was found.
        proved: whether there is none.
        work: buffers and sections looked at.
    """

    offsets: np.ndarray | None
    proved: bool
    work: int


def fit(
    sections: Sections,
    capacity: int,
    work: int,
    guide: np.ndarray | None = None,
    seed: int = 0,
    effort: PlacementEffort = USUAL.placement,
) -> Verdict:
    """Look for a placement within a capacity, until about the given work is done.

    Args:
        guide: offsets, int64, of a placement that is too high; the search prefers placements that are much like it.
        seed: of the random numbers.
    """
    runs = _runs(sections, effort) if guide is None else _guided_runs(guide, effort)
    return _try(sections, capacity, work, runs, seed)


def dive(sections: Sections, capacity: int, work: int, effort: PlacementEffort) -> Verdict:
    """As `fit`, by runs that decide on the tightest section, for many buffers: few decisions are taken back."""
    return _try(sections, capacity, work, _dives(sections, effort), 0)


def _try(sections: Sections, capacity: int, work: int, runs: Iterable[Run], seed: int) -> Verdict:
    """Runs in turn, until one finds a placement, or proves that there is none, or the work is done."""
    state, path = empty_state(sections), empty_path(sections)
    if (state.least + sections.need > capacity).any():
        return Verdict(None, True, 0)
    dead = np.zeros(_DEAD, np.uint64)
    grain = int(sections.alignment.min())
    roof = -(-capacity // grain) * grain
    any_fixed = bool((sections.fixed >= 0).any())
    for rule, rank, noise, failures in runs:
        if state.scalars[WORK] >= work:
            break
        seed += 1
        outcome = search(
            sections, state, path, rank, rule, noise, seed, capacity, roof, any_fixed, dead, failures, work
        )
        if outcome == FOUND:
            return Verdict(state.least.copy(), False, int(state.scalars[WORK]))
        if outcome == NONE:
            return Verdict(None, True, int(state.scalars[WORK]))
    return Verdict(None, False, int(state.scalars[WORK]))


def _runs(sections: Sections, effort: PlacementEffort) -> Iterator[Run]:
    """Runs from nothing, without end."""
    ranks = _ranks(sections)
    failures, noise = effort.failures, 0
    while True:
        yield from ((rule, rank, noise, failures) for rule in _RULES for rank in ranks)
        failures, noise = min(2 * failures, _MOST_FAILURES), effort.noise


def _guided_runs(guide: np.ndarray, effort: PlacementEffort) -> Iterator[Run]:
    """Short runs that follow a placement, without end."""
    rank = np.argsort(np.argsort(guide, kind="stable"), kind="stable")
    while True:
        for noise in effort.guided_noise:
            for failures in effort.guided_failures:
                yield from ((rule, rank, noise, failures) for rule in _RULES)


def _dives(sections: Sections, effort: PlacementEffort) -> Iterator[Run]:
    """Runs for many buffers, without end.

    They take buffers that live long first, by their whole lives or by their lives on both sides of the highest live
    set. What lives there is piled up before all else, and the rest finds its way around. A wrong choice early on is not
    taken back soon, so later runs make some other choices (Harvey and Ginsberg, "Limited discrepancy search", IJCAI
    1995).
    """
    peak = int(sections.totals().argmax())
    life = sections.upper - sections.lower
    both = np.minimum(sections.upper - peak, peak - sections.lower)
    by_life, by_both = (np.argsort(np.lexsort((np.arange(len(life)), *keys))) for keys in ((-life,), (-life, -both)))
    yield TIGHTEST, by_life, 0, effort.dive_failures
    yield TIGHTEST, by_both, 0, effort.dive_failures
    while True:
        yield TIGHTEST, by_both, effort.dive_noise, effort.dive_failures


def _ranks(sections: Sections) -> tuple[np.ndarray, ...]:
    """Orders in which to try options, by size in the fullest sections first, by life, by area, and by size.

    The first is what MiniMalloc calls contention, see `placement.propagation`.
    """
    totals = sections.totals()
    life = sections.upper - sections.lower
    contention = np.array([totals[low:up].max() for low, up in zip(sections.lower, sections.upper)], np.int64)
    size = sections.size
    return tuple(
        np.argsort(np.lexsort((np.arange(len(size)), *keys[::-1])))
        for keys in ((-contention, -size), (-life,), (-life * size.astype(np.float64),), (-size,))
    )


@dataclass
class Descent:
    """A placement on its way down.

    Attributes:
        sections: what is placed.
        offsets: of the lowest placement known, int64.
        bound: no placement is lower.
        goal: a height that is low enough; not below `bound`.
        work: how much work is left.
        effort: all other limits.
    """

    sections: Sections
    offsets: np.ndarray
    bound: int
    goal: int
    work: int
    effort: PlacementEffort
    _tries: int = 0

    @property
    def height(self) -> int:
        """Of the placement."""
        return int((self.offsets + self.sections.need).max())

    @property
    def ended(self) -> bool:
        """Whether it is low enough, or the work done."""
        return self.work <= 0 or self.height <= self.goal

    def ask(self, capacity: int, work: int, *, guided: bool) -> bool:
        """Look for a placement within a capacity, and take it over."""
        self._tries += 1
        guide = self.offsets if guided else None
        seed = self._tries << 20 if guided else 0
        verdict = fit(self.sections, capacity, min(work, self.work), guide, seed, self.effort)
        self.work -= max(1, verdict.work)
        if verdict.offsets is not None:
            self.offsets = verdict.offsets
        elif verdict.proved:
            self.bound = capacity + 1
            self.goal = max(self.goal, self.bound)
        return verdict.offsets is not None

    def halve(self, share: int) -> None:
        """Ask for the goal, then halve the range between failure and height, until an eighth of it is left."""
        enough = max(1, (self.height - self.bound) >> 3)
        failed, capacity = self.bound - 1, self.goal
        while not self.ended and self.height - failed > enough:
            if not self.ask(capacity, share, guided=False):
                failed = capacity
            capacity = min(max(self.goal, failed + (self.height - failed) // 2), self.height - 1)

    def follow(self, share: int) -> None:
        """Ask for a little less than the height, guided by the placement, until the smallest step fails."""
        step = 0
        while not self.ended and step < len(self.effort.parts):
            height = self.height
            capacity = max(self.goal, height - max(1, (height - self.bound) // self.effort.parts[step]))
            step = 0 if self.ask(capacity, self.effort.guided_shares * share, guided=True) else step + 1


def descend(
    sections: Sections,
    offsets: np.ndarray,
    bound: int,
    goal: int,
    work: int,
    effort: PlacementEffort = USUAL.placement,
    *,
    straight: bool = False,
) -> Descent:
    """Lower a placement, in rounds that spend twice as much on a try as the one before.

    More work never gives a higher placement than less work.

    Args:
        offsets: of a placement, int64.
        bound: no placement is lower.
        goal: a height that is low enough, not below `bound`.
        work: about how much to do in all.
        effort: all other limits.
        straight: only the goal is low enough: try it at once with half of the work; stop if it is proved impossible.
    """
    descent = Descent(sections, offsets, bound, goal, work, effort)
    if straight:
        descent.ask(goal, work // 2, guided=False)
        if descent.bound > goal:
            return descent
    share = effort.first_share
    while not descent.ended:
        descent.halve(share)
        descent.follow(share)
        share *= 2
    return descent

"""Offsets: placing buffers, rectangles in time and memory, so that none that live together overlap.

Finding the lowest height is NP-hard (dynamic storage allocation: Garey and Johnson, "Computers and Intractability",
1979, SR2). No height is below the highest live set, and programs nearly always reach it. So named heuristics are tried
until one reaches it. After them comes a systematic search (exact.py), which may also prove a higher bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral
from typing import Any

import numpy as np

from foreplan.base.errors import UsageError
from foreplan.planner.effort import USUAL, PlacementEffort
from foreplan.planner.placement.orders import by_area, by_lifetime, by_size, pairs
from foreplan.planner.placement.problem import Integers, PlacementProblem, checked

_Attempt = Callable[[int, np.ndarray], tuple[int, int]]  # (limit, offsets to write) -> (height or -1, work)

RANDOM = 0x9E3779B97F4A7C15
NO_LIMIT = 1 << 62


@dataclass(frozen=True)
class Placement:
    """Where buffers lie.

    Attributes:
        offsets: one a buffer, int64; 0 for one without bytes.
        height: the highest end of any.
        lower_bound: height below which no placement goes: the highest live set, each buffer rounded up to the smallest
            alignment (all but the topmost, which need not fill its last unit), or more where the search proved it.
        heuristic: the placers that found it.
    """

    offsets: np.ndarray
    height: int
    lower_bound: int
    heuristic: str


def place(
    lower: Integers,
    upper: Integers,
    size: Integers,
    alignment: Integers | int = 1,
    fixed: Integers | None = None,
    capacity: int | None = None,
    work: int = USUAL.placement.work,
    effort: PlacementEffort = USUAL.placement,
) -> Placement:
    """Offsets for buffers, each alive in the half-open [lower, upper).

    Args:
        lower: when each buffer's bytes begin to be needed; any integers.
        upper: when they are no longer needed.
        size: bytes; 0 takes no place.
        alignment: powers of two that the offsets are multiples of, or one for all.
        fixed: offsets given beforehand, -1 for the others.
        capacity: a height that is low enough; without it, the search goes on toward the lower bound.
        work: how long to search if heuristics reach neither, in buffers and sections looked at: several hundred
            millions a second. The result depends on it, never on a clock.
        effort: all other limits.

    Raises:
        PlanError: arrays of other than whole numbers, or of unequal length, an empty life, a negative size, numbers
            beyond 2**56, or fixed buffers that overlap.
        UsageError: a capacity or work that is no whole number of at least 0.
    """
    for name, number in (("capacity", 0 if capacity is None else capacity), ("work", work)):
        if not isinstance(number, Integral) or isinstance(number, bool) or number < 0:
            raise UsageError(f"{name} must be a whole number of at least 0, got {number!r:.80}")
    capacity, work = None if capacity is None else min(int(capacity), NO_LIMIT), min(int(work), NO_LIMIT)
    return _place(checked(lower, upper, size, alignment, fixed), capacity, work, effort)


def _place(
    problem: PlacementProblem, capacity: int | None, work: int, effort: PlacementEffort, *, by_parts: bool = True
) -> Placement:
    """As `place`; `by_parts`: may place the largest buffers first if nothing else helps."""
    bound, grain = _lower_bound(problem)
    goal, ceiling = max(bound, capacity or 0), -(-bound // grain) * grain
    nothing = Placement(np.maximum(problem.fixed, 0), NO_LIMIT, bound, "nothing to place")
    if not problem.size.any():
        return replace(nothing, height=0)
    best = _by_heuristics(problem, nothing, goal, ceiling, effort)
    if best.height <= goal:
        return best
    if len(problem.size) > effort.skyline:
        return _mended(problem, best, max(goal, ceiling), work, effort) if work else best
    if (problem.fixed >= 0).any():
        return _search(problem, best, capacity, work, effort)
    return _by_core(problem, best, capacity, max(goal, ceiling), work, effort, by_parts)


def _by_heuristics(
    problem: PlacementProblem, best: Placement, goal: int, ceiling: int, effort: PlacementEffort
) -> Placement:
    """The best placement of the named placers, which run until one reaches the goal."""
    trial = np.zeros_like(best.offsets)
    for name, attempt in _attempts(problem, ceiling, effort):
        found, _ = attempt(best.height, trial)
        if 0 <= found < best.height:
            best = Placement(trial.copy(), int(found), best.lower_bound, name)
            if best.height <= goal:
                break
    return best


def _by_core(
    problem: PlacementProblem,
    best: Placement,
    capacity: int | None,
    goal: int,
    work: int,
    effort: PlacementEffort,
    by_parts: bool,
) -> Placement:
    """Search longer for the core, then place the others: they find a place within its height, or within the goal."""
    from foreplan.planner.placement.core import outside_core
    from foreplan.planner.placement.dives import dives

    others = outside_core(problem.lower, problem.upper, problem.size, problem.alignment, goal)
    if not len(others):  # all buffers hinder one another, and ejection seldom succeeds
        return _at_length(problem, best, capacity, goal, work, effort, (), by_parts=False)
    core = np.delete(np.arange(len(problem.size)), others)
    inner = problem.some(core)
    if not len(core):
        nothing = Placement(best.offsets[core], 0, best.lower_bound, "each where there is room")
        return min(best, _around(problem, core, nothing, others), key=_height)
    piled = dives(inner, goal, effort) if work and by_parts and best.height > goal else None
    if piled is not None:
        return _around(problem, core, Placement(piled, goal, best.lower_bound, "dives"), others)
    offsets = best.offsets[core]
    height = int((offsets + inner.size).max(initial=0))
    start = _by_heuristics(inner, Placement(offsets, height, best.lower_bound, best.heuristic), goal, goal, effort)
    shares = effort.ejections if by_parts else effort.ejections_of_parts
    placed = _at_length(inner, start, capacity, goal, work, effort, shares, by_parts=by_parts)
    found = _around(problem, core, placed, others)
    return min(found, replace(best, lower_bound=found.lower_bound), key=_height)


def _at_length(
    problem: PlacementProblem,
    best: Placement,
    capacity: int | None,
    goal: int,
    work: int,
    effort: PlacementEffort,
    shares: Sequence[int],
    *,
    by_parts: bool,
) -> Placement:
    """Searches that take longer than the named placers, until one reaches the goal."""
    if work and len(problem.size) <= effort.few and best.height > goal:
        return _search(problem, best, capacity, work, effort)
    few_stick_out = best.height - goal <= goal >> 3
    searched = capacity is not None and len(problem.size) <= effort.searched  # for a capacity, `_search` is faster
    if best.height > goal and few_stick_out and not searched:
        best = _shaken(problem, best, goal, effort)
    if best.height > goal and capacity is None and work:
        best = _by_ejection(problem, best, goal, effort, shares)
    if best.height > goal and capacity is None and work and by_parts:
        best = _largest_first(problem, best, goal, effort)
    if best.height <= goal or not work:
        return best
    if len(problem.size) > effort.searched:
        return _mended(problem, best, goal, work, effort)
    found = _search(problem, best, capacity, work, effort)
    if capacity is not None or found.height <= max(goal, found.lower_bound):
        return found
    lowered = _mended(problem, best, goal, work // 4, effort)
    return min(found, replace(lowered, lower_bound=found.lower_bound), key=_height)


def _height(placement: Placement) -> int:
    return placement.height


def _around(problem: PlacementProblem, some: np.ndarray, placed: Placement, others: np.ndarray) -> Placement:
    """Some buffers stay where they are placed; the others, in this order, fill the gaps."""
    fixed = np.full(len(problem.size), -1)
    fixed[some] = placed.offsets
    offsets = np.zeros(len(fixed), np.int64)
    height, _ = _greedy(replace(problem, fixed=fixed), np.concatenate([some, others]), False, NO_LIMIT, offsets)
    return Placement(offsets, int(height), placed.lower_bound, placed.heuristic)


def _search(
    problem: PlacementProblem, best: Placement, capacity: int | None, work: int, effort: PlacementEffort
) -> Placement:
    """The systematic search: for a capacity, if it is possible at all; without one, as low as it gets."""
    from foreplan.planner.placement.exact import descend
    from foreplan.planner.placement.sections import sections_of

    if not work or len(problem.size) > effort.searched or (capacity is not None and capacity < best.lower_bound):
        return best
    given = np.flatnonzero(problem.size)
    some = problem.some(given)
    sections = sections_of(some.lower, some.upper, some.size, some.alignment, some.fixed)
    goal = best.lower_bound if capacity is None else capacity
    straight = capacity is not None
    descent = descend(sections, best.offsets[given], best.lower_bound, goal, work, effort, straight=straight)
    offsets = best.offsets.copy()
    offsets[given] = descent.offsets
    name = best.heuristic if descent.height == best.height else "systematic search"
    return Placement(offsets, descent.height, descent.bound, name)


def _by_ejection(
    problem: PlacementProblem, best: Placement, goal: int, effort: PlacementEffort, shares: Sequence[int]
) -> Placement:
    """Runs of the ejection search, each from another start: for the goal, and then between it and the best height."""
    from foreplan.planner.placement.ejection import eject
    from foreplan.planner.placement.sections import together

    if len(problem.size) > effort.ejected:
        return best
    grain = int(problem.alignment.min())
    size = -(-problem.size // grain) * grain
    neighbours = together(problem.lower, problem.upper)
    most = effort.ejection + effort.ejection_pair * len(neighbours[1])
    ranks = [np.argsort(order) for order in (by_size(problem), by_area(problem), by_lifetime(problem))]
    failed, capacity, run = goal - grain, goal, 0
    for share in shares:
        done = 0
        while done < share:
            kept = run % 4 == 3  # start from the best, as far as it lies within the capacity
            offsets = np.where(best.offsets + size > capacity, -1, best.offsets) if kept else np.full_like(size, -1)
            arrays = (*neighbours, size, problem.alignment)
            random = np.uint64((run + 1) * RANDOM % 2**64)
            left, work = eject(ranks[run % 3], run % 2 == 1, *arrays, capacity, most, random, offsets)
            done += work
            run += 1
            if not left:
                height = int((offsets + problem.size).max())
                best = Placement(offsets, height, best.lower_bound, "ejection")
                break
        else:
            failed = capacity
        capacity = failed + (best.height - failed) // 2 // grain * grain
        if best.height <= goal or capacity <= failed:
            break
    return best


def _mended(problem: PlacementProblem, best: Placement, goal: int, work: int, effort: PlacementEffort) -> Placement:
    """The placement lowered by chains of ejection, at least for the work that the effort names.

    For many buffers, the mending begins with a placement from the busiest stretches of time outward, if that is lower.
    """
    from foreplan.planner.placement.mending import mended
    from foreplan.planner.placement.stretches import outward

    def push(some: PlacementProblem, order: np.ndarray, offsets: np.ndarray) -> int:
        return _greedy(some, order, False, NO_LIMIT, offsets)[1]

    def first(some: PlacementProblem) -> np.ndarray:
        nothing = Placement(np.zeros_like(some.size), NO_LIMIT, best.lower_bound, "nothing placed")
        return _by_heuristics(some, nothing, goal, goal, effort).offsets

    given = np.flatnonzero(problem.size)
    if (problem.fixed >= 0).any():
        return best
    some, start = problem.some(given), best.offsets[given]
    least = effort.mending if len(given) <= effort.skyline else effort.mending_large
    outwards = outward(some, best.height, goal, effort, first, push) if len(given) > effort.searched else None
    if outwards is not None:
        start, least = outwards, effort.mending
    offsets = best.offsets.copy()
    offsets[given] = mended(some, start, goal, pairs(some), max(work, least), effort, push)
    height = int((offsets + problem.size).max())
    return Placement(offsets, height, best.lower_bound, "chains of ejection") if height < best.height else best


def _largest_first(problem: PlacementProblem, best: Placement, goal: int, effort: PlacementEffort) -> Placement:
    """Place the largest buffers alone, as many as can be searched; then the others fill the gaps."""
    order = by_size(problem)
    for count in effort.largest if len(order) > effort.searched else effort.fewer:
        if best.height <= goal or count >= len(order):
            break
        some = order[:count]
        placed = _place(problem.some(some), None, effort.parts_work, effort, by_parts=False)
        if placed.height >= best.height:
            continue
        fixed = np.full(len(order), -1)
        fixed[some] = placed.offsets
        found = _place(replace(problem, fixed=fixed), None, 0, effort, by_parts=False)
        if found.height < best.height:
            name = f"{count} largest: {placed.heuristic}; others: {found.heuristic}"
            best = Placement(found.offsets, found.height, best.lower_bound, name)
    return best


def _lower_bound(problem: PlacementProblem) -> tuple[int, int]:
    """The bound of `Placement.lower_bound`, and the smallest alignment."""
    some = problem.size > 0
    if not some.any():
        return 0, 1
    grain = int(problem.alignment[some].min())
    rounded = -(-problem.size // grain) * grain
    _, live, *_ = replace(problem, size=rounded).live()
    slack = int((rounded - problem.size)[some].max())
    fixed_top = int((np.maximum(problem.fixed, 0) + problem.size)[some & (problem.fixed >= 0)].max(initial=0))
    return max(int(live.max()) - slack, int(np.max(problem.size)), fixed_top), grain


def _kernels() -> Any:
    """The compiled loops; importing them loads LLVM, so only a placement does it."""
    from foreplan.planner.placement import placers

    return placers


def _attempts(problem: PlacementProblem, ceiling: int, effort: PlacementEffort) -> Iterator[tuple[str, _Attempt]]:
    """Placers by name: first those that are likely to succeed in a short time."""
    n = len(problem.size)
    if not (problem.fixed >= 0).any():
        yield from _online(problem, ceiling)
    if n > effort.quadratic:
        if (problem.fixed >= 0).any() or pairs(problem) <= effort.pairs:
            yield "greedy by size, first fit", partial(_greedy, problem, by_size(problem), False)
        return
    orders = {"size": by_size(problem), "area": by_area(problem), "lifetime": by_lifetime(problem)}
    for best_fit in (False, True):
        for name, order in orders.items():
            fit = "best" if best_fit else "first"
            yield f"greedy by {name}, {fit} fit", partial(_greedy, problem, order, best_fit)
    if n <= effort.skyline and not (problem.fixed >= 0).any():
        yield from _skyline(problem, orders)


def _greedy(
    problem: PlacementProblem, order: np.ndarray, best_fit: bool, limit: int, offsets: np.ndarray
) -> tuple[int, int]:
    kernels = _kernels()
    arrays = (problem.lower, problem.upper, problem.size, problem.alignment, problem.fixed)
    return kernels.greedy(order, *arrays, best_fit, limit, offsets)


def _online(problem: PlacementProblem, ceiling: int) -> Iterator[tuple[str, _Attempt]]:
    """A free list, forward and backward in time: backward, lives that end last are placed first, so nested lives stack.
    For free lists, best fit and first fit see Knuth, "The Art of Computer Programming" 1, section 2.5."""
    kernels = _kernels()
    lives = np.sort(problem.upper - problem.lower)
    short = int(lives[len(lives) // 2])
    n = np.arange(len(problem.size))
    backward = PlacementProblem(-problem.upper, -problem.lower, problem.size, problem.alignment, problem.fixed)
    for best_fit, top, longest in ((True, 0, 0), (False, 0, 0), (True, ceiling, 2), (True, ceiling, short)):
        for direction, view in (("forward", problem), ("backward", backward)):
            births = np.lexsort((n, -view.size, view.lower))
            deaths = np.lexsort((n, view.upper))
            arrays = (view.lower, view.upper, view.size, view.alignment)
            name = f"online {direction}, {'best' if best_fit else 'first'} fit"
            name += f", lives up to {longest} from the top" if top else ""

            def run(
                limit: int,
                offsets: np.ndarray,
                arguments: tuple = (births, deaths, *arrays, best_fit, longest, top),
            ) -> tuple[int, int]:
                return kernels.online(*arguments, limit, offsets)

            yield name, run


def _shaken(problem: PlacementProblem, best: Placement, goal: int, effort: PlacementEffort) -> Placement:
    """Skylines by orders that are changed a little, again and again, until one reaches the goal or the work is done.

    Where few buffers stick out, a few exchanges in an order often change the height. Half of the tries change one of
    the first orders; the other half go on from the last order that was no higher.
    """
    kernels = _kernels()
    first = (by_area(problem), by_lifetime(problem))
    orders = [*first, *(order.copy() for order in first)]
    heights = [NO_LIMIT] * len(orders)
    lower, upper, births = _ranked(problem)
    rank = np.empty(len(births), np.int64)
    offsets = np.zeros(len(births), np.int64)  # the skyline does not write those of empty buffers
    random, done, tries = np.uint64(1), 0, 0
    while done < effort.shaking and best.height > goal:
        which, turn = tries % len(orders), tries // len(orders)
        few = (1, 2, 3, 1 + len(births) // 16)[turn % 4]
        goes_on = which >= len(first)
        random = np.uint64(
            kernels.shake(orders[which], few if goes_on else 1 + turn % 5 * len(births) // 16, random, rank)
        )
        arrays = (rank, births, lower, upper, problem.size, problem.alignment)
        found, work = kernels.skyline(*arrays, heights[which] + 1 if goes_on else best.height, offsets)
        if found >= 0 and goes_on:
            heights[which] = int(found)
            orders[which][rank] = np.arange(len(births))
        if 0 <= found < best.height:
            best = Placement(offsets.copy(), int(found), best.lower_bound, "skyline by a shaken order")
        done += work + len(births) + effort.shake
        tries += 1
    return best


def _ranked(problem: PlacementProblem) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lives over ranks of time, and the buffers by birth, as `placers.skyline` takes them."""
    times = np.unique(np.concatenate([problem.lower, problem.upper]))
    lower, upper = np.searchsorted(times, problem.lower), np.searchsorted(times, problem.upper)
    return lower, upper, np.argsort(lower, kind="stable")


def _skyline(problem: PlacementProblem, orders: dict[str, np.ndarray]) -> Iterator[tuple[str, _Attempt]]:
    """Best fit on the skyline: Burke, Kendall and Whitwell, "A new placement heuristic for the orthogonal
    stock-cutting problem", Operations Research 2004; for memory Sekiyama et al., arXiv 1804.10001."""
    kernels = _kernels()
    lower, upper, births = _ranked(problem)
    for name in ("lifetime", "area", "size"):
        rank = np.empty(len(births), np.int64)
        rank[orders[name]] = np.arange(len(births))

        def run(limit: int, offsets: np.ndarray, rank: np.ndarray = rank) -> tuple[int, int]:
            return kernels.skyline(rank, births, lower, upper, problem.size, problem.alignment, limit, offsets)

        yield f"skyline by {name}", run

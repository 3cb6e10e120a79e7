"""Constraint propagation: the least offset of every buffer that is not placed yet, as it follows from those that are.

The state is a skyline: buffers are placed from below, each on top of the placed ones, and all others go above. The
search only looks at placements in which no buffer can be pushed down: each rests on another one, on a fixed one, or on
0, rounded up to its alignment. Pushing down turns every placement into such a placement that is no higher ("canonical"
in Moffitt, "MiniMalloc: A Lightweight Memory Allocator for Hardware-Accelerated Machine Learning", ASPLOS 2023). Three
rules raise least offsets until nothing changes, or a buffer does not fit below the capacity:

- pile: in a section, buffers that start at some height or above must fit between it and the capacity, and buffers that
  cannot end below a buffer must fit above it (edge finding on one machine: Carlier and Pinson, "An algorithm for
  solving the job-shop problem", Management Science 1989);
- rest: a buffer above the skyline rests on others that are not placed, and the last of them rests on the skyline;
- twins: of two buffers that may be exchanged, the second lies above the first.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from foreplan import jit
from foreplan.planner.placement.sections import Sections

NOWHERE = 1 << 62
TOP, MARK, WORK, FROM, TO = range(5)  # entries of State.scalars

# A round of inference ends after this many visits for each section, since further steps are tiny. It is a constant of
# the compiled code, not a field of an effort: it guards against inference without end.
VISITS = 1000


class State(NamedTuple):
    """A partial placement, with the changes to undo when it is taken back.

    Attributes:
        least: least offset of each buffer; its offset if placed.
        rest: highest end of the placed buffers that live with it.
        placed: whether each buffer is placed.
        left: bytes not placed, by section.
        floor: the least offset of any buffer not placed, by section; right where not `stale`.
        choices: how many buffers have that least offset, by section; likewise.
        crossing: whether a buffer not placed also lives in the section before; likewise.
        stale: sections in which something has changed since.
        dirty: sections in which something has changed since the last inference.
        peak: the highest least offset in a section, or more.
        trail: buffers whose entries changed, with `trail_least` and `trail_rest` from before.
        marked: the decision (scalars[MARK]) at which each buffer was last put on the trail.
        scalars: length of the trail; number of the decision; work done; first and last dirty section.
        here, waiting, hope: scratch.
    """

    least: np.ndarray
    rest: np.ndarray
    placed: np.ndarray
    left: np.ndarray
    floor: np.ndarray
    choices: np.ndarray
    crossing: np.ndarray
    stale: np.ndarray
    dirty: np.ndarray
    peak: np.ndarray
    trail: np.ndarray
    trail_least: np.ndarray
    trail_rest: np.ndarray
    marked: np.ndarray
    scalars: np.ndarray
    here: np.ndarray
    waiting: np.ndarray
    hope: np.ndarray


def empty_state(sections: Sections) -> State:
    """Nothing is placed, and every section has to be looked at."""
    n, count = len(sections.size), len(sections.cover_first) - 1
    trail = 200 * n + 100_000
    least = np.maximum(sections.fixed, 0)
    for i in np.flatnonzero(sections.twin >= 0):  # ascending, and so are twins
        grain = sections.alignment[i]
        least[sections.twin[i]] = -(-(least[i] + sections.size[i]) // grain) * grain
    return State(
        least=least,
        rest=np.zeros(n, np.int64),
        placed=np.zeros(n, np.bool_),
        left=sections.totals(),
        floor=np.zeros(count, np.int64),
        choices=np.zeros(count, np.int64),
        crossing=np.zeros(count + 1, np.bool_),
        stale=np.ones(count, np.bool_),
        dirty=np.ones(count, np.bool_),
        peak=np.full(count, NOWHERE, np.int64),
        trail=np.empty(trail, np.int64),
        trail_least=np.empty(trail, np.int64),
        trail_rest=np.empty(trail, np.int64),
        marked=np.full(n, -1, np.int64),
        scalars=np.array([0, 0, 0, 0, count], np.int64),
        here=np.empty(n, np.int64),
        waiting=np.empty(n, np.int64),
        hope=np.empty(n, np.int64),
    )


@jit.compiled
def align(offset, alignment):  # type: ignore[no-untyped-def]
    """The multiple of a power of two at or above an offset."""
    return (offset + alignment - 1) & ~(alignment - 1)


@jit.compiled
def put(sections, state, i, capacity):  # type: ignore[no-untyped-def]
    """Place a buffer at its least offset; False if that moves a fixed one, or one above the capacity."""
    scalars = state.scalars
    fits = True
    low, high = sections.lower[i], sections.upper[i]
    end = state.least[i] + sections.size[i]
    state.placed[i] = True
    for s in range(low, high):
        state.left[s] -= sections.size[i]
        state.dirty[s] = True
        state.stale[s] = True
    for k in range(sections.near_first[i], sections.near_first[i + 1]):
        j = sections.near[k]
        if state.placed[j] or state.rest[j] >= end:
            continue
        if state.marked[j] != scalars[MARK]:
            top = scalars[TOP]
            state.trail[top], state.trail_least[top], state.trail_rest[top] = j, state.least[j], state.rest[j]
            scalars[TOP] = top + 1
            state.marked[j] = scalars[MARK]
        state.rest[j] = end
        least = align(end, sections.alignment[j])
        if least > state.least[j]:
            fits = fits and sections.fixed[j] < 0 and least + sections.need[j] <= capacity
            state.least[j] = least
            low, high = min(low, sections.lower[j]), max(high, sections.upper[j])
            for s in range(sections.lower[j], sections.upper[j]):
                state.dirty[s] = True
                state.stale[s] = True
                state.peak[s] = max(state.peak[s], least)
            scalars[WORK] += sections.upper[j] - sections.lower[j]
    scalars[FROM], scalars[TO] = min(scalars[FROM], low), max(scalars[TO], high)
    scalars[WORK] += sections.near_first[i + 1] - sections.near_first[i]
    return fits


@jit.compiled
def bump(sections, state, i, least, capacity):  # type: ignore[no-untyped-def]
    """Raise a buffer's least offset, and its twins'; False if one is fixed, or then ends above the capacity."""
    scalars = state.scalars
    while least + sections.need[i] <= capacity and sections.fixed[i] < 0:
        if state.marked[i] != scalars[MARK]:
            top = scalars[TOP]
            state.trail[top], state.trail_least[top], state.trail_rest[top] = i, state.least[i], state.rest[i]
            scalars[TOP] = top + 1
            state.marked[i] = scalars[MARK]
        state.least[i] = least
        for s in range(sections.lower[i], sections.upper[i]):
            state.dirty[s] = True
            state.stale[s] = True
            state.peak[s] = max(state.peak[s], least)
        scalars[FROM] = min(scalars[FROM], sections.lower[i])
        scalars[TO] = max(scalars[TO], sections.upper[i])
        scalars[WORK] += sections.upper[i] - sections.lower[i]
        end = least + sections.size[i]
        i = sections.twin[i]
        if i < 0 or state.placed[i] or state.least[i] >= end:
            return True
        least = align(end, sections.alignment[i])
    return False


@jit.compiled
def undo(sections, state, i, top):  # type: ignore[no-untyped-def]
    """Take back a decision: the buffer it placed, or -1, and all entries of the trail from `top` on."""
    while state.scalars[TOP] > top:
        state.scalars[TOP] -= 1
        k = state.scalars[TOP]
        j = state.trail[k]
        if state.least[j] != state.trail_least[k]:
            for s in range(sections.lower[j], sections.upper[j]):
                state.stale[s] = True
        state.least[j] = state.trail_least[k]
        state.rest[j] = state.trail_rest[k]
    if i >= 0:
        state.placed[i] = False
        for s in range(sections.lower[i], sections.upper[i]):
            state.left[s] += sections.size[i]
            state.stale[s] = True
            state.peak[s] = max(state.peak[s], state.least[i])


@jit.compiled
def _above(size, alignment, least_of, here, i, base, roof):  # type: ignore[no-untyped-def]
    """The least offset of a buffer in a pile, the buffers `here`, or NOWHERE.

    Buffers that cannot end below it must fit above it. So its offset is at most `base` plus the bytes that can end
    below.
    """
    least = least_of[i]
    below = np.int64(0)
    above = np.int64(0)
    for j in here:
        if least_of[j] >= least:
            above += size[j]
        elif least_of[j] + size[j] <= least:
            below += size[j]
    if least + above > roof:
        return np.int64(NOWHERE)
    while least - below > base:
        following = np.int64(NOWHERE)
        for j in here:
            end = least_of[j] + size[j]
            if least < end < following and j != i:
                following = end
        if following == NOWHERE:
            return following
        least = align(following, alignment[i])
        below = np.int64(0)
        for j in here:
            if least_of[j] + size[j] <= least and j != i:
                below += size[j]
    return least


@jit.compiled
def _clear(sections, state, i, least, count):  # type: ignore[no-untyped-def]
    """The least offset of a buffer at or above `least` between the fixed ones in its pile that are not placed."""
    moved = True
    while moved:
        moved = False
        for k in range(count):
            j = state.here[k]
            at = sections.fixed[j]
            if at >= 0 and least + sections.size[i] > at and least < at + sections.size[j]:
                least = align(at + sections.size[j], sections.alignment[i])
                moved = True
        state.scalars[WORK] += count
    return least


@jit.compiled
def _pile(sections, state, s, capacity, roof, any_fixed):  # type: ignore[no-untyped-def]
    """The rule of piles for one section; False if it does not fit."""
    base = roof - state.left[s]
    if state.peak[s] <= base and not any_fixed:
        return True
    count = 0
    peak = np.int64(0)
    for k in range(sections.cover_first[s], sections.cover_first[s + 1]):
        i = sections.cover[k]
        if not state.placed[i]:
            state.here[count] = i
            count += 1
            peak = max(peak, state.least[i])
    state.peak[s] = peak
    state.scalars[WORK] += sections.cover_first[s + 1] - sections.cover_first[s]
    if count and base < 0:
        return False
    if peak <= base and not any_fixed:
        return True
    for k in range(count):
        i = state.here[k]
        least = state.least[i]
        if least > base:
            least = _above(sections.size, sections.alignment, state.least, state.here[:count], i, base, roof)
            state.scalars[WORK] += 2 * count
            if least == NOWHERE:
                return False
        if any_fixed and sections.fixed[i] < 0:
            least = _clear(sections, state, i, least, count)
        if least > state.least[i] and not bump(sections, state, i, least, capacity):
            return False
    return True


@jit.compiled
def _rest(sections, state, capacity):  # type: ignore[no-untyped-def]
    """The rule of rest for all buffers, by Dijkstra's algorithm from those that rest on the skyline."""
    count = 0
    for i in range(sections.size.size):
        if not state.placed[i]:
            rests = sections.fixed[i] >= 0 or state.least[i] <= align(state.rest[i], sections.alignment[i])
            state.hope[i] = 0 if rests else NOWHERE
            if not rests:
                state.waiting[count] = i
                count += 1
    state.scalars[WORK] += sections.size.size
    for x in range(count):
        i = state.waiting[x]
        lowest = np.int64(NOWHERE)
        for k in range(sections.near_first[i], sections.near_first[i + 1]):
            j = sections.near[k]
            if not state.placed[j] and state.hope[j] == 0:
                lowest = min(lowest, state.least[j] + sections.size[j])
        state.scalars[WORK] += sections.near_first[i + 1] - sections.near_first[i]
        if lowest < NOWHERE:
            state.hope[i] = max(state.least[i], align(lowest, sections.alignment[i]))
    while count:
        lowest_at = 0
        for k in range(1, count):
            if state.hope[state.waiting[k]] < state.hope[state.waiting[lowest_at]]:
                lowest_at = k
        i = state.waiting[lowest_at]
        count -= 1
        state.waiting[lowest_at] = state.waiting[count]
        found = state.hope[i]
        if found == NOWHERE or (found > state.least[i] and not bump(sections, state, i, found, capacity)):
            return False
        for k in range(count):
            j = state.waiting[k]
            if sections.lower[i] < sections.upper[j] and sections.lower[j] < sections.upper[i]:
                end = align(found + sections.size[i], sections.alignment[j])
                state.hope[j] = min(state.hope[j], max(state.least[j], end))
        state.scalars[WORK] += 2 * count
    return True


@jit.compiled
def infer(sections, state, capacity, roof, any_fixed):  # type: ignore[no-untyped-def]
    """Apply all rules until nothing changes; False if the remaining buffers cannot be placed.

    Args:
        roof: the capacity rounded up to the smallest alignment, as rounded sizes are.
        any_fixed: whether any buffer is fixed.
    """
    scalars = state.scalars
    fits = True
    visits = VISITS * state.dirty.size
    while fits and visits > 0 and scalars[FROM] < scalars[TO]:
        while fits and visits > 0 and scalars[FROM] < scalars[TO]:
            s = scalars[FROM]
            scalars[FROM] = s + 1
            if state.dirty[s]:
                state.dirty[s] = False
                visits -= 1
                fits = _pile(sections, state, s, capacity, roof, any_fixed)
        fits = fits and _rest(sections, state, capacity)
    if not fits or visits <= 0:
        state.dirty[:] = False
    scalars[FROM] = state.dirty.size
    scalars[TO] = 0
    return fits

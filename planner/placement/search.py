"""Systematic search for a placement within a capacity. All of it is compiled.

The floor of a section is the least offset that any buffer not placed may have. A node takes a valley of the floors, and
a section in it. Either one of the buffers that may lie on the floor lies there, or none does: then all their least
offsets rise. These options exclude each other, so no placement is met twice. An exhausted node is dead, whatever lies
below it. So its least offsets are remembered ("no-goods") as long as the capacity stays the same.

Buffers that are not placed fall into groups that have no time in common, and nodes of one group have no effect on
another: when a group has no placement, the search goes back to the last decision that touched it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from foreplan import jit
from foreplan.planner.placement.propagation import MARK, NOWHERE, TOP, WORK, align, bump, infer, put, undo
from foreplan.planner.placement.sections import Sections

FOUND, NONE, OPEN = 1, 0, -1  # outcomes of `search`

# Which valley to take; of equal ones, the one with the fewest options.
LOWEST, FEWEST, NARROWEST, TIGHTEST = range(4)

_DEPTH = 8  # nodes on the way down, for each buffer


class Path(NamedTuple):
    """The nodes from the root to the current one, one entry each.

    Attributes:
        low: first section of the node's group.
        high: the section after its last.
        key: of the group's state, for the no-goods.
        trail: length of the trail when the current option was taken, or -1.
        first: where the node's options begin in `options`.
        next: the option to take next; the last option is that none of them lies on the floor.
        taken: the buffer that the current option placed, or -1.
        options: buffers.
    """

    low: np.ndarray
    high: np.ndarray
    key: np.ndarray
    trail: np.ndarray
    first: np.ndarray
    next: np.ndarray
    taken: np.ndarray
    options: np.ndarray


def empty_path(sections: Sections) -> Path:
    """Room for the nodes that a search of these sections may have open at once."""
    n = len(sections.size)
    depth = _DEPTH * n + 16
    columns = {name: np.zeros(depth + 1, np.uint64 if name == "key" else np.int64) for name in Path._fields}
    return Path(**columns | {"options": np.zeros(64 * depth + n, np.int64)})


@jit.compiled
def _survey(sections, state):  # type: ignore[no-untyped-def]
    """Bring floors, choices and crossings up to date."""
    for s in range(state.floor.size):
        if not state.stale[s]:
            continue
        state.stale[s] = False
        state.crossing[s] = False
        floor = np.int64(NOWHERE)
        choices = 0
        for k in range(sections.cover_first[s], sections.cover_first[s + 1]):
            i = sections.cover[k]
            if not state.placed[i]:
                if state.least[i] < floor:
                    floor = state.least[i]
                    choices = 0
                choices += state.least[i] == floor
                state.crossing[s] |= sections.lower[i] < s
        state.scalars[WORK] += sections.cover_first[s + 1] - sections.cover_first[s]
        state.floor[s] = floor
        state.choices[s] = choices


@jit.compiled
def _choose(state, roof, rule):  # type: ignore[no-untyped-def]
    """The section to decide on, in some valley; -1 if all is placed."""
    count = state.floor.size
    best = -1
    best_first = best_second = np.int64(NOWHERE)
    low = 0
    while low < count:
        level = state.floor[low]
        high = low + 1
        while high < count and state.floor[high] == level:
            high += 1
        before = state.floor[low - 1] if low else NOWHERE
        after = state.floor[high] if high < count else NOWHERE
        if level < before and level < after:
            for s in range(low, high):
                slack = roof - state.left[s] - level
                if rule == LOWEST:
                    first, second = level, state.choices[s]
                elif rule == FEWEST:
                    first, second = state.choices[s] + (slack > 0), level
                elif rule == NARROWEST:
                    first, second = np.int64(high - low), state.choices[s]
                else:
                    first, second = slack, state.choices[s]
                if first < best_first or (first == best_first and second < best_second):
                    best, best_first, best_second = s, first, second
        low = high
    state.scalars[WORK] += count
    return best


@jit.compiled
def _mix(x):  # type: ignore[no-untyped-def]
    """The finalizer of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@jit.compiled
def _key(sections, state, low, high):  # type: ignore[no-untyped-def]
    """A hash of all that the group's future depends on: least offsets, and who rests on the skyline."""
    key = np.uint64(0x9E3779B97F4A7C15)
    for s in range(low, high):
        for k in range(sections.cover_first[s], sections.cover_first[s + 1]):
            i = sections.cover[k]
            if sections.lower[i] == s and not state.placed[i]:
                x = np.uint64(state.least[i]) * np.uint64(2)
                if state.least[i] == align(state.rest[i], sections.alignment[i]):
                    x += np.uint64(1)
                key += _mix(_mix(np.uint64(i + 1) * np.uint64(0x9E3779B97F4A7C15)) + x)
        state.scalars[WORK] += sections.cover_first[s + 1] - sections.cover_first[s]
    return key


@jit.compiled
def _open(sections, state, path, depth, s, rank, random, noise):  # type: ignore[no-untyped-def]
    """List a node's options by rank, sometimes with two exchanged; returns the next random number."""
    first = path.first[depth]
    end = first
    for k in range(sections.cover_first[s], sections.cover_first[s + 1]):
        i = sections.cover[k]
        if state.placed[i] or state.least[i] != state.floor[s]:
            continue
        if sections.fixed[i] >= 0:  # nothing else can lie there
            path.options[first] = i
            end = first + 1
            break
        at = end
        while at > first and rank[path.options[at - 1]] > rank[i]:
            path.options[at] = path.options[at - 1]
            at -= 1
        path.options[at] = i
        end += 1
    for k in range(first, end - 1):
        random ^= random << np.uint64(13)
        random ^= random >> np.uint64(7)
        random ^= random << np.uint64(17)
        if np.int64(random >> np.uint64(40)) % 1000 < noise:
            other = k + 1 + np.int64(random >> np.uint64(20) & np.uint64(0xFFFF)) % (end - k - 1)
            path.options[k], path.options[other] = path.options[other], path.options[k]
    path.first[depth + 1] = end
    path.next[depth] = first
    path.trail[depth] = -1
    path.taken[depth] = -1
    return random


@jit.compiled
def _retract(sections, state, path, depth):  # type: ignore[no-untyped-def]
    """Take back the current option of a node, if any is taken."""
    if path.trail[depth] >= 0:
        undo(sections, state, path.taken[depth], path.trail[depth])
        path.trail[depth] = -1
        path.taken[depth] = -1


@jit.compiled
def _return(sections, state, path, depth, low, high):  # type: ignore[no-untyped-def]
    """Leave all nodes that have no effect on the group [low, high); returns the depth of the last that has."""
    while depth >= 0 and (low < path.low[depth] or path.high[depth] < high):
        _retract(sections, state, path, depth)
        depth -= 1
    return depth


@jit.compiled
def _advance(sections, state, path, depth, capacity, roof, any_fixed):  # type: ignore[no-untyped-def]
    """Take a node's next option; False if nothing can follow from it."""
    k = path.next[depth]
    end = path.first[depth + 1]
    path.next[depth] = k + 1
    path.trail[depth] = state.scalars[TOP]
    state.scalars[MARK] += 1
    if k < end:
        path.taken[depth] = path.options[k]
        fits = put(sections, state, path.options[k], capacity)
    else:
        fits = True
        floor = state.least[path.options[end - 1]]
        for x in range(path.first[depth], end):
            i = path.options[x]
            if state.least[i] == floor:  # else its twin has raised it
                fits = fits and bump(sections, state, i, floor + 1, capacity)
    return infer(sections, state, capacity, roof, any_fixed) and fits


@jit.compiled
def _next_live(sections, state, path, depth, capacity, roof, any_fixed, dead, failures, budget):  # type: ignore[no-untyped-def]
    """Go on at the deepest node with an option left that may lead somewhere.

    Returns:
        Its depth, -1 if there is none, or -2 if there were too many failures; and the failures left.
    """
    while depth >= 0:
        _retract(sections, state, path, depth)
        if path.next[depth] > path.first[depth + 1]:
            dead[np.int64(path.key[depth] & np.uint64(dead.size - 1))] = path.key[depth]
            depth = _return(sections, state, path, depth - 1, path.low[depth], path.high[depth])
            continue
        if _advance(sections, state, path, depth, capacity, roof, any_fixed):
            return depth, failures
        failures -= 1
        if failures < 0 or state.scalars[WORK] > budget:
            _return(sections, state, path, depth, -1, -1)
            return -2, failures
    return -1, failures


@jit.compiled
def search(sections, state, path, rank, rule, noise, seed, capacity, roof, any_fixed, dead, failures, budget):  # type: ignore[no-untyped-def]
    """Look for a placement of what `state` has not placed, depth first.

    Args:
        rank: of each buffer; a node takes options of low rank first.
        rule: LOWEST, FEWEST, NARROWEST or TIGHTEST: the valley to decide on.
        noise: exchange an option with a later one this often in a thousand times.
        seed: of the random numbers for `noise`, not 0; the generator is xorshift (Marsaglia, J. Statistical Software
            2003).
        roof: the capacity rounded up to the smallest alignment.
        any_fixed: whether any buffer is fixed.
        dead: keys of groups without a placement within this capacity, an array of a power of two; updated.
        failures: give up after this many options that led nowhere.
        budget: give up when the state's work exceeds this.

    Returns:
        FOUND, with offsets in `state.least`; NONE, if there is no placement; or OPEN, if it gave up. After NONE
        and OPEN, nothing is placed in `state`.
    """
    if not infer(sections, state, capacity, roof, any_fixed):
        return NONE
    random = _mix(np.uint64(seed))
    room = path.options.size - sections.size.size
    depth = -1
    while True:
        _survey(sections, state)
        s = _choose(state, roof, rule)
        if s < 0:
            return FOUND
        low, high = s, s + 1
        while state.crossing[low]:
            low -= 1
        while high < state.floor.size and state.crossing[high]:
            high += 1
        key = _key(sections, state, low, high)
        if dead[np.int64(key & np.uint64(dead.size - 1))] == key:
            depth = _return(sections, state, path, depth, low, high)
        else:
            depth += 1
            full = state.scalars[TOP] + 4 * sections.size.size > state.trail.size
            if full or depth + 1 >= path.low.size or path.first[depth] > room:
                _return(sections, state, path, depth - 1, -1, -1)
                return OPEN
            path.low[depth], path.high[depth], path.key[depth] = low, high, key
            random = _open(sections, state, path, depth, s, rank, random, noise)
        depth, failures = _next_live(sections, state, path, depth, capacity, roof, any_fixed, dead, failures, budget)
        if depth < 0:
            return NONE if depth == -1 else OPEN

"""Ejection search for a placement within a capacity. All of it is compiled.

Each buffer in turn goes where it throws out the least, at best nothing. A buffer that is thrown out waits for its next
turn. The least is counted in penalties: a buffer gets one each time it has to throw out others, so buffers that are
hard to place tend to stay (ejection chains: Glover, "Ejection chains, reference structures and alternating path methods
for traveling salesman problems", Discrete Applied Mathematics 1996; the penalties: Nagata and Bräysy, "A powerful route
minimization heuristic for the vehicle routing problem with time windows", Operations Research Letters 2009). Short runs
from several starts succeed more often than long ones.
"""

from __future__ import annotations

import numpy as np

from foreplan import jit


@jit.compiled
def _draw(random, count):  # type: ignore[no-untyped-def]
    """The next state of an xorshift generator (Marsaglia, J. Statistical Software 2003), and a number below `count`."""
    random ^= random << np.uint64(13)
    random ^= random >> np.uint64(7)
    random ^= random << np.uint64(17)
    return random, np.int64((random >> np.uint64(11)) % np.uint64(count))


@jit.compiled
def _denied(i, first, near, size, alignment, offsets, penalty, at, change):  # type: ignore[no-untyped-def]
    """The aligned offsets that placed buffers deny buffer i: where their penalties begin and stop to count.

    Returns:
        How many changes there are, written to `at` and `change` in no order; and the penalties at offset 0.
    """
    mask = alignment[i] - 1
    count = 0
    here = np.int64(0)
    for k in range(first[i], first[i + 1]):
        j = near[k]
        if offsets[j] < 0:
            continue
        begin = (offsets[j] - size[i] + 1 + mask) & ~mask
        if begin <= 0:
            here += penalty[j]
        else:
            at[count], change[count] = begin, penalty[j]
            count += 1
        at[count], change[count] = (offsets[j] + size[j] + mask) & ~mask, -penalty[j]
        count += 1
    return count, here


@jit.compiled
def _cheapest(count, here, at, change, step, top, random):  # type: ignore[no-untyped-def]
    """The offset up to `top` with the least penalties: the lowest if these are 0, else a random one where they change.

    Returns:
        The offset, its penalties, and the random number to go on with.
    """
    order = np.argsort(at[:count], kind="stable")
    best, place, ties = here, np.int64(0), 1
    k = 0
    while k < count and at[order[k]] <= top:
        x = at[order[k]]
        after = here
        begins = False
        while k < count and at[order[k]] == x:
            after += change[order[k]]
            begins |= change[order[k]] > 0
            k += 1
        for end in range(2):  # the last offset before the change, and the first behind it
            candidate, cost = (x - step, here) if end == 0 else (x, after)
            if (end == 0 and (not begins or candidate < 0)) or cost > best:
                continue
            if cost < best:
                best, place, ties = cost, candidate, 1
            elif best > 0:
                ties += 1
                random, draw = _draw(random, ties)
                if draw == 0:
                    place = candidate
        here = after
    return place, best, random


@jit.compiled
def eject(rank, ranked, first, near, size, alignment, capacity, budget, random, offsets):  # type: ignore[no-untyped-def]
    """Place all buffers within a capacity, or give up after about the given work.

    Args:
        rank: of each buffer; those without a place at first take their turns by it.
        ranked: the waiting buffer of the lowest rank is next; else the one thrown out last, the largest of several.
        first: where the buffers that live with each one begin in `near`, and where the last one's end.
        near: those buffers.
        size: of each, not 0, rounded up to the smallest alignment.
        capacity: a multiple of the smallest alignment, and at least any size.
        budget: buffers and ends of buffers looked at.
        random: uint64, not 0.
        offsets: of the buffers that lie at first, without overlap, and -1 for others; changed.

    Returns:
        How many have no place at the end; and the work done.
    """
    n = size.size
    widest = np.int64(1)
    for i in range(n):
        widest = max(widest, first[i + 1] - first[i])
    at, change = np.empty(2 * widest, np.int64), np.empty(2 * widest, np.int64)
    penalty = np.ones(n, np.int64)
    waiting = np.empty(n, np.int64)
    count = 0
    order = np.argsort(rank, kind="stable")
    for k in range(n - 1, -1, -1):
        if offsets[order[k]] < 0:
            waiting[count] = order[k]
            count += 1
    work = 0
    while count and work < budget:
        count -= 1
        if ranked:
            for k in range(count):
                if rank[waiting[k]] < rank[waiting[count]]:
                    waiting[k], waiting[count] = waiting[count], waiting[k]
            work += count
        i = waiting[count]
        ends, here = _denied(i, first, near, size, alignment, offsets, penalty, at, change)
        top = (capacity - size[i]) & ~(alignment[i] - 1)
        place, cost, random = _cheapest(ends, here, at, change, alignment[i], top, random)
        work += first[i + 1] - first[i] + 2 * ends
        offsets[i] = place
        if cost == 0:
            continue
        penalty[i] += 1
        start = count
        for k in range(first[i], first[i + 1]):
            j = near[k]
            if offsets[j] < 0 or offsets[j] >= place + size[i] or place >= offsets[j] + size[j]:
                continue
            offsets[j] = -1
            x = count
            while x > start and size[waiting[x - 1]] > size[j]:
                waiting[x] = waiting[x - 1]
                x -= 1
            waiting[x] = j
            count += 1
    return count, work

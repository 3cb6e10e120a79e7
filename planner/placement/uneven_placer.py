"""Compiled first fit of buffers that change their size; importing this module loads LLVM.

A buffer is a few boxes, each with its lower and upper end in time, and in bytes of the buffer.
"""

from __future__ import annotations

import numpy as np

from foreplan import jit
from foreplan.planner.placement.placers import columns_of

ROUND = 2000  # work that each round counts beside its pairs: few buffers have few orders


@jit.compiled
def _lowest(count, start, end, alignment, residue):  # type: ignore[no-untyped-def]
    """The lowest offset, at 0 or above, that lies within no open interval (start, end)."""
    mask = alignment - 1
    place = residue
    for at in np.argsort(start[:count], kind="stable"):
        if start[at] >= place:
            break
        if end[at] > place:
            place = ((end[at] - residue + mask) & ~mask) + residue
    return place


@jit.compiled
def first_fit(order, first, lower, upper, low, high, alignment, residue, offsets, tops):  # type: ignore[no-untyped-def]
    """Place buffers in the given order, each as low as it may lie.

    Args:
        order: buffers.
        first: where the boxes of each buffer begin; one entry more.
        lower, upper, low, high: of each box.
        alignment, residue: of each buffer's offset.
        offsets: written.
        tops: written: where each buffer ends.

    Returns:
        Height, and the pairs of boxes looked at, the measure of work.
    """
    boxes = lower.size
    most = np.int64(1)
    for i in range(order.size):
        most = max(most, first[i + 1] - first[i])
    columns, origin, width = columns_of(lower, upper)
    latest = np.full(columns, -1, np.int64)  # the latest entry of each column; `before` leads to the others
    item = np.empty(8 * boxes + 8, np.int64)
    before = np.empty(8 * boxes + 8, np.int64)
    owner = np.empty(boxes, np.int64)
    entries = 0
    seen = np.full(boxes, -1, np.int64)
    start = np.empty(boxes * most, np.int64)
    end = np.empty(boxes * most, np.int64)
    height, work = np.int64(0), 0
    for k in range(order.size):
        i = order[k]
        count, top = 0, np.int64(0)
        for own in range(first[i], first[i + 1]):
            owner[own] = i
            top = max(top, high[own])
            for column in range((lower[own] - origin) // width, (upper[own] - 1 - origin) // width + 1):
                e = latest[column]
                while e >= 0:
                    j = item[e]
                    if seen[j] != own and lower[j] < upper[own] and lower[own] < upper[j]:
                        seen[j] = own
                        start[count] = offsets[owner[j]] + low[j] - high[own]
                        end[count] = offsets[owner[j]] + high[j] - low[own]
                        count += 1
                    e = before[e]
                    work += 1
        offsets[i] = _lowest(count, start, end, alignment[i], residue[i])
        tops[i] = offsets[i] + top
        height = max(height, tops[i])
        for own in range(first[i], first[i + 1]):
            for column in range((lower[own] - origin) // width, (upper[own] - 1 - origin) // width + 1):
                item[entries], before[entries] = own, latest[column]
                latest[column] = entries
                entries += 1
    return height, work


@jit.compiled
def squeaky_wheel(weight, first, lower, upper, low, high, alignment, residue, goal, most_work, best, offsets):  # type: ignore[no-untyped-def]
    """First fit again and again, by descending weight: buffers that end above the goal weigh more in the next round.

    Reference: Joslin and Clements, "Squeaky wheel optimization", Journal of Artificial Intelligence Research 1999.

    Args:
        weight: of each buffer to begin with; changed.
        goal: a height at which nothing is left to do.
        most_work: of all rounds.
        best: the lowest height that is known.
        offsets: written where a height below `best` is found.

    Returns:
        The lowest height, `best` if nothing lower was found; and the work done.
    """
    n = weight.size
    trial, tops, lightness = np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros(n, np.int64)
    work = np.int64(0)
    random = np.uint64(0x9E3779B97F4A7C15)
    while best > goal and work < most_work:
        for i in range(n):
            lightness[i] = -weight[i]
        order = np.argsort(lightness, kind="stable")
        height, more = first_fit(order, first, lower, upper, low, high, alignment, residue, trial, tops)
        work += more + 8 * n + ROUND
        if height < best:
            best = height
            for i in range(n):
                offsets[i] = trial[i]
        for i in range(n):
            random ^= random << np.uint64(13)
            random ^= random >> np.uint64(7)
            random ^= random << np.uint64(17)
            if tops[i] > goal:
                weight[i] += weight[i] * np.int64(random >> np.uint64(40)) // (np.int64(1) << np.int64(25)) + 1
        heaviest = np.int64(0)
        for i in range(n):
            heaviest = max(heaviest, weight[i])
        if heaviest > np.int64(1) << np.int64(36):
            for i in range(n):
                weight[i] = weight[i] // 16 + 1
    return best, work

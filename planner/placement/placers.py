"""Compiled inner loops of the placer; importing this module loads LLVM.

All take int64 arrays, one entry a buffer: half-open [lower, upper) in time, size, alignment, and give offsets. All
break ties by the order of their input, so the same arrays give the same offsets anywhere. A placer gives up, with a
height of -1, as soon as it would reach `limit`, the lowest height known.
"""

from __future__ import annotations

import numpy as np

from foreplan import jit

NOWHERE = np.int64(1) << np.int64(62)


@jit.compiled
def columns_of(lower, upper):  # type: ignore[no-untyped-def]
    """Columns of equal width in time, as many as possible with a few entries a buffer: (columns, first, width)."""
    n = lower.size
    first, last = lower.min(), upper.max()
    columns = np.int64(1024)
    while True:
        width = (last - first + columns - 1) // columns
        entries = np.int64(0)
        for i in range(n):
            entries += (upper[i] - 1 - first) // width - (lower[i] - first) // width + 1
        if columns == 1 or entries <= 8 * n:
            return columns, first, width
        columns //= 2


@jit.compiled
def greedy(order, lower, upper, size, alignment, fixed, best_fit, limit, offsets):  # type: ignore[no-untyped-def]
    """Place buffers in the given order, each into the first (or tightest) gap between those alive with it.

    Placed buffers are listed by the columns of time in which they live, so only those near in time are looked at.

    Args:
        fixed: offset of a buffer that is placed beforehand, or -1.
        best_fit: the tightest gap rather than the lowest.
        offsets: written.

    Returns:
        Height, or -1; and the pairs of buffers looked at, the measure of work.
    """
    n = order.size
    columns, origin, width = columns_of(lower, upper)
    latest = np.full(columns, -1, np.int64)  # the latest entry of each column; `before` leads to the others
    item = np.empty(8 * n + 8, np.int64)
    before = np.empty(8 * n + 8, np.int64)
    entries = 0
    seen = np.full(n, -1, np.int64)
    start = np.empty(n, np.int64)
    end = np.empty(n, np.int64)
    height = np.int64(0)
    work = 0
    for k in range(-n, n):
        i = order[k + n] if k < 0 else order[k]
        if (fixed[i] >= 0) != (k < 0) or size[i] == 0:
            continue
        place = fixed[i]
        low, up = (lower[i] - origin) // width, (upper[i] - 1 - origin) // width + 1
        if k >= 0:
            count = 0
            for column in range(low, up):
                e = latest[column]
                while e >= 0:
                    j = item[e]
                    if seen[j] != i and lower[j] < upper[i] and lower[i] < upper[j]:
                        seen[j] = i
                        start[count], end[count] = offsets[j], offsets[j] + size[j]
                        count += 1
                    e = before[e]
                    work += 1
            top = np.int64(0)
            slack = NOWHERE
            mask = alignment[i] - 1
            for at in np.argsort(start[:count], kind="stable"):
                gap = start[at] - ((top + mask) & ~mask) - size[i]
                if 0 <= gap < slack:
                    place = (top + mask) & ~mask
                    slack = gap
                    if not best_fit or gap == 0:
                        break
                top = max(top, end[at])
            if place < 0:
                place = (top + mask) & ~mask
            if place + size[i] >= limit:
                return np.int64(-1), work
        offsets[i] = place
        height = max(height, place + size[i])
        for column in range(low, up):
            item[entries], before[entries] = i, latest[column]
            latest[column] = entries
            entries += 1
    return height, work


@jit.compiled
def online(births, deaths, lower, upper, size, alignment, best_fit, short, ceiling, limit, offsets):  # type: ignore[no-untyped-def]
    """Walk through time as an allocator with a free list does, but knowing how long every buffer lives.

    Args:
        births: buffers by `lower`.
        deaths: buffers by `upper`.
        best_fit: the tightest free block rather than the lowest.
        short: buffers that live no longer than this are put at the high end of their block.
        ceiling: free memory is taken to end here at first, which gives `short` an upper end to go to; 0 for none.
        offsets: written.

    Returns:
        Height, or -1 at `limit`; and the blocks looked at.
    """
    n = births.size
    start = np.empty(n + 3, np.int64)
    end = np.empty(n + 3, np.int64)
    start[0], end[0] = 0, ceiling
    count = 1 if ceiling else 0
    start[count], end[count] = ceiling, NOWHERE
    count += 1
    dead = 0
    height = np.int64(0)
    work = 0
    for k in range(n):
        i = births[k]
        if size[i] == 0:
            continue
        while upper[deaths[dead]] <= lower[i]:
            d = deaths[dead]
            dead += 1
            if size[d] == 0:
                continue
            low, high = np.int64(0), np.int64(count)
            while low < high:
                middle = (low + high) // 2
                if start[middle] < offsets[d]:
                    low = middle + 1
                else:
                    high = middle
            below = low > 0 and end[low - 1] == offsets[d] and offsets[d] != ceiling
            above = low < count and start[low] == offsets[d] + size[d] and start[low] != ceiling
            if below and above:
                end[low - 1] = end[low]
                for j in range(low, count - 1):
                    start[j], end[j] = start[j + 1], end[j + 1]
                count -= 1
            elif below:
                end[low - 1] += size[d]
            elif above:
                start[low] = offsets[d]
            else:
                for j in range(count, low, -1):
                    start[j], end[j] = start[j - 1], end[j - 1]
                start[low], end[low] = offsets[d], offsets[d] + size[d]
                count += 1
        mask = alignment[i] - 1
        chosen = -1
        slack = NOWHERE
        for j in range(count):
            gap = end[j] - ((start[j] + mask) & ~mask) - size[i]
            if 0 <= gap < slack:
                chosen = j
                slack = gap
                if not best_fit or gap == 0:
                    break
        work += count
        place = (start[chosen] + mask) & ~mask
        if upper[i] - lower[i] <= short and end[chosen] != NOWHERE:
            place = (end[chosen] - size[i]) & ~mask
        offsets[i] = place
        height = max(height, place + size[i])
        if height >= limit:
            return np.int64(-1), work
        before, after = place > start[chosen], place + size[i] < end[chosen]
        if before and after:
            for j in range(count, chosen + 1, -1):
                start[j], end[j] = start[j - 1], end[j - 1]
            start[chosen + 1], end[chosen + 1] = place + size[i], end[chosen]
            end[chosen] = place
            count += 1
        elif before:
            end[chosen] = place
        elif after:
            start[chosen] = place + size[i]
        else:
            for j in range(chosen, count - 1):
                start[j], end[j] = start[j + 1], end[j + 1]
            count -= 1
    return height, work


@jit.compiled
def shake(order, moves, random, rank):  # type: ignore[no-untyped-def]
    """Exchange some buffers of an order with others, at most a quarter of the order away.

    Args:
        order: buffers; left as it is.
        moves: how many.
        random: uint64, not 0; the numbers of an xorshift generator (Marsaglia, J. Statistical Software 2003).
        rank: written: of each buffer in the new order.

    Returns:
        The next random number.
    """
    n = order.size
    new = order.copy()
    reach = n // 4
    for _ in range(moves):
        random ^= random << np.uint64(13)
        random ^= random >> np.uint64(7)
        random ^= random << np.uint64(17)
        one = np.int64(random % np.uint64(n))
        away = np.int64((random >> np.uint64(32)) % np.uint64(2 * reach + 1)) - reach
        other = min(max(one + away, 0), n - 1)
        new[one], new[other] = new[other], new[one]
    for k in range(n):
        rank[new[k]] = k
    return random


@jit.compiled
def skyline(order, births, lower, upper, size, alignment, limit, offsets):  # type: ignore[no-untyped-def]
    """Fill the lowest segment of the skyline with the first buffer of `order` that fits between its walls.

    Args:
        order: rank of each buffer; of those that fit, the lowest rank is placed.
        births: buffers by `lower`; times are ranks from 0 to at most twice the number of buffers.
        offsets: written.

    Returns:
        Height, or -1 at `limit`; and the buffers looked at.
    """
    n = births.size
    horizon = np.int64(0)
    for i in range(n):
        horizon = max(horizon, upper[i])
    level = np.zeros(horizon, np.int64)
    end = np.zeros(horizon, np.int64)
    first = np.zeros(horizon + 1, np.int64)
    for i in range(n):
        first[lower[i] + 1] += 1
    for t in range(horizon):
        first[t + 1] += first[t]
    placed = np.zeros(n, np.bool_)
    end[0] = horizon
    left = n
    for i in range(n):
        if size[i] == 0:
            placed[i] = True
            left -= 1
    height = np.int64(0)
    work = 0
    while left:
        a = np.int64(0)
        s = end[0]
        while s < horizon:
            if level[s] < level[a]:
                a = s
            s = end[s]
            work += 1
        b = end[a]
        chosen = np.int64(-1)
        for k in range(first[a], first[b]):
            i = births[k]
            if not placed[i] and upper[i] <= b and (chosen < 0 or order[i] < order[chosen]):
                chosen = i
        work += first[b] - first[a]
        if chosen >= 0:
            mask = alignment[chosen] - 1
            offsets[chosen] = (level[a] + mask) & ~mask
            top = offsets[chosen] + size[chosen]
            height = max(height, top)
            if height >= limit:
                return np.int64(-1), work
            placed[chosen] = True
            left -= 1
            low, up = lower[chosen], upper[chosen]
            if up < b:
                level[up], end[up] = level[a], b
            if low > a:
                end[a] = low
            level[low], end[low] = top, up
        else:
            wall = NOWHERE
            if b < horizon:
                wall = level[b]
            s = np.int64(0)
            before = np.int64(-1)
            while s < a:
                before = s
                s = end[s]
            if before >= 0:
                wall = min(wall, level[before])
            level[a] = wall
        s = np.int64(0)
        while end[s] < horizon:
            if level[end[s]] == level[s]:
                end[s] = end[end[s]]
            else:
                s = end[s]
    return height, work

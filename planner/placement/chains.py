"""Chains of ejection: lower a placement of any number of buffers. All of it is compiled.

A capacity a little below the height is asked for. The buffers that stick out of it wait. Each goes where it throws out
the least, and what it throws out does the same, until all lie again (ejection chains: Glover, "Ejection chains,
reference structures and alternating path methods for traveling salesman problems", Discrete Applied Mathematics 1996).
A chain that becomes too long is taken back. One that leaves less waiting than it began with is kept. So a problem in
one stretch of time undoes nothing in another, and the work grows with the buffers that stick out, not with all.

The least is counted in penalties. A buffer begins with its area, size times life, since large and long-lived buffers
are hard to place again. Whenever it has to throw out others it gets as much again, so that it tends to stay (Nagata and
Bräysy, "A powerful route minimization heuristic for the vehicle routing problem with time windows", Operations Research
Letters 2009). Buffers are listed by the columns of time in which they live, so only those near in time are looked at.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from foreplan import jit

NOWHERE = 1 << 62
LOWER, UPPER, SIZE, MASK, COLUMN, WEIGHT, PENALTY, OFFSET = range(8)  # entries of a row: one line of the cache
_FEW = 48  # entries of a bucket that are sorted by insertion


class Columns(NamedTuple):
    """Buffers by columns of time of equal width, int64 arrays.

    Attributes:
        low: the first column in which each buffer lives.
        high: the column after its last.
        first: where the buffers of each column begin in `item`, and where the last one's end.
        item: those buffers, column after column.
    """

    low: np.ndarray
    high: np.ndarray
    first: np.ndarray
    item: np.ndarray


class Scratch(NamedTuple):
    """Room for what one step looks at, and for one chain.

    Attributes:
        at: int64[2n + 16], offsets where penalties change.
        change: int64[2n + 16], by how much.
        order: int64[2n + 16], their order.
        begins: int64[8n + 16], where buckets of them begin.
        near: int64[n + 16], buffers that live with one.
        stack: int64[n + 16], buffers of the chain that wait.
        log: int64[m, SIZE], buffers that it has moved, and where they lay; m is more than n.
    """

    at: np.ndarray
    change: np.ndarray
    order: np.ndarray
    begins: np.ndarray
    near: np.ndarray
    stack: np.ndarray
    log: np.ndarray


@jit.compiled
def _gather(i, rows, columns, scratch):  # type: ignore[no-untyped-def]
    """The placed buffers that live with buffer i, and the aligned offsets where their penalties begin and end.

    Returns:
        How many buffers, how many changes, the penalties at offset 0, and the work.
    """
    lower, upper, size, mask, column = rows[i, LOWER], rows[i, UPPER], rows[i, SIZE], rows[i, MASK], columns.low[i]
    count = ends = 0
    here = np.int64(0)
    work = np.int64(0)
    for c in range(column, columns.high[i]):
        for k in range(columns.first[c], columns.first[c + 1]):
            j = columns.item[k]
            again = c != column and rows[j, COLUMN] != c
            if again or rows[j, OFFSET] < 0 or rows[j, LOWER] >= upper or rows[j, UPPER] <= lower:
                continue
            scratch.near[count] = j
            count += 1
            begin = (rows[j, OFFSET] - size + 1 + mask) & ~mask
            if begin <= 0:
                here += rows[j, PENALTY]
            else:
                scratch.at[ends], scratch.change[ends] = begin, rows[j, PENALTY]
                ends += 1
            scratch.at[ends], scratch.change[ends] = (rows[j, OFFSET] + rows[j, SIZE] + mask) & ~mask, -rows[j, PENALTY]
            ends += 1
        work += columns.first[c + 1] - columns.first[c]
    return count, ends, here, work + 4 * ends


@jit.compiled
def _sort(count, scratch):  # type: ignore[no-untyped-def]
    """Write the order of `at` to `order`: first into buckets of equal width, then within these by insertion."""
    most = np.int64(0)
    for k in range(count):
        most = max(most, scratch.at[k])
    shift = np.int64(0)
    while (most >> shift) > 4 * count:
        shift += 1
    buckets = (most >> shift) + 1
    begins = scratch.begins
    for b in range(buckets + 1):
        begins[b] = 0
    for k in range(count):
        begins[(scratch.at[k] >> shift) + 1] += 1
    crowded = False
    for b in range(buckets):
        crowded |= begins[b + 1] > _FEW
        begins[b + 1] += begins[b]
    if crowded:
        order = np.argsort(scratch.at[:count], kind="stable")
        for k in range(count):
            scratch.order[k] = order[k]
        return
    for k in range(count):
        b = scratch.at[k] >> shift
        scratch.order[begins[b]] = k
        begins[b] += 1
    for k in range(1, count):
        x = scratch.order[k]
        value = scratch.at[x]
        y = k
        while y > 0 and scratch.at[scratch.order[y - 1]] > value:
            scratch.order[y] = scratch.order[y - 1]
            y -= 1
        scratch.order[y] = x


@jit.compiled
def _cheapest(count, here, step, top, scratch, random):  # type: ignore[no-untyped-def]
    """The offset up to `top` with the least penalties: the bottom of the tightest gap if these are 0, else where they
    change, a random one of several.

    Returns:
        The offset, its penalties, and the random number to go on with.
    """
    _sort(count, scratch)
    best, place, ties = here, np.int64(0), np.int64(1)
    tightest = np.int64(NOWHERE)
    bottom = np.int64(0)
    k = 0
    while k < count and scratch.at[scratch.order[k]] <= top:
        x = scratch.at[scratch.order[k]]
        after = here
        begins = False
        while k < count and scratch.at[scratch.order[k]] == x:
            change = scratch.change[scratch.order[k]]
            after += change
            begins |= change > 0
            k += 1
        if here == 0 and after > 0 and x - bottom < tightest:
            best, place, tightest = np.int64(0), bottom, x - bottom
        if here > 0 and after == 0:
            bottom = x
            if best > 0:
                best, place = np.int64(0), x
        if best > 0:
            for end in range(2):  # the last offset before the change, and the first behind it
                candidate, cost = (x - step, here) if end == 0 else (x, after)
                if (end == 0 and not begins) or cost > best:
                    continue
                ties = 1 if cost < best else ties + 1
                if ties > 1:
                    random ^= random << np.uint64(13)
                    random ^= random >> np.uint64(7)
                    random ^= random << np.uint64(17)
                if ties == 1 or np.int64((random >> np.uint64(11)) % np.uint64(ties)) == 0:
                    best, place = cost, candidate
        here = after
    if here == 0 and top + step - bottom < tightest:
        best, place = np.int64(0), bottom
    return place, best, random


@jit.compiled
def _throw_out(i, count, rows, scratch, start, logged):  # type: ignore[no-untyped-def]
    """Take away what buffer i lies on, onto the stack, the heaviest on top.

    Returns:
        The heights of the stack and of the log, and the weight of what was taken away.
    """
    stack, log = scratch.stack, scratch.log
    low, high = rows[i, OFFSET], rows[i, OFFSET] + rows[i, SIZE]
    top = start
    weight = np.int64(0)
    for k in range(count):
        j = scratch.near[k]
        if rows[j, OFFSET] >= high or low >= rows[j, OFFSET] + rows[j, SIZE]:
            continue
        log[logged, 0], log[logged, 1] = j, rows[j, OFFSET]
        logged += 1
        rows[j, OFFSET] = -1
        weight += rows[j, WEIGHT]
        x = top
        while x > start and rows[stack[x - 1], WEIGHT] > rows[j, WEIGHT]:
            stack[x] = stack[x - 1]
            x -= 1
        stack[x] = j
        top += 1
    return top, logged, weight


@jit.compiled
def mend(rows, columns, scratch, capacity, budget, random, waiting, count, limit):  # type: ignore[no-untyped-def]
    """Place the waiting buffers within a capacity, or give up after about the given work.

    Args:
        rows: int64[n, 8], one a buffer; OFFSET is -1 for those that wait. PENALTY and OFFSET change.
        columns: of the buffers.
        scratch: see `Scratch`.
        capacity: a multiple of the smallest alignment, and at least any size.
        budget: buffers and ends of buffers looked at.
        random: uint64, not 0.
        waiting: int64[n], the buffers that wait; it changes.
        count: how many.
        limit: steps of the first chains; twice as many when all have failed.

    Returns:
        How many buffers wait at the end; and the work done.
    """
    stack, log, n = scratch.stack, scratch.log, waiting.size
    work = np.int64(0)
    head = failed = 0
    while count and work < budget:
        seed = waiting[head]
        head = (head + 1) % n
        count -= 1
        stack[0] = seed
        height, logged, steps = 1, np.int64(0), np.int64(0)
        out = rows[seed, WEIGHT]
        better = False
        while not better and height and steps < limit and logged < log.shape[0] - n:
            height -= 1
            steps += 1
            i = stack[height]
            near, ends, here, looked = _gather(i, rows, columns, scratch)
            top = (capacity - rows[i, SIZE]) & ~rows[i, MASK]
            place, cost, random = _cheapest(ends, here, rows[i, MASK] + 1, top, scratch, random)
            work += looked
            log[logged, 0], log[logged, 1] = i, -1
            logged += 1
            rows[i, OFFSET] = place
            out -= rows[i, WEIGHT]
            if cost > 0:
                rows[i, PENALTY] += rows[i, WEIGHT]
                height, logged, weight = _throw_out(i, near, rows, scratch, height, logged)
                out += weight
            better = out < rows[seed, WEIGHT]
        if better:
            failed = 0
            for k in range(height):
                waiting[(head + count) % n] = stack[k]
                count += 1
            continue
        for k in range(logged - 1, -1, -1):
            rows[log[k, 0], OFFSET] = log[k, 1]
        waiting[(head + count) % n] = seed
        count += 1
        failed += 1
        if failed >= count:
            failed = 0
            limit *= 2
    return count, work

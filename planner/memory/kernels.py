"""Compiled count of live bytes, which all searches use; importing this module loads LLVM.

It counts by the rules of `bounds.live_bytes`, which computes the same in Python for one schedule. A test compares both
with the verifier's replay.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from foreplan import jit
from foreplan.planner.memory.arrays import STORED, Arrays


class Sharing(NamedTuple):
    """Room to find which writes of one action take the bytes of which reads. A share is known by its place among those
    of the action, and a write by its first share.

    Attributes:
        free: of each read, whether nobody needs it later.
        over: of each write, whether it has a read.
        holder: of each read, the write that has it, or -1.
        asked: of each read, the write that asks for it, or -1.
        served: of each write, the read that it has.
        queue: writes that look for a read.
    """

    free: np.ndarray
    over: np.ndarray
    holder: np.ndarray
    asked: np.ndarray
    served: np.ndarray
    queue: np.ndarray


class Count(NamedTuple):
    """What `measure` reads and writes, allocated once.

    Attributes:
        steps: the actions of the schedule.
        live: of each value, whether it is there.
        level: live bytes of each step, as last measured.
        sharing: room for `shared`.
    """

    steps: np.ndarray
    live: np.ndarray
    level: np.ndarray
    sharing: Sharing


def make_sharing(p: Arrays) -> Sharing:
    """Room for any action."""
    reads, writes, shares = (int(np.diff(at).max(initial=0)) + 1 for at in (p.read_at, p.write_at, p.share_at))
    return Sharing(*(np.zeros(length, np.int64) for length in (reads, writes, reads, reads, shares, shares + reads)))


def make_count(p: Arrays, steps: int) -> Count:
    """Room for schedules of at most `steps` steps."""
    made, live, level = (np.zeros(length, np.int64) for length in (steps, len(p.size), steps))
    return Count(made, live, level, make_sharing(p))


@jit.compiled
def copy(source, target, count):  # type: ignore[no-untyped-def]
    """Copy the first elements of an array."""
    for i in range(count):
        target[i] = source[i]


@jit.compiled
def measure(p, s, length):  # type: ignore[no-untyped-def]
    """The live bytes of the schedule in `steps`, from the last step to the first: a value that is read and not live yet
    dies there.

    Returns:
        The highest live set, and the first step of it; the bytes of each step are in `level`.
    """
    live, free = s.live, s.sharing.free
    level, given = np.int64(0), np.int64(0)
    for v in range(p.size.size):
        live[v] = p.there[v] == STORED or p.output[v] != 0
        if live[v]:
            level += p.size[v]
        if p.there[v]:
            given += p.size[v]
    highest, at = np.int64(-1), 0
    for step in range(length - 1, -1, -1):
        a = s.steps[step]
        here = level + p.workspace[a]
        for k in range(p.write_at[a], p.write_at[a + 1]):
            v = p.writes[k]
            if live[v]:
                level -= p.size[v]
            else:
                here += p.size[v]
        low = p.read_at[a]
        for k in range(low, p.read_at[a + 1]):
            v = p.reads[k]
            free[k - low] = live[v] == 0
            if live[v] == 0:
                here += p.size[v]
                level += p.size[v]
        if p.share_at[a] < p.share_at[a + 1]:
            here -= shared(p, s.sharing, a)
        for k in range(p.write_at[a], p.write_at[a + 1]):
            live[p.writes[k]] = 0
        for k in range(low, p.read_at[a + 1]):
            live[p.reads[k]] = 1
        s.level[step] = here
        if here >= highest:
            highest, at = here, step
    if length == 0:
        return max(level, given), 0
    s.level[0] = max(s.level[0], given)
    if s.level[0] >= highest:
        highest, at = s.level[0], 0
    return highest, at


@jit.compiled
def shared(p, s, a):  # type: ignore[no-untyped-def]
    """The most bytes that the writes of an action share with those of its reads that are `free`."""
    if p.contested[a]:
        return most_shared(p, s, p.share_at[a], p.share_at[a + 1])
    over, free = s.over, s.free
    for k in range(p.write_at[a + 1] - p.write_at[a]):
        over[k] = 0
    total = np.int64(0)
    for k in range(p.share_at[a], p.share_at[a + 1]):
        write, read = p.share_write[k], p.share_read[k]
        if free[read] and (write < 0 or not over[write]):
            free[read] = 0
            total += p.share_bytes[k]
            if write >= 0:
                over[write] = 1
    return total


@jit.compiled
def most_shared(p, s, low, high):  # type: ignore[no-untyped-def]
    """The same where writes compete for reads: `alias_sets.matched`."""
    free, holder, asked, served, queue = s.free, s.holder, s.asked, s.served, s.queue
    holder[:] = -1
    total = np.int64(0)
    for k in range(low, high):
        if k > low and p.share_write[k] == p.share_write[k - 1]:
            continue
        asked[:] = -1
        queue[0] = k
        head, tail, found = 0, 1, -1
        while head < tail and found < 0:
            write = queue[head]
            head += 1
            for j in range(write, high):
                read = p.share_read[j]
                if p.share_write[j] != p.share_write[write] or found >= 0:
                    break
                if free[read] and asked[read] < 0:
                    asked[read] = write
                    if holder[read] >= 0:
                        queue[tail] = holder[read]
                        tail += 1
                    else:
                        found = read
        if found >= 0:
            total += p.share_bytes[k]
            while asked[found] != k:
                write = asked[found]
                before = served[write - low]
                holder[found], served[write - low] = write, found
                found = before
            holder[found], served[k - low] = k, found
    return total

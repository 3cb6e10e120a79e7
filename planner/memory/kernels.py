"""Compiled count of live bytes, which all searches use; importing this module imports Numba.

It counts by the rules of `liveness`, `alias_sets` and `bounds.reserved_bytes`, which compute the same in Python for one
schedule. A test compares both with the verifier's replay.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from foreplan import jit
from foreplan.planner.memory.arrays import STORED, Arrays


class Parts(NamedTuple):
    """Further arrays, for values that are made of parts in place.

    Attributes:
        taken, dies: `Count.over` and `Count.dying` of every step.
        first, widest, aligned: for each value, the first step, the bytes and the alignment of the alias set that it
            belongs to at the step; alignment 0: the set may lie in no whole.
        chosen: of each part, whether it lies within its whole.
    """

    taken: np.ndarray
    dies: np.ndarray
    first: np.ndarray
    widest: np.ndarray
    aligned: np.ndarray
    chosen: np.ndarray


class Count(NamedTuple):
    """What `measure` reads and writes, allocated once.

    Attributes:
        steps: the actions of the schedule.
        live: of each value, whether it is there.
        last: of each value, the last step that reads it before it is written again, seen from the current one.
        dying: of each read of a step, whether nobody needs it later.
        over: of each write of a step, the read whose bytes it takes, counted from 1; 0 for none.
        level: live bytes of each step, as last measured.
        parts: None where nothing is made of parts: `measure` is then compiled without them.
    """

    steps: np.ndarray
    live: np.ndarray
    last: np.ndarray
    dying: np.ndarray
    over: np.ndarray
    level: np.ndarray
    parts: Parts | None


def make_count(p: Arrays, steps: int) -> Count:
    """Room for schedules of at most `steps` steps."""
    values = len(p.size)
    reads, writes = (int(np.diff(at).max(initial=0)) + 1 for at in (p.read_at, p.write_at))
    parts = None
    if len(p.part_write):
        lengths = (steps * writes, steps * reads, values, values, values, len(p.part_write))
        parts = Parts(*(np.zeros(length, np.int64) for length in lengths))
    made, live, last, dying, over, level = (
        np.zeros(n, np.int64) for n in (steps, values, values, reads, writes, steps)
    )
    return Count(made, live, last, dying, over, level, parts)


@jit.compiled
def copy(source, target, count):  # type: ignore[no-untyped-def]
    """Copy the first elements of an array. Numba compiles it much faster than an assignment to a slice, which
    also needs the code of an error for arrays of unequal length.
    """
    for i in range(count):
        target[i] = source[i]


@jit.compiled
def measure(p, s, length):  # type: ignore[no-untyped-def]
    """The live bytes of the schedule in `steps`.

    Returns:
        The highest live set, and the first step of it; the bytes of each step are in `level`.
    """
    return go_back(p, s, s.parts, length)


@jit.compiled
def go_back(p, s, parts, length):  # type: ignore[no-untyped-def]
    """The loop of `measure`, from the last step to the first: a value that is read and not live yet dies there."""
    live, last, dying = s.live, s.last, s.dying
    level, unread = np.int64(0), np.int64(0)
    for v in range(p.size.size):
        stays = p.there[v] == STORED or p.output[v] != 0
        live[v] = stays
        last[v] = max(length, 1)
        if stays:
            level += p.size[v]
    highest, at, here = np.int64(-1), 0, level
    for step in range(length - 1, -1, -1):
        a = s.steps[step]
        here = level + p.workspace[a]
        for k in range(p.write_at[a], p.write_at[a + 1]):
            v = p.writes[k]
            if live[v]:
                level -= p.size[v]
            else:
                here += p.size[v]
                last[v] = step
        low = p.read_at[a]
        for k in range(low, p.read_at[a + 1]):
            v = p.reads[k]
            dying[k - low] = live[v] == 0
            if live[v] == 0:
                here += p.size[v]
                level += p.size[v]
        if parts is not None:
            for k in range(p.read_at[a + 1] - low):
                parts.dies[step * dying.size + k] = dying[k]
        if p.pair_at[a] < p.pair_at[a + 1]:
            here -= in_place(p, s, a, step, length)
            if parts is not None:
                for k in range(p.write_at[a + 1] - p.write_at[a]):
                    parts.taken[step * s.over.size + k] = s.over[k]
        for k in range(p.write_at[a], p.write_at[a + 1]):
            live[p.writes[k]] = 0
        for k in range(low, p.read_at[a + 1]):
            if live[p.reads[k]] == 0:
                live[p.reads[k]] = 1
                last[p.reads[k]] = step
        s.level[step] = here
        if here >= highest:
            highest, at = here, step
    for v in range(p.size.size):
        if p.there[v] and not live[v]:
            unread += p.size[v]
    if length == 0:
        return here + unread, 0
    s.level[0] += unread
    if parts is not None:
        join(p, s, parts, length)
        highest, at = np.int64(-1), 0
        for step in range(length):
            if s.level[step] > highest:
                highest, at = s.level[step], step
    elif s.level[0] >= highest:
        highest, at = s.level[0], 0
    return highest, at


@jit.compiled
def in_place(p, s, a, step, length):  # type: ignore[no-untyped-def]
    """Bytes of the writes of a step that take those of a read: required ones, then the largest that may."""
    over, dying = s.over, s.dying
    reads, writes = p.read_at[a], p.write_at[a]
    for k in range(p.write_at[a + 1] - writes):
        over[k] = 0
    total = np.int64(0)
    for k in range(p.pair_at[a], p.pair_at[a + 1]):
        write, read = p.pair_write[k], p.pair_read[k]
        new, old = p.writes[writes + write], p.reads[reads + read]
        if not p.pair_required[k]:
            if over[write] or not dying[read]:
                continue
            wasted = p.rounded[old] - p.rounded[new]
            if wasted * (min(s.last[new] + 1, length) - step - 1) > p.nbytes[new]:
                continue
        over[write] = read + 1
        dying[read] = 0
        total += p.size[new]
    return total


@jit.compiled
def join(p, s, parts, length):  # type: ignore[no-untyped-def]
    """Let parts lie within their wholes from the start, step by step, by the rules of `concatenations.join`: as many as
    possible, while the highest step that they live through does not rise.
    """
    first, widest, aligned = parts.first, parts.widest, parts.aligned
    for v in range(p.size.size):
        first[v], widest[v] = 0, p.nbytes[v]
        aligned[v] = p.alignment[v] if p.there[v] != STORED else 0
    for step in range(length):
        a = s.steps[step]
        reads, writes = p.read_at[a], p.write_at[a]
        paired = p.pair_at[a] < p.pair_at[a + 1]
        for k in range(p.write_at[a + 1] - writes):
            v = p.writes[writes + k]
            old = parts.taken[step * s.over.size + k] if paired else 0
            if old:  # it goes on in the alias set of the value whose bytes it takes
                u = p.reads[reads + old - 1]
                first[v], widest[v], aligned[v] = first[u], widest[u], aligned[u]
                if aligned[v]:
                    aligned[v] = max(aligned[v], p.alignment[v])
            else:
                first[v], widest[v], aligned[v] = step, p.nbytes[v], p.alignment[v]
                if p.part_at[a] < p.part_at[a + 1]:
                    place(p, s, parts, step, a, k)


@jit.compiled
def place(p, s, parts, step, a, write):  # type: ignore[no-untyped-def]
    """Put parts into one whole: all of them, or else those that begin last."""
    whole, chosen = p.writes[p.write_at[a] + write], parts.chosen
    low, high, reads = p.part_at[a], p.part_at[a + 1], p.read_at[a]
    earliest = np.int64(0)  # parts that begin before this step stay apart
    while True:
        begin, found = np.int64(step), 0
        for k in range(low, high):
            chosen[k] = p.part_write[k] == write and lies_within(p, s, parts, step, a, k, earliest)
            if chosen[k]:
                begin = min(begin, parts.first[p.reads[reads + p.part_read[k]]])
                found += 1
        if found == 0:
            return
        before, after = np.int64(0), np.int64(0)
        for turn in range(2):  # first measure, then apply
            for at in range(begin, step + 1):
                more = p.size[whole] if at < step else np.int64(0)
                for k in range(low, high):
                    piece = p.reads[reads + p.part_read[k]]
                    if chosen[k] and parts.first[piece] <= at:
                        more -= p.size[piece]
                if turn == 0:
                    before, after = max(before, s.level[at]), max(after, s.level[at] + more)
                else:
                    s.level[at] += more
            if after > before:
                break
        if after <= before:
            for k in range(low, high):
                if chosen[k]:
                    piece = p.reads[reads + p.part_read[k]]
                    parts.aligned[whole] = max(parts.aligned[whole], parts.aligned[piece])
            parts.first[whole] = begin
            return
        earliest = begin + 1


@jit.compiled
def lies_within(p, s, parts, step, a, k, earliest):  # type: ignore[no-untyped-def]
    """Whether a part dies in the step, begins late enough, and no earlier value in its alias set is larger."""
    read = p.part_read[k]
    v = p.reads[p.read_at[a] + read]
    return (
        parts.dies[step * s.dying.size + read] != 0
        and p.there[v] == 0
        and p.output[v] == 0
        and p.nbytes[v] > 0
        and parts.first[v] >= earliest
        and parts.widest[v] <= p.nbytes[v]
        and parts.aligned[v] > 0
        and p.part_offset[k] % parts.aligned[v] == 0
    )

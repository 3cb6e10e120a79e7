"""Compiled count of live bytes, which all searches use; importing this module loads LLVM.

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
        chosen: of each part, whether it may lie within its whole.
        begins, begun: how many parts of the whole at hand begin at each step, and their bytes; zero between wholes.
    """

    taken: np.ndarray
    dies: np.ndarray
    first: np.ndarray
    widest: np.ndarray
    aligned: np.ndarray
    chosen: np.ndarray
    begins: np.ndarray
    begun: np.ndarray


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
        lengths = (steps * writes, steps * reads, values, values, values, len(p.part_write), steps, steps)
        parts = Parts(*(np.zeros(length, np.int64) for length in lengths))
    made, live, last, dying, over, level = (
        np.zeros(n, np.int64) for n in (steps, values, values, reads, writes, steps)
    )
    return Count(made, live, last, dying, over, level, parts)


@jit.compiled
def copy(source, target, count):  # type: ignore[no-untyped-def]
    """Copy the first elements of an array."""
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
    """Put parts into one whole: all of them, or else as many as possible of those that begin last.

    The whole then lives from the first of its parts on, and the parts live in it. Going back from the step, each step
    at which parts begin is tried as the first one; what began earlier stays apart.
    """
    whole, chosen, level = p.writes[p.write_at[a] + write], parts.chosen, s.level
    low, high, reads = p.part_at[a], p.part_at[a + 1], p.read_at[a]
    earliest, total = step + 1, np.int64(0)
    for k in range(low, high):
        chosen[k] = p.part_write[k] == write and lies_within(p, s, parts, step, a, k)
        if chosen[k]:
            piece = p.reads[reads + p.part_read[k]]
            parts.begins[parts.first[piece]] += 1
            parts.begun[parts.first[piece]] += p.size[piece]
            total += p.size[piece]
            earliest = min(earliest, parts.first[piece])
    begin, within, before = step + 1, total, np.int64(-1)
    rest = level[step] - total - p.size[whole]  # the step itself counts the whole already
    for at in range(step, earliest - 1, -1):
        before = max(before, level[at])
        if at < step:
            rest = max(rest, level[at] - within)
        if parts.begins[at]:
            apart = within - parts.begun[at]
            if rest + p.size[whole] + apart <= before:
                begin = at
            within = apart
    within = np.int64(0)
    for at in range(begin, step + 1):
        within += parts.begun[at]
        level[at] += (p.size[whole] if at < step else np.int64(0)) - within
    for k in range(low, high):
        piece = p.reads[reads + p.part_read[k]]
        if chosen[k] and parts.first[piece] >= begin:
            parts.aligned[whole] = max(parts.aligned[whole], parts.aligned[piece])
    if begin <= step:
        parts.first[whole] = begin
    for at in range(earliest, step + 1):
        parts.begins[at], parts.begun[at] = 0, 0


@jit.compiled
def lies_within(p, s, parts, step, a, k):  # type: ignore[no-untyped-def]
    """Whether a part dies in the step, and no earlier value in its alias set is larger."""
    read = p.part_read[k]
    v = p.reads[p.read_at[a] + read]
    return (
        parts.dies[step * s.dying.size + read] != 0
        and p.there[v] == 0
        and p.output[v] == 0
        and p.nbytes[v] > 0
        and parts.widest[v] <= p.nbytes[v]
        and parts.aligned[v] > 0
        and p.part_offset[k] % parts.aligned[v] == 0
    )

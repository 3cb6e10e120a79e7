"""Compiled inner loops of recomputation; importing this module imports Numba.

A state gives every gap of a tape KEEP, DROP, DISCARD or OFFLOAD. `generate` makes the schedule that it stands for, and
`measure` finds the live bytes of that schedule by the rules of `liveness`, `alias` and `bound`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from foreplan import jit
from foreplan.planner.recompute.arrays import DISCARD, KEEP, NEVER, OFFLOAD, Tape

_RUNS = 4  # a schedule may be so many times as long as the order


class Scratch(NamedTuple):
    """Arrays that the kernels write, allocated once.

    Attributes:
        steps, places: the generated actions, and for each the position in the order that it runs for.
        live: of each value, whether it is there.
        host: of each value, whether there is a copy of it off the device; empty where nothing can be copied.
        gap: of each value, the gap that it is in.
        stack, batch: values being recomputed, and recomputed for the action at hand.
        last: of each value, the step that reads it last before it is written again, as seen from the current one.
        dying, over: marks of the reads and writes of a step.
        level: live bytes of each step, as last measured.
        above: how many steps need more than a target, up to each position.
    """

    steps: np.ndarray
    places: np.ndarray
    live: np.ndarray
    host: np.ndarray
    gap: np.ndarray
    stack: np.ndarray
    batch: np.ndarray
    last: np.ndarray
    dying: np.ndarray
    over: np.ndarray
    level: np.ndarray
    above: np.ndarray


def make_scratch(tape: Tape) -> Scratch:
    """Scratch for a tape: room for schedules of so many times its length."""
    values, steps = len(tape.size), _RUNS * len(tape.order) + 64
    batch = values + _RUNS * int(tape.write_at[-1]) + 64
    reads, writes = (int(np.diff(at).max(initial=0)) + 1 for at in (tape.read_at, tape.write_at))
    hosts = values if np.any(tape.save >= 0) else 0
    lengths = (steps, steps, values, hosts, values, values + 1, batch, values, reads, writes, steps)
    return Scratch(*(np.zeros(length, np.int64) for length in (*lengths, len(tape.order) + 2)))


@jit.compiled
def generate(t, s, state):  # type: ignore[no-untyped-def]
    """Write the schedule of a state to `steps` and `places`.

    Copies off the device come as late as they may: before what reads a value last, so that it may be overwritten.

    Returns:
        Its length, or -1 where something needed cannot be recomputed any more; and the cost of its further runs.
    """
    live, host, gap = s.live, s.host, s.gap
    host[:] = 0
    copies = host.size > 0
    for v in range(t.size.size):
        live[v] = t.there[v] > 0
        gap[v] = -1
    room = s.steps.size
    length, cost = 0, np.int64(0)
    for p in range(t.order.size):
        a = t.order[p]
        batch = 0
        skip = t.skippable[a] != 0
        if skip:
            for k in range(t.write_at[a], t.write_at[a + 1]):
                g = t.write_gap[k]
                if g < 0 or state[g] == KEEP or state[g] == OFFLOAD or t.gap_last[g] == t.order.size:
                    skip = False
                    break
        if not skip:
            for k in range(t.read_at[a], t.read_at[a + 1]):
                if live[t.reads[k]]:
                    continue
                s.stack[0] = t.reads[k]
                depth = 1
                while depth > 0:
                    v = s.stack[depth - 1]
                    if live[v]:
                        depth -= 1
                        continue
                    missing = -1
                    if copies and host[v]:
                        m = t.fetch[v]
                    else:
                        m = t.maker[v]
                        if m < 0 or p > t.deadline[m]:
                            return -1, cost
                        for j in range(t.read_at[m], t.read_at[m + 1]):
                            u = t.reads[j]
                            if not live[u] and (missing < 0 or t.made[u] < t.made[missing]):
                                missing = u
                    if missing >= 0:
                        if depth == s.stack.size:
                            return -1, cost
                        s.stack[depth] = missing
                        depth += 1
                        continue
                    if length == room or batch + t.write_at[m + 1] - t.write_at[m] > s.batch.size:
                        return -1, cost
                    s.steps[length] = m
                    s.places[length] = p
                    length += 1
                    cost += t.cost[m]
                    for j in range(t.write_at[m], t.write_at[m + 1]):
                        live[t.writes[j]] = 1
                        s.batch[batch] = t.writes[j]
                        batch += 1
                    depth -= 1
        if copies:  # written out here and below: a function that takes the whole tape would slow all this down
            for k in range(t.read_at[a], t.read_at[a + 1]):
                v, g = t.reads[k], t.read_gap[k]
                if g >= 0 and state[g] == OFFLOAD and live[v] and not host[v]:
                    if length == room:
                        return -1, cost
                    host[v] = 1
                    s.steps[length] = t.save[v]
                    s.places[length] = p
                    length += 1
                    cost += t.cost[t.save[v]]
        if skip:
            cost -= t.cost[a]
        else:
            if length == room:
                return -1, cost
            s.steps[length] = a
            s.places[length] = p
            length += 1
        for k in range(t.read_at[a], t.read_at[a + 1]):
            g = t.read_gap[k]
            if g >= 0:
                gap[t.reads[k]] = g
                if state[g] != KEEP:
                    live[t.reads[k]] = 0
        for k in range(t.write_at[a], t.write_at[a + 1]):
            g = t.write_gap[k]
            live[t.writes[k]] = 1
            if g >= 0:
                gap[t.writes[k]] = g
                if state[g] != KEEP:
                    live[t.writes[k]] = 0
                    if state[g] == OFFLOAD and not host[t.writes[k]]:
                        if length == room:
                            return -1, cost
                        host[t.writes[k]] = 1
                        s.steps[length] = t.save[t.writes[k]]
                        s.places[length] = p
                        length += 1
                        cost += t.cost[t.save[t.writes[k]]]
        for k in range(t.destroy_at[a], t.destroy_at[a + 1]):
            live[t.destroys[k]] = 0
            gap[t.destroys[k]] = -1
        for k in range(batch):
            g = gap[s.batch[k]]
            if g >= 0 and state[g] == DISCARD:
                live[s.batch[k]] = 0
    return length, cost


@jit.compiled
def measure(t, s, length, target):  # type: ignore[no-untyped-def]
    """The live bytes of the schedule in `steps`, gone through from its end: what is read and not live yet dies there.

    Returns:
        The highest live set, the first step of it, and the bytes above `target`, summed over the steps.
    """
    live, last, dying = s.live, s.last, s.dying
    level, unread = np.int64(0), np.int64(0)
    for v in range(t.size.size):
        stays = t.there[v] == 2 or t.output[v] != 0
        live[v] = stays
        last[v] = max(length, 1)
        if stays:
            level += t.size[v]
    highest, at, excess, here = np.int64(-1), 0, np.int64(0), level
    for step in range(length - 1, -1, -1):
        a = s.steps[step]
        here = level + t.workspace[a] + t.background[s.places[step]]
        for k in range(t.write_at[a], t.write_at[a + 1]):
            v = t.writes[k]
            if live[v]:
                level -= t.size[v]
            else:
                here += t.size[v]
                last[v] = step
        low = t.read_at[a]
        for k in range(low, t.read_at[a + 1]):
            v = t.reads[k]
            dying[k - low] = live[v] == 0
            if live[v] == 0:
                here += t.size[v]
                level += t.size[v]
        if t.pair_at[a] < t.pair_at[a + 1]:
            here -= paired(t, s, a, step, length)
        for k in range(t.write_at[a], t.write_at[a + 1]):
            live[t.writes[k]] = 0
        for k in range(low, t.read_at[a + 1]):
            if live[t.reads[k]] == 0:
                live[t.reads[k]] = 1
                last[t.reads[k]] = step
        s.level[step] = here
        if here >= highest:
            highest, at = here, step
        if here > target:
            excess += here - target
    for v in range(t.size.size):
        if t.there[v] == 1 and not live[v]:
            unread += t.size[v]
    if unread or length == 0:
        first = here + unread
        excess += max(first - target, 0) - (max(here - target, 0) if length else 0)
        if first >= highest:
            highest, at = first, 0
    return highest, at, excess


@jit.compiled
def paired(t, s, a, step, length):  # type: ignore[no-untyped-def]
    """Bytes of the writes of a step that take those of a read: required ones, then the largest that may."""
    over, dying = s.over, s.dying
    low, high = t.pair_at[a], t.pair_at[a + 1]
    reads, writes = t.read_at[a], t.write_at[a]
    for k in range(t.write_at[a + 1] - writes):
        over[k] = 0
    total = np.int64(0)
    for k in range(low, high):
        if t.pair_required[k]:
            over[t.pair_write[k]] = 1
            dying[t.pair_read[k]] = 0
            total += t.size[t.writes[writes + t.pair_write[k]]]
    while True:
        best, most = -1, np.int64(-1)
        for k in range(low, high):
            if over[t.pair_write[k]] or not dying[t.pair_read[k]]:
                continue
            new, old = t.writes[writes + t.pair_write[k]], t.reads[reads + t.pair_read[k]]
            wasted = t.rounded[old] - t.rounded[new]
            if t.nbytes[new] > most and wasted * (min(s.last[new] + 1, length) - step - 1) <= t.nbytes[new]:
                best, most = k, t.nbytes[new]
        if best < 0:
            return total
        over[t.pair_write[best]] = 1
        dying[t.pair_read[best]] = 0
        total += t.size[t.writes[writes + t.pair_write[best]]]


@jit.compiled
def evaluate(t, s, state, target):  # type: ignore[no-untyped-def]
    """Peak (NEVER where the state cannot be), position of the peak, bytes above target, cost, and steps."""
    length, cost = generate(t, s, state)
    if length < 0:
        return NEVER, 0, NEVER, cost, t.order.size
    highest, at, excess = measure(t, s, length, target)
    return highest, s.places[at] if length else 0, excess, cost, length

"""Compiled inner loops of recomputation; importing this module imports Numba.

A state gives every gap of a tape KEEP, DROP or DISCARD. `generate` makes the schedule that it stands for, and `measure`
finds the live bytes of that schedule by the rules of `liveness`, `alias` and `bound`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from foreplan.planner.remat_tape import DISCARD, KEEP, Tape

NEVER = np.int64(1) << np.int64(60)
_RUNS = 4  # a schedule may be so many times as long as the order


class Scratch(NamedTuple):
    """Arrays that the kernels write, allocated once.

    Attributes:
        steps, places: the generated actions, and for each the position in the order that it runs for.
        live: of each value, whether it is there.
        gap: of each value, the gap that it is in.
        stack, batch: values being recomputed, and recomputed for the action at hand.
        current: of each value, its latest instance.
        value, birth, last: of each instance.
        slots, first: the instance of every read, and the first instance each step writes.
        over: whether an instance takes the bytes of a read.
        taken: marks of reads within a step.
        change: live bytes, as changes from step to step.
    """

    steps: np.ndarray
    places: np.ndarray
    live: np.ndarray
    gap: np.ndarray
    stack: np.ndarray
    batch: np.ndarray
    current: np.ndarray
    value: np.ndarray
    birth: np.ndarray
    last: np.ndarray
    slots: np.ndarray
    first: np.ndarray
    over: np.ndarray
    taken: np.ndarray
    change: np.ndarray


def make_scratch(tape: Tape) -> Scratch:
    """Scratch for a tape: room for schedules of so many times its length."""
    values, reads = len(tape.size), int(tape.read_at[-1])
    steps = _RUNS * len(tape.order) + 64
    instances = values + _RUNS * int(tape.write_at[-1]) + 64
    slots, most = _RUNS * reads + 64, int(np.diff(tape.read_at).max(initial=0)) + 1
    lengths = [steps, steps, values, values, values + 1, instances, values, instances, instances, instances]
    lengths += [slots, steps, instances, most, steps + 2]
    return Scratch(*(np.zeros(length, np.int64) for length in lengths))


@njit(cache=True)
def generate(t, s, state):  # type: ignore[no-untyped-def]
    """Write the schedule of a state to `steps` and `places`.

    Returns:
        Its length, or -1 where something needed cannot be recomputed any more; and the cost of its further runs.
    """
    live, gap = s.live, s.gap
    for v in range(t.size.size):
        live[v] = t.there[v] > 0
        gap[v] = -1
    room, room_reads, room_writes = s.steps.size, s.slots.size, s.value.size - t.size.size
    length, cost, n_reads, n_writes = 0, np.int64(0), 0, 0
    for p in range(t.order.size):
        a = t.order[p]
        batch = 0
        skip = t.skippable[a] != 0
        if skip:
            for k in range(t.write_at[a], t.write_at[a + 1]):
                g = t.write_gap[k]
                if g < 0 or state[g] == KEEP or t.gap_last[g] == t.order.size:
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
                    m = t.maker[v]
                    if m < 0:
                        return -1, cost
                    missing = -1
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
                    n_reads += t.read_at[m + 1] - t.read_at[m]
                    n_writes += t.write_at[m + 1] - t.write_at[m]
                    if length == room or n_reads > room_reads or n_writes > room_writes:
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
            n_reads += t.read_at[a + 1] - t.read_at[a]
            n_writes += t.write_at[a + 1] - t.write_at[a]
            if length == room or n_reads > room_reads or n_writes > room_writes:
                return -1, cost
            s.steps[length] = a
            s.places[length] = p
            length += 1
        else:
            cost -= t.cost[a]
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
        for k in range(t.destroy_at[a], t.destroy_at[a + 1]):
            live[t.destroys[k]] = 0
            gap[t.destroys[k]] = -1
        for k in range(batch):
            g = gap[s.batch[k]]
            if g >= 0 and state[g] == DISCARD:
                live[s.batch[k]] = 0
    return length, cost


@njit(cache=True)
def measure(t, s, length, target):  # type: ignore[no-untyped-def]
    """The live bytes of the schedule in `steps`.

    Returns:
        The highest live set, the step of it, and the bytes above `target`, summed over the steps.
    """
    current, value, birth, last, over = s.current, s.value, s.birth, s.last, s.over
    steps = max(length, 1)
    count = 0
    for v in range(t.size.size):
        current[v] = -1
        if t.there[v]:
            current[v] = count
            value[count] = v
            birth[count] = 0
            last[count] = steps if t.there[v] == 2 else 0
            over[count] = 0
            count += 1
    slot = 0
    for step in range(length):
        a = s.steps[step]
        for k in range(t.read_at[a], t.read_at[a + 1]):
            i = current[t.reads[k]]
            s.slots[slot] = i
            slot += 1
            if last[i] < step:
                last[i] = step
        s.first[step] = count
        for k in range(t.write_at[a], t.write_at[a + 1]):
            v = t.writes[k]
            current[v] = count
            value[count] = v
            birth[count] = step
            last[count] = step
            over[count] = 0
            count += 1
    for v in range(t.size.size):
        if t.output[v] and current[v] >= 0:
            last[current[v]] = steps
    slot = 0
    for step in range(steps + 2):
        s.change[step] = 0
    for step in range(length):
        a = s.steps[step]
        if t.pair_at[a] < t.pair_at[a + 1]:
            pair_up(t, s, step, slot, steps)
        slot += t.read_at[a + 1] - t.read_at[a]
        s.change[step] += t.workspace[a]
        s.change[step + 1] -= t.workspace[a]
    for i in range(count):
        nbytes = t.size[value[i]]
        s.change[birth[i] + over[i]] += nbytes
        s.change[min(last[i] + 1, steps)] -= nbytes
    highest, at, level, excess = np.int64(-1), 0, np.int64(0), np.int64(0)
    for step in range(steps):
        level += s.change[step]
        if level > highest:
            highest = level
            at = step
        if level > target:
            excess += level - target
    return highest, at, excess


@njit(cache=True)
def pair_up(t, s, step, slot, steps):  # type: ignore[no-untyped-def]
    """Mark the writes of a step that take the bytes of a read: required ones, then the largest that may."""
    a = s.steps[step]
    first = s.first[step]
    for k in range(t.read_at[a + 1] - t.read_at[a]):
        s.taken[k] = 0
    for k in range(t.pair_at[a], t.pair_at[a + 1]):
        if t.pair_required[k]:
            s.over[first + t.pair_write[k]] = 1
            s.taken[t.pair_read[k]] = 1
    while True:
        best, most = -1, np.int64(-1)
        for k in range(t.pair_at[a], t.pair_at[a + 1]):
            write, read = first + t.pair_write[k], s.slots[slot + t.pair_read[k]]
            if s.over[write] or s.taken[t.pair_read[k]] or s.last[read] != step:
                continue
            new, old = s.value[write], s.value[read]
            wasted = t.rounded[old] - t.rounded[new]
            if t.nbytes[new] > most and wasted * (min(s.last[write] + 1, steps) - step - 1) <= t.nbytes[new]:
                best, most = k, t.nbytes[new]
        if best < 0:
            return
        s.over[first + t.pair_write[best]] = 1
        s.taken[t.pair_read[best]] = 1


@njit(cache=True)
def evaluate(t, s, state, target):  # type: ignore[no-untyped-def]
    """Peak (NEVER where the state cannot be), position of the peak, bytes above target, cost, and work done."""
    length, cost = generate(t, s, state)
    if length < 0:
        return NEVER, 0, NEVER, cost, t.order.size
    highest, at, excess = measure(t, s, length, target)
    return highest, s.places[at] if length else 0, excess, cost, length

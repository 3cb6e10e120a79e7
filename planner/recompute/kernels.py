"""Compiled inner loops of recomputation; importing this module loads LLVM.

A state gives every gap KEEP, DROP, DISCARD or OFFLOAD. `generate` makes the schedule that it stands for, and
`measure_above` finds its live bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from foreplan import jit
from foreplan.planner.memory.kernels import Count, make_count, measure
from foreplan.planner.recompute.arrays import DISCARD, KEEP, NEVER, OFFLOAD, Gaps

_RUNS = 4  # how many times as long as the order a schedule may be


class Scratch(NamedTuple):
    """Arrays that the kernels write, allocated once.

    Attributes:
        counting: the generated actions, and what counting their live bytes needs; its `live` serves here as well.
        places: of each generated action the position in the order that it runs for.
        host: of each value, whether there is a copy of it off the device; empty where nothing can be copied.
        gap: of each value, the gap that it is in.
        stack, batch: values being recomputed, and recomputed for the action at hand.
        above: how many steps need more than a target, up to each position.
    """

    counting: Count
    places: np.ndarray
    host: np.ndarray
    gap: np.ndarray
    stack: np.ndarray
    batch: np.ndarray
    above: np.ndarray


def make_scratch(gaps: Gaps) -> Scratch:
    """Room for schedules that are `_RUNS` times as long as the order."""
    values, steps = len(gaps.problem.size), _RUNS * len(gaps.order) + 64
    batch = values + _RUNS * int(gaps.problem.write_at[-1]) + 64
    hosts = values if np.any(gaps.save >= 0) else 0
    lengths = (steps, hosts, values, values + 1, batch, len(gaps.order) + 2)
    return Scratch(make_count(gaps.problem, steps), *(np.zeros(length, np.int64) for length in lengths))


@jit.compiled
def generate(t, s, state):  # type: ignore[no-untyped-def]
    """Write the schedule of a state to `steps` and `places`.

    Copies off the device come as late as they may: before what reads a value last, so that it may be overwritten.

    Returns:
        Its length, or -1 where something needed cannot be recomputed any more; and the cost of its further runs.
    """
    live, host, gap = s.counting.live, s.host, s.gap
    host[:] = 0
    copies = host.size > 0
    for v in range(t.problem.size.size):
        live[v] = t.problem.there[v] > 0
        gap[v] = -1
    room = s.counting.steps.size
    length, cost = 0, np.int64(0)
    for p in range(t.order.size):
        a = t.order[p]
        batch = 0
        skip = t.skippable[a] != 0
        if skip:
            for k in range(t.problem.write_at[a], t.problem.write_at[a + 1]):
                g = t.write_gap[k]
                if g < 0 or state[g] == KEEP or state[g] == OFFLOAD or t.gap_last[g] == t.order.size:
                    skip = False
                    break
        if not skip:
            for k in range(t.problem.read_at[a], t.problem.read_at[a + 1]):
                if live[t.problem.reads[k]]:
                    continue
                s.stack[0] = t.problem.reads[k]
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
                        for j in range(t.problem.read_at[m], t.problem.read_at[m + 1]):
                            u = t.problem.reads[j]
                            if not live[u] and (missing < 0 or t.made[u] < t.made[missing]):
                                missing = u
                    if missing >= 0:
                        if depth == s.stack.size:
                            return -1, cost
                        s.stack[depth] = missing
                        depth += 1
                        continue
                    if length == room or batch + t.problem.write_at[m + 1] - t.problem.write_at[m] > s.batch.size:
                        return -1, cost
                    s.counting.steps[length] = m
                    s.places[length] = p
                    length += 1
                    cost += t.cost[m]
                    for j in range(t.problem.write_at[m], t.problem.write_at[m + 1]):
                        live[t.problem.writes[j]] = 1
                        s.batch[batch] = t.problem.writes[j]
                        batch += 1
                    depth -= 1
        if copies:  # written out here and below: a function that takes all arrays would slow all this down
            for k in range(t.problem.read_at[a], t.problem.read_at[a + 1]):
                v, g = t.problem.reads[k], t.read_gap[k]
                if g >= 0 and state[g] == OFFLOAD and live[v] and not host[v]:
                    if length == room:
                        return -1, cost
                    host[v] = 1
                    s.counting.steps[length] = t.save[v]
                    s.places[length] = p
                    length += 1
                    cost += t.cost[t.save[v]]
        if skip:
            cost -= t.cost[a]
        else:
            if length == room:
                return -1, cost
            s.counting.steps[length] = a
            s.places[length] = p
            length += 1
        for k in range(t.problem.read_at[a], t.problem.read_at[a + 1]):
            g = t.read_gap[k]
            if g >= 0:
                gap[t.problem.reads[k]] = g
                if state[g] != KEEP:
                    live[t.problem.reads[k]] = 0
        for k in range(t.problem.write_at[a], t.problem.write_at[a + 1]):
            g = t.write_gap[k]
            live[t.problem.writes[k]] = 1
            if g >= 0:
                gap[t.problem.writes[k]] = g
                if state[g] != KEEP:
                    live[t.problem.writes[k]] = 0
                    if state[g] == OFFLOAD and not host[t.problem.writes[k]]:
                        if length == room:
                            return -1, cost
                        host[t.problem.writes[k]] = 1
                        s.counting.steps[length] = t.save[t.problem.writes[k]]
                        s.places[length] = p
                        length += 1
                        cost += t.cost[t.save[t.problem.writes[k]]]
        for k in range(t.destroy_at[a], t.destroy_at[a + 1]):
            live[t.destroys[k]] = 0
            gap[t.destroys[k]] = -1
        for k in range(batch):
            g = gap[s.batch[k]]
            if g >= 0 and state[g] == DISCARD:
                live[s.batch[k]] = 0
    return length, cost


@jit.compiled
def measure_above(t, s, length, target):  # type: ignore[no-untyped-def]
    """The live bytes of the schedule in `steps`, with what lives beside the values.

    Returns:
        The highest live set, the first step of it, and the bytes above `target`, summed over the steps.
    """
    highest, at = measure(t.problem, s.counting, length)
    if length == 0:
        return highest, at, max(highest - target, 0)
    highest, excess = np.int64(-1), np.int64(0)
    for step in range(length):
        s.counting.level[step] += t.background[s.places[step]]
        here = s.counting.level[step]
        if here > highest:
            highest, at = here, step
        excess += max(here - target, 0)
    return highest, at, excess


@jit.compiled
def evaluate(t, s, state, target):  # type: ignore[no-untyped-def]
    """Peak (NEVER where the state cannot be), position of the peak, bytes above target, cost, and steps."""
    length, cost = generate(t, s, state)
    if length < 0:
        return NEVER, 0, NEVER, cost, t.order.size
    highest, at, excess = measure_above(t, s, length, target)
    return highest, s.places[at] if length else 0, excess, cost, length


@jit.compiled
def measure_states(t, s, states, lengths, peaks, costs):  # type: ignore[no-untyped-def]
    """Of many states: the steps, the highest live set, and the cost of each; NEVER bytes where a state cannot be."""
    for i in range(lengths.size):
        lengths[i], costs[i] = generate(t, s, states[i])
        peaks[i] = NEVER
        if lengths[i] >= 0:
            peaks[i], _, _ = measure_above(t, s, lengths[i], 0)

"""Compiled estimates of what dropping or copying a value costs and brings; importing this loads LLVM."""

from __future__ import annotations

import numpy as np

from foreplan import jit
from foreplan.planner.recompute.arrays import KEEP, NEVER, OFFLOAD

# Constants of the compiled code: they are what an estimate is, and no limit of a search.
_DEEPEST = 32  # actions that are looked at for one price
_WAITING = 0.25  # what a value dropped already, that waits recomputed for its own use, still has to give


@jit.compiled
def available(t, state, v, position):  # type: ignore[no-untyped-def]
    """Whether a value is there at a position without being made again: it cannot be dropped, or is kept over it."""
    if t.own_at[v] == t.own_at[v + 1]:
        return True
    for k in range(t.own_at[v], t.own_at[v + 1]):
        g = t.own[k]
        if t.gap_first[g] <= position <= t.gap_last[g] and state[g] == KEEP:
            return True
    return False


@jit.compiled
def price(t, state, g, stack):  # type: ignore[no-untyped-def]
    """About what it costs to bring the value of a gap back at its end, with all that is missing for it: to recompute
    it, or to copy it from the host where another gap has it there. NEVER where it cannot be recomputed.
    """
    position = t.gap_last[g]
    stack[0] = t.gap_value[g]
    depth, seen, total = 1, 0, np.int64(0)
    while depth > 0 and seen < _DEEPEST:
        depth -= 1
        seen += 1
        v = stack[depth]
        if t.fetch[v] >= 0:
            out = False
            for k in range(t.own_at[v], t.own_at[v + 1]):
                out |= state[t.own[k]] == OFFLOAD and t.gap_first[t.own[k]] < position
            if out:
                total += t.cost[t.fetch[v]]
                continue
        m = t.maker[v]
        if m < 0:
            return NEVER
        total += t.cost[m]
        for k in range(t.problem.read_at[m], t.problem.read_at[m + 1]):
            if depth < stack.size and not available(t, state, t.problem.reads[k], position):
                stack[depth] = t.problem.reads[k]
                depth += 1
    return total


@jit.compiled
def following(t, state, g, stack):  # type: ignore[no-untyped-def]
    """The state of a gap in which less of its value is kept: copied off the device, or else dropped."""
    v = t.gap_value[g]
    copies = state[g] == KEEP and t.save[v] >= 0
    if copies and t.cost[t.save[v]] + t.cost[t.fetch[v]] < price(t, state, g, stack):
        return OFFLOAD
    return state[g] + 1


@jit.compiled
def gain(t, state, g, stack):  # type: ignore[no-untyped-def]
    """About the bytes that keeping less of the value of a gap gives, and what that costs, recomputed or copied.

    A value dropped already takes part only while it waits, recomputed, for its own use.
    """
    known, v = price(t, state, g, stack), t.gap_value[g]
    if state[g] == KEEP and t.save[v] >= 0:
        known = min(known, t.cost[t.save[v]] + t.cost[t.fetch[v]])
    share = 1.0 if state[g] == KEEP else _WAITING
    return share * t.problem.size[v], max(float(known), 1.0)


@jit.compiled
def count_above(t, s, length, target):  # type: ignore[no-untyped-def]
    """Into `above`: how many of the steps measured last need more than the target, up to each position."""
    s.above[:] = 0
    for step in range(length):
        if s.counting.level[step] > target:
            s.above[s.places[step] + 1] += 1
    for position in range(t.order.size):
        s.above[position + 1] += s.above[position]


@jit.compiled
def worth(t, s, state, g):  # type: ignore[no-untyped-def]
    """About how many bytes above the target dropping or copying the value over a gap saves, over all steps, a cost."""
    steps = s.above[t.gap_last[g]] - s.above[t.gap_first[g] + 1]
    nbytes, known = gain(t, state, g, s.stack)
    return nbytes * steps / known

"""Compiled inner loops of the search for orders; importing this module imports Numba.

A set of nodes that holds, with each node, all that must precede it decides which values live after it has run, so the
state of a search is that set. What a node needs while it runs is found by the rules of `alias` and `bound`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from foreplan import jit
from foreplan.planner.order.arrays import OrderTape

NEVER = np.int64(1) << np.int64(60)


class State(NamedTuple):
    """What has run so far; the kernels change it.

    Attributes:
        left: of each value, the readers that have not run.
        waiting: of each node, the nodes before it that have not run.
        eager: likewise, patient ones not counted.
        ready: nodes that can run, in the first `ready_count[0]` places.
        place: of each ready node, where in `ready` it is.
        ready_count: how many are ready.
        done: whether each node has run.
        over: of each value, whether it takes the bytes of a read of the node at hand.
        taken: of each value, whether the node at hand gives its bytes to a write.
    """

    left: np.ndarray
    waiting: np.ndarray
    eager: np.ndarray
    ready: np.ndarray
    place: np.ndarray
    ready_count: np.ndarray
    done: np.ndarray
    over: np.ndarray
    taken: np.ndarray


def make_state(tape: OrderTape) -> State:
    """Room for the state of a search."""
    nodes, values = len(tape.workspace), len(tape.size)
    lengths = [values, nodes, nodes, nodes, nodes, 1, nodes, values, values]
    return State(*(np.zeros(length, np.int64) for length in lengths))


@jit.compiled
def begin(t, s):  # type: ignore[no-untyped-def]
    """Nothing has run; returns the live bytes that this begins with."""
    s.left[:] = t.readers
    s.ready_count[0] = 0
    s.done[:] = 0
    for node in range(s.waiting.size):
        s.waiting[node] = t.before_at[node + 1] - t.before_at[node]
        s.eager[node] = 0
        for k in range(t.before_at[node], t.before_at[node + 1]):
            s.eager[node] += t.event_at[t.before[k]] == t.event_at[t.before[k] + 1]
        if s.waiting[node] == 0:
            s.place[node] = s.ready_count[0]
            s.ready[s.ready_count[0]] = node
            s.ready_count[0] += 1
    return t.base + t.given


@jit.compiled
def weigh(t, s, node):  # type: ignore[no-untyped-def]
    """Bytes that a ready node needs beyond those live before it, and by how many the live bytes grow.

    Whether a write takes more bytes than it needs depends on how long it lives, which is not known yet: the figure of
    such a node is the least it can be.
    """
    hill, growth = t.workspace[node], np.int64(0)
    for k in range(t.write_at[node], t.write_at[node + 1]):
        v = t.writes[k]
        hill += t.size[v]
        if t.readers[v] > 0 or t.kept[v]:
            growth += t.size[v]
    first, last = t.pair_at[node], t.pair_at[node + 1]
    for k in range(first, last):
        write, read = t.pair_write[k], t.pair_read[k]
        free = t.loose[node] or not s.taken[read]
        if t.pair_required[k] or (not s.over[write] and free and s.left[read] == 1):
            hill -= t.size[write] * (1 - s.over[write])
            s.over[write] = 1
            s.taken[read] = 1
    for k in range(first, last):
        s.over[t.pair_write[k]] = 0
        s.taken[t.pair_read[k]] = 0
    for k in range(t.read_at[node], t.read_at[node + 1]):
        if s.left[t.reads[k]] == 1:
            growth -= t.size[t.reads[k]]
    return hill, growth


@jit.compiled
def run(t, s, node):  # type: ignore[no-untyped-def]
    """Let a ready node have run."""
    for k in range(t.read_at[node], t.read_at[node + 1]):
        s.left[t.reads[k]] -= 1
    s.ready_count[0] -= 1
    last = s.ready[s.ready_count[0]]
    s.ready[s.place[node]] = last
    s.place[last] = s.place[node]
    eager = np.int64(t.event_at[node] == t.event_at[node + 1])
    s.done[node] = 1
    for k in range(t.after_at[node], t.after_at[node + 1]):
        later = t.after[k]
        s.waiting[later] -= 1
        s.eager[later] -= eager
        if s.waiting[later] == 0:
            s.place[later] = s.ready_count[0]
            s.ready[s.ready_count[0]] = later
            s.ready_count[0] += 1


@jit.compiled
def undo(t, s, node, place):  # type: ignore[no-untyped-def]
    """Take back the latest `run`, of a node that was at this place among the ready ones."""
    for k in range(t.read_at[node], t.read_at[node + 1]):
        s.left[t.reads[k]] += 1
    eager = np.int64(t.event_at[node] == t.event_at[node + 1])
    s.done[node] = 0
    for k in range(t.after_at[node], t.after_at[node + 1]):
        later = t.after[k]
        if s.waiting[later] == 0:
            s.ready_count[0] -= 1
        s.waiting[later] += 1
        s.eager[later] += eager
    if place < s.ready_count[0]:
        moved = s.ready[place]
        s.ready[s.ready_count[0]] = moved
        s.place[moved] = s.ready_count[0]
    s.ready[place] = node
    s.place[node] = place
    s.ready_count[0] += 1


@jit.compiled
def measure(t, order, live):  # type: ignore[no-untyped-def]
    """Write the live bytes at each step of a whole order to `live`; returns the highest."""
    n = order.size
    last = np.zeros(t.size.size, np.int64)
    for step in range(n):
        for k in range(t.write_at[order[step]], t.write_at[order[step] + 1]):
            last[t.writes[k]] = step
    for step in range(n):
        for k in range(t.read_at[order[step]], t.read_at[order[step] + 1]):
            last[t.reads[k]] = step
    level, highest = t.base + t.given, np.int64(0)
    over = np.zeros(t.size.size, np.int8)
    taken = np.zeros(t.size.size, np.int8)
    for step in range(n):
        node = order[step]
        hill = t.workspace[node] + (t.unread if step == 0 else 0)
        growth = np.int64(0)
        for k in range(t.pair_at[node], t.pair_at[node + 1]):
            write, read = t.pair_write[k], t.pair_read[k]
            if not t.pair_required[k]:
                if over[write] or taken[read] or last[read] != step:
                    continue
                lives = n - step - 1 if t.kept[write] else last[write] - step
                if t.pair_wasted[k] * lives > t.nbytes[write]:
                    continue
            over[write] = 1
            taken[read] = 1
        for k in range(t.pair_at[node], t.pair_at[node + 1]):
            taken[t.pair_read[k]] = 0
        for k in range(t.write_at[node], t.write_at[node + 1]):
            v = t.writes[k]
            if not over[v]:
                hill += t.size[v]
            over[v] = 0
            if t.readers[v] > 0 or t.kept[v]:
                growth += t.size[v]
        for k in range(t.read_at[node], t.read_at[node + 1]):
            if last[t.reads[k]] == step:
                growth -= t.size[t.reads[k]]
        live[step] = level + hill
        highest = max(highest, live[step])
        level += growth
    return highest


HARDEST = 16  # steps of an order whose nodes `unavoidable` looks at


@jit.compiled
def unavoidable(t, order, live):  # type: ignore[no-untyped-def]
    """Bytes that every order needs: while a node runs, what was written before it of necessity and must be read then or
    later of necessity lives; found for the nodes that need the most in one order.

    Args:
        order: any; `live`: its live bytes.
    """
    n = order.size
    writer = np.full(t.size.size, -1, np.int64)
    for node in range(n):
        for k in range(t.write_at[node], t.write_at[node + 1]):
            writer[t.writes[k]] = node
    step_of = np.zeros(n, np.int64)
    for step in range(n):
        step_of[order[step]] = step
    highest = np.int64(0)
    steps = np.argsort(-live, kind="mergesort")[:HARDEST]
    needed = np.zeros(t.size.size, np.int8)
    for at in steps:
        node = order[at]
        side = np.zeros(n, np.int8)
        side[node] = 2
        for step in range(at, n):
            x = order[step]
            if side[x] == 2:
                for k in range(t.after_at[x], t.after_at[x + 1]):
                    side[t.after[k]] = 2
        for step in range(at, -1, -1):
            x = order[step]
            if x == node or side[x] == 1:
                for k in range(t.before_at[x], t.before_at[x + 1]):
                    side[t.before[k]] = 1
        needed[:] = 0
        for x in range(n):
            if side[x] == 2:
                for k in range(t.read_at[x], t.read_at[x + 1]):
                    needed[t.reads[k]] = 2 if x != node or needed[t.reads[k]] == 2 else 1
        total = t.base + t.workspace[node]
        for v in range(t.size.size):
            w = writer[v]
            if (needed[v] and w < 0) or (w >= 0 and side[w] == 1 and (needed[v] or (t.kept[v]))):
                total += t.size[v]
        for k in range(t.write_at[node], t.write_at[node + 1]):
            v = t.writes[k]
            fresh = True
            for j in range(t.pair_at[node], t.pair_at[node + 1]):
                if t.pair_write[j] == v and needed[t.pair_read[j]] != 2:
                    fresh = False
            if fresh:
                total += t.size[v]
        highest = max(highest, total)
    return highest

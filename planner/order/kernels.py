"""Compiled inner loops of the search for orders; importing this module loads LLVM.

The nodes that have run decide which values live, in whatever order they ran. So the state of a search is this set of
nodes. `weigh` counts the bytes that a node needs while it runs as `memory.kernels.measure` does.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from foreplan import jit
from foreplan.planner.memory.arrays import STORED
from foreplan.planner.memory.kernels import Sharing, copy, make_sharing, measure, shared
from foreplan.planner.order.arrays import STAYS, OrderArrays

NEVER = np.int64(1) << np.int64(60)


class State(NamedTuple):
    """What has run so far; the kernels change it.

    Attributes:
        left: of each value, the readers that have not run.
        waiting: of each node, the nodes before it that have not run.
        eager: likewise, without patient nodes.
        ready: nodes that can run, in the first `ready_count[0]` places.
        place: of each ready node, where in `ready` it is.
        ready_count: how many are ready.
        done: whether each node has run.
        sharing: room for `shared`.
    """

    left: np.ndarray
    waiting: np.ndarray
    eager: np.ndarray
    ready: np.ndarray
    place: np.ndarray
    ready_count: np.ndarray
    done: np.ndarray
    sharing: Sharing


def make_state(t: OrderArrays) -> State:
    """Room for the state of a search."""
    nodes, values = len(t.action), len(t.problem.size)
    lengths = [values, nodes, nodes, nodes, nodes, 1, nodes]
    return State._make([*(np.zeros(length, np.int64) for length in lengths), make_sharing(t.problem)])


@jit.compiled
def begin(t, s):  # type: ignore[no-untyped-def]
    """Begin with nothing that has run; returns the live bytes at this point."""
    copy(t.readers, s.left, s.left.size)
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
    """Bytes that a ready node needs beyond those live before it, and by how many the live bytes grow."""
    p, a = t.problem, t.action[node]
    hill, growth = p.workspace[a], np.int64(0)
    reads = p.read_at[a]
    for k in range(p.write_at[a], p.write_at[a + 1]):
        v = p.writes[k]
        hill += p.size[v]
        if t.readers[v] > 0:
            growth += p.size[v]
    if p.share_at[a] < p.share_at[a + 1]:
        for k in range(reads, p.read_at[a + 1]):
            s.sharing.free[k - reads] = s.left[p.reads[k]] == 1
        hill -= shared(p, s.sharing, a)
    for k in range(reads, p.read_at[a + 1]):
        if s.left[p.reads[k]] == 1:
            growth -= p.size[p.reads[k]]
    return hill, growth


@jit.compiled
def run(t, s, node):  # type: ignore[no-untyped-def]
    """Run a ready node."""
    p, a = t.problem, t.action[node]
    for k in range(p.read_at[a], p.read_at[a + 1]):
        s.left[p.reads[k]] -= 1
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
    p, a = t.problem, t.action[node]
    for k in range(p.read_at[a], p.read_at[a + 1]):
        s.left[p.reads[k]] += 1
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
def live_bytes(t, c, order, live):  # type: ignore[no-untyped-def]
    """Write the live bytes at each step of a whole order to `live`; returns the highest."""
    for step in range(order.size):
        c.steps[step] = t.action[order[step]]
    highest, _ = measure(t.problem, c, order.size)
    copy(c.level, live, order.size)
    return highest


@jit.compiled
def unavoidable(t, order, steps):  # type: ignore[no-untyped-def]
    """Bytes that every order needs, found for some nodes: best for those that need the most in one order. While a node
    runs, a value lives if its writer must run before the node, and the node, or one that must follow it, reads it.

    Args:
        order: any.
        steps: those whose nodes are looked at.
    """
    n = order.size
    p = t.problem
    writer = np.full(p.size.size, -1, np.int64)
    for node in range(n):
        a = t.action[node]
        for k in range(p.write_at[a], p.write_at[a + 1]):
            writer[p.writes[k]] = node
    step_of = np.zeros(n, np.int64)
    for step in range(n):
        step_of[order[step]] = step
    highest = np.int64(0)
    needed = np.zeros(p.size.size, np.int8)
    over = np.zeros(p.size.size + 1, np.int8)
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
                a = t.action[x]
                for k in range(p.read_at[a], p.read_at[a + 1]):
                    needed[p.reads[k]] = 2 if x != node or needed[p.reads[k]] == 2 else 1
        a = t.action[node]
        total = t.base + p.workspace[a]
        for v in range(p.size.size):
            w = writer[v]
            if w >= 0:
                total += p.size[v] if side[w] == 1 and (needed[v] or p.output[v]) else 0
            elif needed[v] and p.there[v] != STORED:
                total += p.size[v]
        for k in range(p.write_at[a], p.write_at[a + 1]):
            total += p.size[p.writes[k]]
            over[k - p.write_at[a]] = 0
        for k in range(p.share_at[a], p.share_at[a + 1]):
            write, old = p.share_write[k], p.reads[p.read_at[a] + p.share_read[k]]
            if t.readers[old] < STAYS and needed[old] != 2 and (write < 0 or not over[write]):
                total -= p.share_bytes[k]
                if write >= 0:
                    over[write] = 1
        highest = max(highest, total)
    return highest

"""Compiled search for an order whose live bytes stay within a ceiling; importing this module loads LLVM.

Depth first over sets of nodes that have run, each set once. Two rules of dominance make it narrow:
- A node runs at once if no more bytes live after it than before, and it stays within the ceiling while it runs: at the
  front of any order, it makes no other node need more.
- A patient node waits until a node that must follow it, or that reads one of its reads, may come next.
The first rule is Liu's ("An application of generalized tree pebbling to sparse matrix factorization", SIAM J. Algebraic
Discrete Methods 1987), here for graphs. Visiting each set once is the dynamic programming over antichains of Ahn et
al., "Ordering Chaos: Memory-Aware Scheduling of Irregularly Wired Neural Networks for Edge Devices" (SERENITY), MLSys
2020, whose search has a budget of bytes as well.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from foreplan import jit
from foreplan.planner.memory.kernels import copy
from foreplan.planner.order.kernels import NEVER, begin, live_bytes, run, undo, weigh

FOUND, NONE, UNKNOWN = 1, 0, -1  # a search found an order within the ceiling, proved that there is none, or neither
_CHOICES = 1 << 20  # room on the stack of choices


class Visited(NamedTuple):
    """Sets that the search has visited.

    Attributes:
        table: index into `sets` plus one, by hash; 0 for none.
        sets: bits of the nodes that have run, a row a set.
        used: how many sets there are.
        keys: of each node, a random number: the hash of a set is the XOR of its nodes' numbers.
    """

    table: np.ndarray
    sets: np.ndarray
    used: np.ndarray
    keys: np.ndarray


def make_visited(nodes: int, most: int) -> Visited:
    """Room for at most the given number of sets of nodes."""
    keys = np.random.Generator(np.random.PCG64(0)).integers(0, 1 << 63, nodes, np.int64)
    table = 1 << int(2 * most - 1).bit_length()
    return Visited(
        np.zeros(table, np.int64), np.zeros((most, (nodes + 63) // 64), np.uint64), np.zeros(1, np.int64), keys
    )


@jit.compiled
def visit(visited, bits, key):  # type: ignore[no-untyped-def]
    """Whether a set is new; stores it if there is room."""
    table, sets = visited.table, visited.sets
    slot = key & (table.size - 1)
    while table[slot]:
        row = table[slot] - 1
        same = True
        for word in range(bits.size):
            if sets[row, word] != bits[word]:
                same = False
                break
        if same:
            return False
        slot = (slot + 1) & (table.size - 1)
    row = visited.used[0]
    if row < sets.shape[0]:
        copy(bits, sets[row], bits.size)
        table[slot] = row + 1
        visited.used[0] += 1
    return True


@jit.compiled
def due(t, s, node):  # type: ignore[no-untyped-def]
    """Whether a node need not wait: it is not patient, frees something, or a node that it waits for may come next."""
    if t.event_at[node] == t.event_at[node + 1]:
        return True
    p, a = t.problem, t.action[node]
    for k in range(p.read_at[a], p.read_at[a + 1]):
        if s.left[p.reads[k]] == 1:
            return True
    for k in range(t.event_at[node], t.event_at[node + 1]):
        if not s.done[t.events[k]] and s.eager[t.events[k]] == 0:
            return True
    return False


@jit.compiled
def choose(t, s, level, ceiling, local, rank, exact, choices, top):  # type: ignore[no-untyped-def]
    """Put the nodes that may run next on the stack of choices, the best last.

    Returns:
        How many there are; whether it is a single node that dominates all others; the fewest bytes that a refused node
        needs, above the ceiling; the work done.
    """
    count, least, work = 0, NEVER, np.int64(0)
    best, best_rank = -1, NEVER
    for i in range(s.ready_count[0]):
        node = s.ready[i]
        if local[node] < 0:
            continue
        hill, growth = weigh(t, s, node)
        work += 1
        if level + hill > ceiling:
            least = min(least, level + hill)
            continue
        if not exact:
            if growth <= 0:
                if rank[node] < best_rank:
                    best, best_rank = node, rank[node]
                continue
            if not due(t, s, node):
                continue
        if best >= 0:
            continue
        j = top + count
        while j > top and rank[choices[j - 1]] < rank[node]:
            choices[j] = choices[j - 1]
            j -= 1
        choices[j] = node
        count += 1
    if best >= 0:
        choices[top] = best
        return 1, True, least, work
    return count, False, least, work


@jit.compiled
def search(t, s, c, visited, order, low, high, rank, ceiling, exact, most_work):  # type: ignore[no-untyped-def]
    """Look for an order of the nodes at [low, high) of `order` that needs no more than a ceiling; write it there.

    Args:
        rank: of each node; the lowest is tried first.
        exact: use no rule of dominance, and judge whole orders by `live_bytes`.

    Returns:
        FOUND, NONE or UNKNOWN; if NONE, bytes that every order needs; the work done.
    """
    visited.table[:] = 0
    visited.used[0] = 0
    level = begin(t, s)
    if level + t.unread > ceiling:
        return NONE, level + t.unread, np.int64(0)
    for step in range(low):
        _, growth = weigh(t, s, order[step])
        level += growth
        run(t, s, order[step])
    n = high - low
    local = np.full(rank.size, -1, np.int64)
    for step in range(low, high):
        local[order[step]] = step - low
    bits = np.zeros((n + 63) // 64, np.uint64)
    key = np.int64(0)
    path, place, levels = np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros(n + 1, np.int64)
    tops = np.zeros(n + 1, np.int64)
    choices = np.empty(_CHOICES, np.int64)
    whole = order.copy()
    live = np.zeros(order.size, np.int64)
    depth, top, least, work = 0, 0, NEVER, np.int64(0)
    levels[0] = level
    fresh = True
    while True:
        if fresh:
            if depth == n:
                highest = ceiling
                if exact:
                    copy(path, whole[low:], n)
                    highest = live_bytes(t, c, whole, live)
                if highest <= ceiling:
                    copy(path, order[low:], n)
                    return FOUND, NEVER, work
                least = min(least, highest)
                count = 0
            elif top + s.ready_count[0] >= _CHOICES or work > most_work:
                return UNKNOWN, ceiling, work
            else:
                count, alone, over, more = choose(t, s, levels[depth], ceiling, local, rank, exact, choices, top)
                least = min(least, over)
                work += more
                if not alone and not exact and not visit(visited, bits, key):
                    count = 0
            tops[depth] = top
            top += count
            fresh = False
        if top == tops[depth]:
            if depth == 0:
                return NONE, least, work
            depth -= 1
            node = path[depth]
            undo(t, s, node, place[depth])
            bits[local[node] >> 6] ^= np.uint64(1) << np.uint64(local[node] & 63)
            key ^= visited.keys[local[node]]
            continue
        top -= 1
        node = choices[top]
        _, growth = weigh(t, s, node)
        path[depth] = node
        place[depth] = s.place[node]
        run(t, s, node)
        bits[local[node] >> 6] ^= np.uint64(1) << np.uint64(local[node] & 63)
        key ^= visited.keys[local[node]]
        depth += 1
        levels[depth] = levels[depth - 1] + growth
        fresh = True

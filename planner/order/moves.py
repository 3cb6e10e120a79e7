"""Compiled local search on orders: one node at a time moves across the peak; importing this module loads LLVM."""

from __future__ import annotations

import numpy as np

from foreplan import jit
from foreplan.planner.order.kernels import NEVER, begin, live_bytes, run, undo, weigh


@jit.compiled
def replay(t, s, order, low, high, level, limit, places):  # type: ignore[no-untyped-def]
    """The highest live bytes over the steps [low, high) and how often they are reached; NEVER if the order is not
    possible or exceeds a limit. The state is left as it was."""
    highest, times, step = np.int64(0), 0, low
    while step < high:
        node = order[step]
        if s.waiting[node]:
            highest = NEVER
            break
        hill, growth = weigh(t, s, node)
        needs = level + hill
        if needs > limit:
            highest = NEVER
            break
        times = times + 1 if needs == highest else (1 if needs > highest else times)
        highest = max(highest, needs)
        level += growth
        places[step] = s.place[node]
        run(t, s, node)
        step += 1
    while step > low:
        step -= 1
        undo(t, s, order[step], places[step])
    return highest, times


@jit.compiled
def shift(order, start, end):  # type: ignore[no-untyped-def]
    """Move the node at `start` to `end`, and those between by one."""
    node = order[start]
    step = 1 if end > start else -1
    for i in range(start, end, step):
        order[i] = order[i + step]
    order[end] = node


@jit.compiled
def move_across_peak(t, s, c, order, width, most_work):  # type: ignore[no-untyped-def]
    """Lower the peak as long as moving one node from before it to behind it, or the other way, does; in place.

    First improvement, from the nodes next to the peak outwards, on what is highest near the peak and how often: hill
    climbing by insertion, as in single-machine scheduling (e.g. Reeves, "Landscapes, operators and heuristic search",
    Annals of Operations Research 1999).

    Returns:
        The work done.
    """
    n = order.size
    live = np.zeros(n, np.int64)
    places = np.zeros(n, np.int64)
    work = np.int64(0)
    while work < most_work:
        live_bytes(t, c, order, live)
        work += n
        peak = int(np.argmax(live))
        low, high = max(peak - width, 0), min(peak + width + 1, n)
        level = begin(t, s)
        for step in range(low):
            _, growth = weigh(t, s, order[step])
            level += growth
            run(t, s, order[step])
        highest, times = replay(t, s, order, low, high, level, NEVER, places)
        moved = False
        for distance in range(width + 1):
            for side in range(2):
                start = peak - distance if side == 0 else peak + distance
                if start < low or start >= high or moved:
                    continue
                step = -1 if side == 0 else 1  # ends on the far side of the peak come first
                for end in range(high - 1 if side == 0 else low, low - 1 if side == 0 else high, step):
                    across = end >= peak if side == 0 else end <= peak
                    if end == start or not (across or distance == 0):
                        continue
                    shift(order, start, end)
                    first, last = min(start, end), max(start, end) + 1
                    found, often = replay(t, s, order, low, high, level, highest, places)
                    work += last - first
                    if found < highest or (found == highest and often < times):
                        moved = True
                        break
                    shift(order, end, start)
                    if work >= most_work:
                        return work
        if not moved:
            break
    return work

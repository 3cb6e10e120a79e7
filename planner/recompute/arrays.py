"""Gaps: a problem and one order of its actions as integer arrays, with the choices that recomputation has.

Between two consecutive uses of a value (its write counts as the first) lies a gap. Over each gap the value is kept, or
dropped and recomputed when it is needed again. After its last use comes a tail: there it may serve to recompute others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from foreplan.planner.memory.arrays import Arrays, problem_arrays
from foreplan.planner.problem import Action, Problem, Role
from foreplan.planner.rows import array, flat, slices

# States of a gap. A value dropped may be recomputed early, because another is recomputed from it: then it stays until
# its next use (DROP), or goes again (DISCARD). OFFLOAD is DROP of a value that was copied off the device before: from
# then on it is copied back and not recomputed, whenever it is needed.
KEEP, DROP, DISCARD, OFFLOAD = 0, 1, 2, 3
NEVER = np.int64(1) << np.int64(60)  # bytes or cost of what cannot be


class Gaps(NamedTuple):
    """The gaps of one order: arrays over actions (as the problem numbers them), values, gaps; `_at` arrays have one
    entry more: slices.

    Attributes:
        problem: its actions and values.
        order: the actions in base order.
        destroy_at, destroys: values that are gone once an action has run: it must overwrite them, or it replaces them
            at home.
        cost: what another run of an action costs.
        deadline: the last position at which an action may run again.
        background: bytes that live at each position beside the values.
        maker: of each value, the cheapest action that may run again to write it, or -1. Outputs have no gaps: they are
            made again by sequences of runs only.
        made: position in the order of the action that writes each value first.
        save, fetch: the actions that copy each value off the device and back, or -1.
        skippable: whether an action may be left out where all that it writes is dropped at once.
        read_gap: the gap after each read (aligned with `reads`), or -1.
        write_gap: the gap after each write (aligned with `writes`), or -1.
        gap_value, gap_first, gap_last: of each gap: its value, the positions of the uses around it (the number of
            actions for a tail's end).
        own_at, own: the gaps of each value, in order.
    """

    problem: Arrays
    order: np.ndarray
    destroy_at: np.ndarray
    destroys: np.ndarray
    cost: np.ndarray
    deadline: np.ndarray
    background: np.ndarray
    maker: np.ndarray
    made: np.ndarray
    save: np.ndarray
    fetch: np.ndarray
    skippable: np.ndarray
    read_gap: np.ndarray
    write_gap: np.ndarray
    gap_value: np.ndarray
    gap_first: np.ndarray
    gap_last: np.ndarray
    own_at: np.ndarray
    own: np.ndarray


def make_gaps(
    problem: Problem, order: Sequence[int], cost: Sequence[int], smallest: int, *, again: bool = True
) -> Gaps:
    """The gaps of an order; values below `smallest` bytes get no gaps, so they stay until their last use.

    Args:
        again: whether values may be recomputed; else they may only be copied off the device and back.
    """
    p, values, actions = problem_arrays(problem), problem.values, problem.actions
    destroys = [
        sorted({a.reads[pair.read] for pair in a.overwrites if pair.required} | _homes(problem, a.writes))
        for a in actions
    ]
    maker, skippable = _makers(problem, order, cost, again)
    trips = {v: pair for v, pair in problem.round_trips.items() if not values[v].kept}
    save, fetch = (array(trips.get(v, (-1, -1))[i] for v in range(len(values))) for i in range(2))
    big = [
        max(m, out) >= 0 and s >= max(smallest, 1) and value.role is Role.TRANSIENT
        for m, out, s, value in zip(maker, save, p.size, values)
    ]
    read_gap, write_gap, (value, first, last) = _gaps(problem, order, big, p.read_at, p.write_at)
    return Gaps(
        p,
        array(order),
        slices(destroys),
        flat(destroys),
        array(cost),
        np.full(len(actions), len(order), np.int64),
        np.zeros(len(order), np.int64),
        array(maker),
        array(_made(problem, order)),
        save,
        fetch,
        array(skippable),
        read_gap,
        write_gap,
        array(value),
        array(first),
        array(last),
        np.searchsorted(np.sort(value), np.arange(len(values) + 1)).astype(np.int64),
        np.argsort(array(value), kind="stable").astype(np.int64),
    )


def _homes(problem: Problem, writes: Iterable[int]) -> set[int]:
    return {problem.values[v].home for v in writes if problem.values[v].home >= 0}


def may_run_again(problem: Problem, action: Action) -> bool:
    """Whether an action leaves all else as it is when it runs once more, makes nothing that is kept, and neither makes
    nor needs what the problem has again as another value.
    """
    makes = [problem.values[v] for v in action.writes]
    takes = any(pair.required for pair in action.overwrites)
    bound = any(value.home >= 0 or value.kept for value in makes)
    return not (action.effect or takes or bound) and problem.originals.isdisjoint((*action.reads, *action.writes))


def plain_state(gaps: Gaps) -> np.ndarray:
    """The state that recomputes nothing, int64[gaps]: everything is kept until its last use. A value that cannot be
    recomputed stays longer, for others that may be recomputed from it.
    """
    tail = gaps.gap_last == len(gaps.order)
    return np.where(tail & (gaps.maker[gaps.gap_value] >= 0), DISCARD, KEEP).astype(np.int64)


def _makers(problem: Problem, order: Sequence[int], cost: Sequence[int], again: bool) -> tuple[list[int], list[bool]]:
    """For each value the cheapest action that may run more than once, and whether each action may be left out."""
    may = [again and may_run_again(problem, action) for action in problem.actions]
    maker = [-1] * len(problem.values)
    written: set[int] = set()
    for index in order:
        written.update(problem.actions[index].writes)
    reachable = written | {v for v, value in enumerate(problem.values) if value.role in (Role.INPUT, Role.STORED)}
    for v in sorted(written):
        if problem.values[v].role not in (Role.TRANSIENT, Role.OUTPUT) or problem.values[v].home >= 0:
            continue
        usable = [i for i in problem.producers[v] if may[i] and reachable.issuperset(problem.actions[i].reads)]
        maker[v] = min(usable, key=lambda i: (cost[i], i), default=-1)
    ran = set(order)
    skippable = [
        i in ran and may[i] and all(maker[v] == i for v in action.writes) for i, action in enumerate(problem.actions)
    ]
    return maker, skippable


def _made(problem: Problem, order: Sequence[int]) -> list[int]:
    made = [-1] * len(problem.values)
    for position in reversed(range(len(order))):
        for v in problem.actions[order[position]].writes:
            made[v] = position
    return made


def _gaps(
    problem: Problem, order: Sequence[int], big: list[bool], read_at: np.ndarray, write_at: np.ndarray
) -> tuple[np.ndarray, np.ndarray, tuple[list[int], list[int], list[int]]]:
    read_gap, write_gap = np.full(read_at[-1], -1, np.int64), np.full(write_at[-1], -1, np.int64)
    value: list[int] = []
    first: list[int] = []
    last: list[int] = []
    open_gap: dict[int, int] = {}

    def use(v: int, position: int) -> int:
        if v in open_gap:
            last[open_gap[v]] = position
        open_gap[v] = len(value)
        value.append(v)
        first.append(position)
        last.append(len(order))
        return open_gap[v]

    for position, index in enumerate(order):
        action = problem.actions[index]
        for slot, v in enumerate(action.reads, int(read_at[index])):
            if big[v]:
                read_gap[slot] = use(v, position)
        for slot, v in enumerate(action.writes, int(write_at[index])):
            if big[v] and v not in open_gap:
                write_gap[slot] = use(v, position)
    return read_gap, write_gap, (value, first, last)

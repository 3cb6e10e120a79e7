"""Tape: a problem and one order of its actions as integer arrays, with the choices that recomputation has.

Between two consecutive uses of a value (its write counts as the first) lies a gap. Over each gap the value may be
kept, or dropped and recomputed when it is needed again. After its last use comes a tail: there a value may still serve
to recompute others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from foreplan.planner.memory.bounds import granularities
from foreplan.planner.problem import ALIGNMENT, Problem, Role
from foreplan.planner.rows import array, flat, slices
from foreplan.units import align_up

# States of a gap. A value dropped may be recomputed early, because another is recomputed from it: then it stays until
# its next use (DROP), or goes again (DISCARD). OFFLOAD is DROP of a value that was copied off the device before: from
# then on it is copied back and not recomputed, whenever it is needed.
KEEP, DROP, DISCARD, OFFLOAD = 0, 1, 2, 3
NEVER = np.int64(1) << np.int64(60)  # bytes or cost of what cannot be


class Tape(NamedTuple):
    """Arrays over actions (as the problem numbers them), values, gaps; `_at` arrays have one entry more: slices.

    Attributes:
        order: the actions in base order.
        read_at, reads: values each action reads.
        write_at, writes: values each action writes.
        pair_at, pair_write, pair_read, pair_required: its overwrites that concern the live bytes, by slots.
        destroy_at, destroys: values that are gone once it has run: overwritten of necessity, or replaced at home.
        workspace: bytes on the device while an action runs.
        cost: what another run of an action costs.
        deadline: the last position for which an action may run again.
        background: bytes that live at each position beside the values.
        size: bytes on the device of each value, rounded; 0 for next contents at home and on the host.
        nbytes: plain size of each value.
        rounded: the same, rounded to the alignment of buffers.
        there: whether a value is there from the start (1), and throughout (2).
        output: whether it must be there at the end.
        maker: the cheapest action that may run again to write it, or -1.
        made: position in the order of the action that writes each value first.
        save, fetch: the actions that copy each value off the device and back, or -1.
        skippable: whether an action may be left out where all that it writes is dropped at once.
        read_gap: the gap after each read (aligned with `reads`), or -1.
        write_gap: the gap after each write (aligned with `writes`), or -1.
        gap_value, gap_first, gap_last: of each gap: its value, the positions of the uses around it (the number of
            actions for a tail's end).
        own_at, own: the gaps of each value, in order.
    """

    order: np.ndarray
    read_at: np.ndarray
    reads: np.ndarray
    write_at: np.ndarray
    writes: np.ndarray
    pair_at: np.ndarray
    pair_write: np.ndarray
    pair_read: np.ndarray
    pair_required: np.ndarray
    destroy_at: np.ndarray
    destroys: np.ndarray
    workspace: np.ndarray
    cost: np.ndarray
    deadline: np.ndarray
    background: np.ndarray
    size: np.ndarray
    nbytes: np.ndarray
    rounded: np.ndarray
    there: np.ndarray
    output: np.ndarray
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


def make_tape(
    problem: Problem, order: Sequence[int], cost: Sequence[int], smallest: int, *, again: bool = True
) -> Tape:
    """The tape of an order; values below `smallest` bytes get no gaps, so they stay until their last use.

    Args:
        again: whether anything may be recomputed; else values can be copied off the device and back at most.
    """
    grain = granularities(problem)
    on_device = [region.on_device for region in problem.regions]
    values, actions = problem.values, problem.actions
    size = [align_up(v.nbytes, grain[v.region]) if v.home < 0 and on_device[v.region] else 0 for v in values]
    workspace = [align_up(a.workspace, grain[a.workspace_region]) * on_device[a.workspace_region] for a in actions]
    pairs: list[list[tuple[int, int, int]]] = []
    destroys: list[list[int]] = []
    for a in actions:
        kept = [(p.write, p.read, int(p.required)) for p in a.overwrites if values[a.writes[p.write]].home < 0]
        pairs.append([pair for pair in kept if pair[2] or values[a.reads[pair[1]]].home < 0])
        destroys.append(sorted({a.reads[p.read] for p in a.overwrites if p.required} | _homes(problem, a.writes)))
    maker, skippable = _makers(problem, order, cost, again)
    save, fetch = (array(problem.round_trips.get(v, (-1, -1))[i] for v in range(len(values))) for i in range(2))
    reads, writes = [a.reads for a in actions], [a.writes for a in actions]
    read_at, write_at = slices(reads), slices(writes)
    big = [max(m, out) >= 0 and s >= max(smallest, 1) for m, out, s in zip(maker, save, size)]
    read_gap, write_gap, (value, first, last) = _gaps(problem, order, big, read_at, write_at)
    pair_write, pair_read, pair_required = (array(pair[i] for row in pairs for pair in row) for i in range(3))
    return Tape(
        array(order),
        read_at,
        flat(reads),
        write_at,
        flat(writes),
        slices(pairs),
        pair_write,
        pair_read,
        pair_required,
        slices(destroys),
        flat(destroys),
        array(workspace),
        array(cost),
        np.full(len(actions), len(order), np.int64),
        np.zeros(len(order), np.int64),
        array(size),
        array(v.nbytes for v in values),
        array(align_up(v.nbytes, ALIGNMENT) for v in values),
        array({Role.INPUT: 1, Role.STORED: 2}.get(v.role, 0) for v in values),
        array(v.role is Role.OUTPUT for v in values),
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


def plain_state(tape: Tape) -> np.ndarray:
    """The state that recomputes nothing: everything is kept until its last use, int64[gaps]. What cannot be recomputed
    stays for what may be recomputed from it.
    """
    tail = tape.gap_last == len(tape.order)
    return np.where(tail & (tape.maker[tape.gap_value] >= 0), DISCARD, KEEP).astype(np.int64)


def _makers(problem: Problem, order: Sequence[int], cost: Sequence[int], again: bool) -> tuple[list[int], list[bool]]:
    """For each value the cheapest action that may run more than once, and whether each action may be left out."""
    may = [
        again and not a.effect and not any(pair.required for pair in a.overwrites) and not _homes(problem, a.writes)
        for a in problem.actions
    ]
    maker = [-1] * len(problem.values)
    written: set[int] = set()
    for index in order:
        written.update(problem.actions[index].writes)
    reachable = written | {v for v, value in enumerate(problem.values) if value.role in (Role.INPUT, Role.STORED)}
    for v in sorted(written):
        if problem.values[v].role is not Role.TRANSIENT:
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

"""A smaller tape with the same gaps: without the many actions and values that are too small to matter to the search."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from foreplan.planner.memory.arrays import Arrays
from foreplan.planner.recompute.arrays import Tape
from foreplan.planner.rows import array, flat, slices

_Rows = list[list[int]]


def compact(tape: Tape, smallest: int) -> Tape:
    """The tape of those actions that read or write a value of `smallest` bytes or more that is not stored.

    Its gaps are those of `tape`, in their order, so a state of one is a state of the other. All other values count as
    they live in the base order, whatever is recomputed, and stay until an action destroys them: recomputation from
    them ends there. So what `measure` says of it is close, not exact.
    """
    kept = _kept_values(tape, smallest)
    reads, writes = _rows(tape.problem.read_at, tape.problem.reads), _rows(tape.problem.write_at, tape.problem.writes)
    big = [any(kept[v] for v in (*r, *w)) for r, w in zip(reads, writes)]
    positions = [position for position, a in enumerate(tape.order.tolist()) if big[a]]
    order = [int(tape.order[position]) for position in positions]
    makers = {int(m) for m in (*tape.maker, *tape.save, *tape.fetch) if m >= 0} - set(order)
    actions = order + sorted(m for m in makers if big[m])
    number = {v: i for i, v in enumerate(np.flatnonzero(kept).tolist())}
    place = np.searchsorted(positions, np.arange(len(tape.order) + 1)).astype(np.int64)

    def renumbered(rows: _Rows) -> _Rows:
        return [[number[v] for v in rows[a] if v in number] for a in actions]

    def of_kept(rows: _Rows, at: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """What `slots` has for the reads or writes that stay."""
        return flat([slots[at[a] + k] for k, v in enumerate(rows[a]) if v in number] for a in actions)

    pairs = [_pairs(tape, a, reads[a], writes[a], number) for a in actions]
    parts = [_parts(tape, a, reads[a], writes[a], number) for a in actions]
    new_reads, new_writes = renumbered(reads), renumbered(writes)
    destroys = renumbered(_rows(tape.destroy_at, tape.destroys))
    new_action = {a: i for i, a in enumerate(actions)}
    values = np.flatnonzero(kept)
    maker, save, fetch = (
        array(new_action.get(m, -1) for m in each[values].tolist()) for each in (tape.maker, tape.save, tape.fetch)
    )
    all_kept = [all(v in number for v in writes[a]) for a in actions]
    pair_write, pair_read, pair_required = (array(pair[i] for row in pairs for pair in row) for i in range(3))
    part_write, part_read, part_offset = (array(part[i] for row in parts for part in row) for i in range(3))
    gap_value = array(number[v] for v in tape.gap_value.tolist())
    p = Arrays(
        slices(new_reads),
        flat(new_reads),
        slices(new_writes),
        flat(new_writes),
        slices(pairs),
        pair_write,
        pair_read,
        pair_required,
        slices(parts),
        part_write,
        part_read,
        part_offset,
        tape.problem.workspace[actions],
        tape.problem.size[values],
        tape.problem.nbytes[values],
        tape.problem.rounded[values],
        tape.problem.alignment[values],
        tape.problem.there[values],
        tape.problem.output[values],
    )
    return Tape(
        p,
        order=np.arange(len(order), dtype=np.int64),
        destroy_at=slices(destroys),
        destroys=flat(destroys),
        cost=tape.cost[actions],
        deadline=_deadlines(tape, actions, reads, kept, place),
        background=_background(tape, kept, reads, writes)[positions],
        maker=maker,
        made=np.where(tape.made[values] < 0, -1, place[tape.made[values]]),
        save=save,
        fetch=fetch,
        skippable=array(tape.skippable[a] and whole for a, whole in zip(actions, all_kept)),
        read_gap=of_kept(reads, tape.problem.read_at, tape.read_gap),
        write_gap=of_kept(writes, tape.problem.write_at, tape.write_gap),
        gap_value=gap_value,
        gap_first=place[tape.gap_first],
        gap_last=place[tape.gap_last],
        own_at=np.searchsorted(np.sort(gap_value), np.arange(len(values) + 1)).astype(np.int64),
        own=np.argsort(gap_value, kind="stable").astype(np.int64),
    )


def _kept_values(tape: Tape, smallest: int) -> np.ndarray:
    kept = (tape.problem.size >= max(smallest, 1)) & (tape.problem.there < 2)
    kept[tape.gap_value] = True
    return kept


def _rows(at: np.ndarray, items: np.ndarray) -> _Rows:
    bounds, listed = at.tolist(), items.tolist()
    return [listed[low:high] for low, high in pairwise(bounds)]


def _pairs(tape: Tape, a: int, reads: list[int], writes: list[int], number: dict[int, int]) -> list[list[int]]:
    """Overwrites between values that stay: (write, read, required), by the slots that they have then."""
    p = tape.problem
    return _slots((p.pair_write, p.pair_read, p.pair_required), p.pair_at[a : a + 2], reads, writes, number)


def _parts(tape: Tape, a: int, reads: list[int], writes: list[int], number: dict[int, int]) -> list[list[int]]:
    """Parts that stay of wholes that stay: (write, read, offset), likewise."""
    p = tape.problem
    return _slots((p.part_write, p.part_read, p.part_offset), p.part_at[a : a + 2], reads, writes, number)


def _slots(
    columns: Sequence[np.ndarray], at: np.ndarray, reads: list[int], writes: list[int], number: dict[int, int]
) -> list[list[int]]:
    """Rows of (write, read, something) of an action, where both stay."""
    new_read = np.cumsum([0, *(v in number for v in reads)]).tolist()
    new_write = np.cumsum([0, *(v in number for v in writes)]).tolist()
    rows = zip(*(column[at[0] : at[1]].tolist() for column in columns))
    return [
        [new_write[write], new_read[read], more]
        for write, read, more in rows
        if writes[write] in number and reads[read] in number
    ]


def _deadlines(tape: Tape, actions: Sequence[int], reads: _Rows, kept: np.ndarray, place: np.ndarray) -> np.ndarray:
    """For each action the last position at which all that it reads of what is left out is still there."""
    until = np.full(len(kept), len(tape.order), np.int64)
    destroyer = np.full(len(kept), -1, np.int64)
    for position, a in enumerate(tape.order.tolist()):
        for v in tape.destroys[tape.destroy_at[a] : tape.destroy_at[a + 1]].tolist():
            until[v], destroyer[v] = place[position + 1] - 1, a
    lasting = len(tape.order)
    return array(
        min([lasting, *(int(until[v]) for v in reads[a] if not kept[v] and destroyer[v] != a)]) for a in actions
    )


def _background(tape: Tape, kept: np.ndarray, reads: _Rows, writes: _Rows) -> np.ndarray:
    """Bytes of what is left out that live at each position of the base order."""
    n = len(tape.order)
    first = np.where(tape.problem.there > 0, 0, n)
    last = np.where((tape.problem.there == 2) | (tape.problem.output > 0), n - 1, -1)
    for position, a in enumerate(tape.order.tolist()):
        for v in writes[a]:
            first[v] = min(first[v], position)
            last[v] = max(last[v], position)
        for v in reads[a]:
            last[v] = max(last[v], position)
    change = np.zeros(n + 1, np.int64)
    here = ~kept & (first < n) & (last >= first)
    np.add.at(change, first[here], tape.problem.size[here])
    np.subtract.at(change, last[here] + 1, tape.problem.size[here])
    return np.cumsum(change)[:n]

"""The same gaps of a smaller problem: without the many actions and values that are too small to matter."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from foreplan.planner.memory.arrays import Arrays, is_contested, stay
from foreplan.planner.recompute.arrays import Gaps
from foreplan.planner.rows import array, flat, slices

_Rows = list[list[int]]
_Shares = list[tuple[int, int, int]]


def compact(gaps: Gaps, smallest: int) -> Gaps:
    """The gaps among those actions that read or write a value of `smallest` bytes or more that is not stored.

    They are those of `gaps`, in their order, so a state of one is a state of the other. All other values count with
    their lives in the base order, and can be recomputed from until an action destroys them. So what `measure` finds is
    close, not exact.
    """
    kept = _kept_values(gaps, smallest)
    reads, writes = _rows(gaps.problem.read_at, gaps.problem.reads), _rows(gaps.problem.write_at, gaps.problem.writes)
    big = [any(kept[v] for v in (*r, *w)) for r, w in zip(reads, writes)]
    positions = [position for position, a in enumerate(gaps.order.tolist()) if big[a]]
    order = [int(gaps.order[position]) for position in positions]
    makers = {int(m) for m in (*gaps.maker, *gaps.save, *gaps.fetch) if m >= 0} - set(order)
    actions = order + sorted(m for m in makers if big[m])
    number = {v: i for i, v in enumerate(np.flatnonzero(kept).tolist())}
    place = np.searchsorted(positions, np.arange(len(gaps.order) + 1)).astype(np.int64)

    def renumbered(rows: _Rows) -> _Rows:
        return [[number[v] for v in rows[a] if v in number] for a in actions]

    def of_kept(rows: _Rows, at: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """What `slots` has for the reads or writes that stay."""
        return flat([slots[at[a] + k] for k, v in enumerate(rows[a]) if v in number] for a in actions)

    shares = [_shares(gaps, a, reads[a], writes[a], number) for a in actions]
    new_reads, new_writes = renumbered(reads), renumbered(writes)
    destroys = renumbered(_rows(gaps.destroy_at, gaps.destroys))
    new_action = {a: i for i, a in enumerate(actions)}
    values = np.flatnonzero(kept)
    maker, save, fetch = (
        array(new_action.get(m, -1) for m in each[values].tolist()) for each in (gaps.maker, gaps.save, gaps.fetch)
    )
    all_kept = [all(v in number for v in writes[a]) for a in actions]
    share_write, share_read, share_bytes = (array(share[i] for row in shares for share in row) for i in range(3))
    gap_value = array(number[v] for v in gaps.gap_value.tolist())
    p = Arrays(
        slices(new_reads),
        flat(new_reads),
        slices(new_writes),
        flat(new_writes),
        slices(shares),
        share_write,
        share_read,
        share_bytes,
        array(map(is_contested, shares)),
        gaps.problem.workspace[actions],
        gaps.problem.size[values],
        gaps.problem.there[values],
        gaps.problem.output[values],
    )
    return Gaps(
        p,
        order=np.arange(len(order), dtype=np.int64),
        destroy_at=slices(destroys),
        destroys=flat(destroys),
        cost=gaps.cost[actions],
        deadline=_deadlines(gaps, actions, reads, kept, place),
        background=_background(gaps, kept, reads, writes)[positions],
        maker=maker,
        made=np.where(gaps.made[values] < 0, -1, place[gaps.made[values]]),
        save=save,
        fetch=fetch,
        skippable=array(gaps.skippable[a] and whole for a, whole in zip(actions, all_kept)),
        read_gap=of_kept(reads, gaps.problem.read_at, gaps.read_gap),
        write_gap=of_kept(writes, gaps.problem.write_at, gaps.write_gap),
        gap_value=gap_value,
        gap_first=place[gaps.gap_first],
        gap_last=place[gaps.gap_last],
        own_at=np.searchsorted(np.sort(gap_value), np.arange(len(values) + 1)).astype(np.int64),
        own=np.argsort(gap_value, kind="stable").astype(np.int64),
    )


def _kept_values(gaps: Gaps, smallest: int) -> np.ndarray:
    kept = (gaps.problem.size >= max(smallest, 1)) & (gaps.problem.there < 2)
    kept[gaps.gap_value] = True
    return kept


def _rows(at: np.ndarray, items: np.ndarray) -> _Rows:
    bounds, listed = at.tolist(), items.tolist()
    return [listed[low:high] for low, high in pairwise(bounds)]


def _shares(gaps: Gaps, a: int, reads: list[int], writes: list[int], number: dict[int, int]) -> _Shares:
    """What an action's writes share with its reads, where both stay, by the slots that they have then."""
    p, at = gaps.problem, slice(*gaps.problem.share_at[a : a + 2])
    new_read = np.cumsum([0, *(v in number for v in reads)]).tolist()
    new_write = np.cumsum([0, *(v in number for v in writes)]).tolist()
    rows = zip(p.share_write[at].tolist(), p.share_read[at].tolist(), p.share_bytes[at].tolist())
    return [
        (new_write[write] if write >= 0 else -1 - new_read[read], new_read[read], nbytes)
        for write, read, nbytes in rows
        if reads[read] in number and (write < 0 or writes[write] in number)
    ]


def _deadlines(gaps: Gaps, actions: Sequence[int], reads: _Rows, kept: np.ndarray, place: np.ndarray) -> np.ndarray:
    """For each action the last position at which all that it reads of what is left out is still there."""
    until = np.full(len(kept), len(gaps.order), np.int64)
    destroyer = np.full(len(kept), -1, np.int64)
    for position, a in enumerate(gaps.order.tolist()):
        for v in gaps.destroys[gaps.destroy_at[a] : gaps.destroy_at[a + 1]].tolist():
            until[v], destroyer[v] = place[position + 1] - 1, a
    lasting = len(gaps.order)
    return array(
        min([lasting, *(int(until[v]) for v in reads[a] if not kept[v] and destroyer[v] != a)]) for a in actions
    )


def _background(gaps: Gaps, kept: np.ndarray, reads: _Rows, writes: _Rows) -> np.ndarray:
    """Bytes of what is left out that live at each position of the base order."""
    n = len(gaps.order)
    first = np.where(gaps.problem.there > 0, 0, n)
    last = np.where(stay(gaps.problem), n - 1, -1)
    for position, a in enumerate(gaps.order.tolist()):
        for v in writes[a]:
            first[v] = min(first[v], position)
            last[v] = max(last[v], position)
        for v in reads[a]:
            last[v] = max(last[v], position)
    change = np.zeros(n + 1, np.int64)
    here = ~kept & (first < n) & (last >= first)
    np.add.at(change, first[here], gaps.problem.size[here])
    np.subtract.at(change, last[here] + 1, gaps.problem.size[here])
    return np.cumsum(change)[:n]

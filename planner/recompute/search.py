"""Compiled search for states that need few bytes at little cost; importing this module loads LLVM.

Every state that is tried is recorded if it is the best so far. So one search fills the whole curve, from the highest
peak to the lowest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from foreplan import jit
from foreplan.planner.memory.kernels import copy
from foreplan.planner.recompute.arrays import DISCARD, DROP, KEEP, NEVER, OFFLOAD
from foreplan.planner.recompute.kernels import evaluate
from foreplan.planner.recompute.prices import count_above, following, worth

UNKNOWN = -1.0  # the score of what has not been looked at


class Archive(NamedTuple):
    """The best states found.

    Attributes:
        targets: peaks in bytes, descending.
        cost: for each target the least cost of a state between it and the next, NEVER where there is none.
        states: those states.
        caps: costs.
        peak: for each cap the lowest peak of a state that costs no more.
        cap_cost: what that state costs.
        cap_states: those states.
    """

    targets: np.ndarray
    cost: np.ndarray
    states: np.ndarray
    caps: np.ndarray
    peak: np.ndarray
    cap_cost: np.ndarray
    cap_states: np.ndarray


def make_archive(targets: Sequence[int], caps: Sequence[int], gaps: int) -> Archive:
    """An archive with nothing in it."""

    def nothing(cells: int) -> np.ndarray:
        return np.full(cells, NEVER)

    return Archive(
        np.array(targets, np.int64),
        nothing(len(targets)),
        np.zeros((len(targets), gaps), np.int64),
        np.array(caps, np.int64),
        nothing(len(caps)),
        nothing(len(caps)),
        np.zeros((len(caps), gaps), np.int64),
    )


def copy_archive(archive: Archive) -> Archive:
    """One that can be changed by itself."""
    return Archive(*(array.copy() for array in archive))


def merge(archive: Archive, other: Archive) -> None:
    """Take from another archive what is better."""
    better = other.cost < archive.cost
    archive.cost[better], archive.states[better] = other.cost[better], other.states[better]
    better = (other.peak < archive.peak) | ((other.peak == archive.peak) & (other.cap_cost < archive.cap_cost))
    for mine, theirs in zip(archive[-3:], other[-3:]):
        mine[better] = theirs[better]


@jit.compiled
def record(archive, state, peak, cost):  # type: ignore[no-untyped-def]
    """Note a state where it is the best so far."""
    for k in range(archive.caps.size):
        if cost > archive.caps[k] or peak > archive.peak[k]:
            continue
        if peak < archive.peak[k] or cost < archive.cap_cost[k]:
            archive.peak[k], archive.cap_cost[k] = peak, cost
            copy(state, archive.cap_states[k], state.size)
    targets = archive.targets
    if peak > targets[0]:
        return
    low, high = 0, targets.size - 1
    while low < high:
        middle = (low + high + 1) // 2
        if targets[middle] >= peak:
            low = middle
        else:
            high = middle - 1
    if cost < archive.cost[low]:
        archive.cost[low] = cost
        copy(state, archive.states[low], state.size)


@jit.compiled
def greedy(t, s, state, target, aim, score, boost, hope, archive):  # type: ignore[no-untyped-def]
    """Drop values, the most bytes above the target a cost first, until the live bytes stay within it. Those that cost
    less to copy off the device than to recompute, as estimated, are copied.

    Scores from earlier rounds stand in for new ones until the best of them has been brought up to date (Minoux,
    "Accelerated greedy algorithms for maximizing submodular set functions", 1978).

    Args:
        aim: bytes above this share of the peak, in 256ths, are what counts.
        score: of each gap, as last seen; written.
        boost: what all scores are multiplied by each round, in 256ths, so that none is forgotten.
        hope: the most times that a gap may turn out better than estimated.

    Returns:
        The peak reached, its cost, and the work done.
    """
    level = target
    peak, place, excess, cost, work = evaluate(t, s, state, level)
    count_above(t, s, work, level)
    fresh = np.zeros(state.size, np.int64)
    turn = 0
    while peak > target:
        turn += 1
        if peak * aim // 256 != level:
            level = peak * aim // 256
            peak, place, excess, cost, more = evaluate(t, s, state, level)
            count_above(t, s, more, level)
            work += more
        best, best_score = -1, 0.0
        while True:
            g, most = -1, best_score
            for h in range(state.size):
                alive = t.gap_first[h] <= place <= t.gap_last[h] < t.order.size
                if not alive or fresh[h] == turn or state[h] >= DISCARD:
                    continue
                if score[h] == UNKNOWN:
                    score[h] = hope * worth(t, s, state, h)
                if score[h] > most:
                    g, most = h, score[h]
            if g < 0:
                break
            fresh[g] = turn
            old = state[g]
            state[g] = old + 1 if t.save[t.gap_value[g]] < 0 else following(t, state, g, s.stack)
            new_peak, _, new_excess, new_cost, more = evaluate(t, s, state, level)
            work += more
            score[g] = 0.0
            if new_peak < NEVER:
                record(archive, state, new_peak, new_cost)
                if new_excess < excess:
                    score[g] = float(excess - new_excess) / max(float(new_cost - cost), 1.0)
            state[g] = old
            if score[g] > best_score:
                best, best_score = g, score[g]
        if best < 0:
            break
        state[best] = state[best] + 1 if t.save[t.gap_value[best]] < 0 else following(t, state, best, s.stack)
        peak, place, excess, cost, more = evaluate(t, s, state, level)
        count_above(t, s, more, level)
        work += more
        for g in range(state.size):
            if score[g] != UNKNOWN:
                score[g] = max(score[g] * boost / 256.0, 1e-30)
        score[best] = UNKNOWN
    return peak, cost, work


@jit.compiled
def descend(t, s, state, aim, boost, hope, archive, most_cost, most_work):  # type: ignore[no-untyped-def]
    """Go down the targets by `greedy`, from each to the next, as far as it goes.

    Returns:
        The work done.
    """
    work = np.int64(0)
    score = np.full(state.size, UNKNOWN)
    for j in range(archive.targets.size):
        peak, cost, more = greedy(t, s, state, archive.targets[j], aim, score, boost, hope, archive)
        work += more
        if peak > archive.targets[j] or cost > most_cost or work > most_work:
            break
    return work


@jit.compiled
def draw(seed):  # type: ignore[no-untyped-def]
    """The next state of a 64-bit generator of pseudo-random numbers: Marsaglia, "Xorshift RNGs", 2003."""
    seed ^= seed << np.uint64(13)
    seed ^= seed >> np.uint64(7)
    seed ^= seed << np.uint64(17)
    return seed


@jit.compiled
def below(seed, n):  # type: ignore[no-untyped-def]
    """A number from 0 to n - 1."""
    return np.int64((seed >> np.uint64(33)) % np.uint64(n))


@jit.compiled
def ruin(t, state, plain, seed):  # type: ignore[no-untyped-def]
    """Decide anew, at random, about some of the gaps that begin within a random stretch of the order.

    Mostly a dropped value is kept again; else a kept one is dropped, or a tail changes, which no other search does. A
    value that can be copied off the device is copied every other time that it would be dropped. Now and then a copied
    value is dropped instead, and a dropped one copied.

    Returns:
        The next seed.
    """
    n = t.order.size
    seed = draw(seed)
    width = 1 + n // (4 << below(seed, 4))
    seed = draw(seed)
    low = below(seed, n) - width // 2
    seed = draw(seed)
    kind = below(seed, 8)
    for g in range(state.size):
        if not low <= t.gap_first[g] < low + width:
            continue
        seed = draw(seed)
        if kind < 6:
            if kind < 2 or below(seed, 4) < 2:
                state[g] = plain[g]
            elif kind == 5 and state[g] == OFFLOAD and t.maker[t.gap_value[g]] >= 0:
                state[g] = DROP
            elif kind == 5 and state[g] != KEEP and t.save[t.gap_value[g]] >= 0 and t.gap_last[g] < n:
                state[g] = OFFLOAD
        elif below(seed, 4) == 0:
            tail = t.gap_last[g] == n
            if (kind == 6) == tail:
                if state[g] != KEEP:
                    state[g] = KEEP
                elif t.save[t.gap_value[g]] >= 0 and not tail and (t.maker[t.gap_value[g]] < 0 or below(seed, 8) < 4):
                    state[g] = OFFLOAD
                else:
                    state[g] = DROP
    return seed


@jit.compiled
def restore(t, s, state, plain, target, archive, tries, seed):  # type: ignore[no-untyped-def]
    """Keep again what was dropped in vain: random gaps, one after the other, while the target is met at less cost.

    Returns:
        Work done and the next seed.
    """
    peak, _, _, cost, work = evaluate(t, s, state, target)
    for _ in range(tries):
        seed = draw(seed)
        g = below(seed, state.size)
        for _ in range(state.size):
            if state[g] != plain[g]:
                break
            g = (g + 1) % state.size
        old, state[g] = state[g], plain[g]
        new_peak, _, _, new_cost, more = evaluate(t, s, state, target)
        work += more
        if new_peak < NEVER:
            record(archive, state, new_peak, new_cost)
        if new_peak <= max(target, peak) and new_cost <= cost:
            peak, cost = new_peak, new_cost
        else:
            state[g] = old
    return work, seed


@jit.compiled
def polish(  # type: ignore[no-untyped-def]
    t, s, plain, aim, boost, hope, archive, turns, rounds, eager, tries, number, most_work, seed
):
    """Ruin and recreate (Schrimpf et al., "Record breaking optimization results", J. Computational Physics 2000) what
    is stored at every target and cap, and at its neighbours, the highest first.

    Args:
        turns: about how many targets are gone through in one sweep; others are in the next.
        rounds: tries at each target; `rounds` times `eager` at each cap.
        tries: dropped values that each try considers to keep.

    Returns:
        The work done.
    """
    work = np.int64(0)
    state = plain.copy()
    score = np.full(state.size, UNKNOWN)
    count = archive.targets.size
    wide = max(count // turns, 1)
    for j in range(count + archive.caps.size):
        if j < count and j % wide != number % wide:
            continue
        for r in range(rounds if j < count else rounds * eager):
            if work > most_work:
                break
            k = j - count
            if k < 0:
                i = min(max(j + (0, 0, 1, -1)[r % 4], 0), count - 1)
                if archive.cost[j] <= 0 or archive.cost[i] >= NEVER:
                    continue
                copy(archive.states[i], state, state.size)
                target = archive.targets[j]
            else:
                copy(archive.cap_states[k], state, state.size)
                target = archive.peak[k] - 1
            seed = ruin(t, state, plain, seed)
            score[:] = UNKNOWN
            _, _, more = greedy(t, s, state, target, aim, score, boost, hope, archive)
            work += more
            more, seed = restore(t, s, state, plain, target, archive, tries, seed)
            work += more
    return work

"""Compiled search over sequences of runs by simulated annealing; importing this module loads LLVM.

A sequence says which action runs at each step. What lives meanwhile follows from it: a read finds what was written
last, so one more run of an action cuts the lives of what it writes in two, and lengthens those of what it reads.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from foreplan import jit
from foreplan.planner.memory.kernels import copy
from foreplan.planner.recompute.arrays import Gaps
from foreplan.planner.recompute.kernels import measure_above
from foreplan.planner.recompute.search import below, draw, record
from foreplan.planner.rows import flat, slices

NOTHING = -1  # what follows the last run of a sequence
_SOON = 12  # steps that a run mostly moves at most
_BLOCK = 5  # runs that move together with another one, at most
_DRAWS = 4  # of a value, until one is found that can be computed again
_PATIENCE = 64  # trials after which the price of bytes is set anew
_STAGES = 64  # of the temperature,
_COOLING = 0.93  # each, as a share of the one before: a hundredth in the end


class Sequences(NamedTuple):
    """What the search needs besides the gaps and their scratch.

    Attributes:
        free: of each action, whether it may run any number of times, or not at all.
        other_at, others: of each free action, the other free ones that write a value that it writes.
        outputs: those that may be made again, if they are not small.
        now, level: the present sequence, and the live bytes of its steps.
        trial, spare: the one that is tried, and room to make it.
        needed: of each value, whether something reads it from a step on.
    """

    free: np.ndarray
    other_at: np.ndarray
    others: np.ndarray
    outputs: np.ndarray
    now: np.ndarray
    level: np.ndarray
    trial: np.ndarray
    spare: np.ndarray
    needed: np.ndarray


def make_sequences(t: Gaps, free: np.ndarray, room: int) -> Sequences:
    """Room for sequences of the given number of runs."""
    p = t.problem
    writes = [set(p.writes[low:high].tolist()) for low, high in pairwise(p.write_at.tolist())]
    makers: dict[int, list[int]] = {}
    for a in np.flatnonzero(free).tolist():
        for v in writes[a]:
            if t.maker[v] >= 0:  # else nothing but copies may write it once more
                makers.setdefault(v, []).append(a)
    others = [
        sorted({b for v in own for b in makers.get(v, ())} - {a}) if free[a] else [] for a, own in enumerate(writes)
    ]
    large = (p.size > 0) & (2 * p.size * np.count_nonzero(p.size) >= p.size.sum())  # at least half the average
    outputs = np.flatnonzero((p.output != 0) & (t.maker >= 0) & large)
    now, level, trial, spare = (np.zeros(room, np.int64) for _ in range(4))
    return Sequences(
        free, slices(others), flat(others), outputs, now, level, trial, spare, np.zeros(len(p.size), np.int64)
    )


@jit.compiled
def tidy(t, s, q, n):  # type: ignore[no-untyped-def]
    """Leave out runs of the trial that nobody needs, and see whether every read finds something.

    Returns:
        The length of the trial, or -1 where it cannot be.
    """
    live, kept = s.counting.live, 0
    for v in range(t.problem.size.size):
        live[v] = t.problem.output[v]
    for step in range(n - 1, -1, -1):
        a = q.trial[step]
        useful = q.free[a] == 0
        for k in range(t.problem.write_at[a], t.problem.write_at[a + 1]):
            useful |= live[t.problem.writes[k]] != 0
        if not useful:
            continue
        for k in range(t.problem.write_at[a], t.problem.write_at[a + 1]):
            live[t.problem.writes[k]] = 0
        for k in range(t.problem.read_at[a], t.problem.read_at[a + 1]):
            live[t.problem.reads[k]] = 1
        q.spare[kept] = a
        kept += 1
    for v in range(t.problem.size.size):
        if live[v] and not t.problem.there[v]:
            return -1
        live[v] = t.problem.there[v] > 0
    for step in range(kept):
        a = q.spare[kept - 1 - step]
        q.trial[step] = a
        for k in range(t.problem.read_at[a], t.problem.read_at[a + 1]):
            if not live[t.problem.reads[k]]:
                return -1
        for k in range(t.problem.write_at[a], t.problem.write_at[a + 1]):
            live[t.problem.writes[k]] = 1
        for k in range(t.destroy_at[a], t.destroy_at[a + 1]):
            live[t.destroys[k]] = 0
    for v in range(t.problem.size.size):
        if t.problem.output[v] and not live[v]:
            return -1
    return kept


@jit.compiled
def weigh(t, s, q, n, target):  # type: ignore[no-untyped-def]
    """Peak, bytes above the target over all steps, and cost of the trial."""
    cost = np.int64(0)
    for step in range(n):
        s.counting.steps[step] = q.trial[step]
        s.places[step] = 0
        cost += t.cost[q.trial[step]]
    highest, _, excess = measure_above(t, s, n, target)
    return highest, excess, cost


@jit.compiled
def provide(t, s, q, n, v, at, eager, seed):  # type: ignore[no-untyped-def]
    """Put one more run of what makes a value at a place of the trial, and before it, each at the given chances in four,
    runs for what that reads and nobody needs any more by then.

    Returns:
        The length of the trial, and the next seed.
    """
    for u in range(t.problem.size.size):
        q.needed[u] = t.problem.there[u] == 2 or t.problem.output[u] != 0
    for step in range(n - 1, at - 1, -1):
        a = q.trial[step]
        for k in range(t.problem.write_at[a], t.problem.write_at[a + 1]):
            q.needed[t.problem.writes[k]] = 0
        for k in range(t.problem.read_at[a], t.problem.read_at[a + 1]):
            q.needed[t.problem.reads[k]] = 1
    q.needed[v] = 1
    s.stack[0] = t.maker[v]
    depth = 1
    while depth > 0 and n < q.trial.size:
        depth -= 1
        a = s.stack[depth]
        for i in range(n, at, -1):
            q.trial[i] = q.trial[i - 1]
        q.trial[at] = a
        n += 1
        for k in range(t.problem.read_at[a], t.problem.read_at[a + 1]):
            u = t.problem.reads[k]
            if q.needed[u] or t.maker[u] < 0 or depth >= s.stack.size:
                continue
            seed = draw(seed)
            if below(seed, 4) < eager:
                q.needed[u] = 1
                s.stack[depth] = t.maker[u]
                depth += 1
    return n, seed


@jit.compiled
def blocked(t, first, second):  # type: ignore[no-untyped-def]
    """Whether one action cannot run before another that runs right before it, as it reads what that one writes, or
    one of them destroys what the other reads.
    """
    for k in range(t.problem.read_at[second], t.problem.read_at[second + 1]):
        v = t.problem.reads[k]
        for j in range(t.problem.write_at[first], t.problem.write_at[first + 1]):
            if t.problem.writes[j] == v:
                return True
        for j in range(t.destroy_at[first], t.destroy_at[first + 1]):
            if t.destroys[j] == v:
                return True
    for k in range(t.destroy_at[second], t.destroy_at[second + 1]):
        for j in range(t.problem.read_at[first], t.problem.read_at[first + 1]):
            if t.problem.reads[j] == t.destroys[k]:
                return True
    return False


@jit.compiled
def move(t, q, n, at, seed):  # type: ignore[no-untyped-def]
    """Move a run, or some one after the other, sooner or later, at random, as far as what they read and write lets.

    Returns:
        Whether they moved, and the next seed.
    """
    seed = draw(seed)
    count = 1 if below(seed, 4) else 2 + below(seed >> np.uint64(8), _BLOCK)
    count = min(count, n - at)
    seed = draw(seed)
    sooner = below(seed, 2) == 0
    most = n if below(seed >> np.uint64(8), 4) == 0 else _SOON
    most = min(most, at if sooner else n - at - count)
    far = 0
    while far < most:
        other = q.trial[at - far - 1] if sooner else q.trial[at + count + far]
        stop = False
        for i in range(count):
            a = q.trial[at + i]
            stop |= blocked(t, other, a) if sooner else blocked(t, a, other)
        if stop:
            break
        far += 1
    if far == 0:
        return False, seed
    seed = draw(seed)
    far = 1 + below(seed, far)
    for i in range(count):
        q.spare[i] = q.trial[at + i]
    if sooner:
        for i in range(at - 1, at - far - 1, -1):
            q.trial[i + count] = q.trial[i]
        at -= far
    else:
        for i in range(at, at + far):
            q.trial[i] = q.trial[i + count]
        at += far
    for i in range(count):
        q.trial[at + i] = q.spare[i]
    return True, seed


@jit.compiled
def split(t, s, q, n, at, seed):  # type: ignore[no-untyped-def]
    """One more run of what makes a value that lives at a place, at random, before its next reader, or of an output at
    the end.

    Returns:
        The length of the trial, and the next seed.
    """
    for _ in range(_DRAWS):
        seed = draw(seed)
        reader = at + 1 + below(seed, n - at if q.outputs.size else n - at - 1)
        if reader == n:
            v = q.outputs[below(seed >> np.uint64(9), q.outputs.size)]
        else:
            a = q.trial[reader]
            reads = t.problem.read_at[a + 1] - t.problem.read_at[a]
            if reads == 0:
                continue
            v = t.problem.reads[t.problem.read_at[a] + below(seed >> np.uint64(9), reads)]
        if t.maker[v] < 0:
            continue
        written = False
        for step in range(reader - 1, at - 1, -1):
            a = q.trial[step]
            for k in range(t.problem.read_at[a], t.problem.read_at[a + 1]):
                if t.problem.reads[k] == v and step > at:
                    reader = step
            for k in range(t.problem.write_at[a], t.problem.write_at[a + 1]):
                written |= t.problem.writes[k] == v
        if written:
            continue
        seed = draw(seed)
        place = reader if below(seed, 4) else at + 1 + below(seed >> np.uint64(9), reader - at)
        seed = draw(seed)
        return provide(t, s, q, n, v, place, (0, 2, 3, 4)[below(seed, 4)], seed)
    return n, seed


@jit.compiled
def change(t, s, q, n, target, seed):  # type: ignore[no-untyped-def]
    """Change the trial, at random: one run more, of what lives where more bytes live than the target; one run less;
    another action that writes the same; or some runs sooner or later.

    Returns:
        Whether it changed, its length, and the next seed.
    """
    seed = draw(seed)
    kind = below(seed, 8)
    seed = draw(seed)
    at = below(seed, n)
    if kind < 3:
        for _ in range(n):
            if q.level[at] > target:
                break
            at = (at + 1) % n
        if at + 1 == n and q.outputs.size == 0:
            return False, n, seed
        size, seed = split(t, s, q, n, at, seed)
        return size > n, size, seed
    if kind < 5:
        for _ in range(n):
            if q.free[q.trial[at]]:
                count = 0
                for step in range(n):
                    count += q.trial[step] == q.trial[at]
                if count > 1:
                    for step in range(at, n - 1):
                        q.trial[step] = q.trial[step + 1]
                    return True, n - 1, seed
            at = (at + 1) % n
        return False, n, seed
    a = q.trial[at]
    if kind == 5 and q.other_at[a] < q.other_at[a + 1]:
        seed = draw(seed)
        q.trial[at] = q.others[q.other_at[a] + below(seed, q.other_at[a + 1] - q.other_at[a])]
        return True, n, seed
    moved, seed = move(t, q, n, at, seed)
    return moved, n, seed


@jit.compiled
def anneal(t, s, q, n, target, base, price, hot, trials, archive, seed):  # type: ignore[no-untyped-def]
    """Look for cheap sequences whose live bytes stay within a target, from the present one on.

    Bytes above the target have a price, which falls while it is met and rises while it is not (strategic oscillation;
    Glover, "Heuristics for integer programming using surrogate constraints", Decision Sciences 1977). A worse trial
    is taken with a chance that falls with what it is worse by, and with the temperature; in the form of Tsallis and
    Stariolo, "Generalized simulated annealing", Physica A 1996.

    Args:
        n: runs of the present sequence.
        base: the cost that counts as none.
        price: of a byte above the target at a step, at first.
        hot: the first temperature, in units of cost; the last is a hundredth of it.

    Returns:
        The next seed.
    """
    copy(q.now, q.trial, n)
    n = tidy(t, s, q, n)
    if n < 1:
        return seed
    peak, excess, cost = weigh(t, s, q, n, target)
    q.trial[n:] = NOTHING
    record(archive, q.trial, peak, cost - base)
    copy(q.trial, q.now, n)
    copy(s.counting.level, q.level, n)
    met, temperature = 0, hot
    for number in range(trials):
        if number % (trials // _STAGES + 1) == 0:
            temperature *= _COOLING
        if number % _PATIENCE == _PATIENCE - 1:
            price *= 0.9 if met > _PATIENCE // 2 else 1.1
            met = 0
        met += excess == 0
        copy(q.now, q.trial, n)
        size = n
        seed = draw(seed)
        changed = False
        for _ in range((1, 1, 1, 1, 1, 2, 2, 3)[below(seed, 8)]):
            did, size, seed = change(t, s, q, size, target, seed)
            changed |= did
        if not changed:
            continue
        size = tidy(t, s, q, size)
        if size < 1:
            continue
        new_peak, new_excess, new_cost = weigh(t, s, q, size, target)
        q.trial[size:] = NOTHING
        record(archive, q.trial, new_peak, new_cost - base)
        worse = float(new_cost - cost) + price * float(new_excess - excess)
        if worse > 0.0:
            seed = draw(seed)
            chance = max(1.0 - worse / (2.0 * temperature), 0.0)
            if float(below(seed, 1 << 20)) >= chance * chance * float(1 << 20):
                continue
        n, excess, cost = size, new_excess, new_cost
        copy(q.trial, q.now, n)
        copy(s.counting.level, q.level, n)
    return seed

"""Compiled descent for long schedules: values dropped or copied in batches by estimated prices; loads LLVM."""

from __future__ import annotations

import numpy as np

from foreplan import jit
from foreplan.planner.recompute.arrays import DISCARD, KEEP, NEVER, OFFLOAD
from foreplan.planner.recompute.kernels import evaluate
from foreplan.planner.recompute.prices import following, gain
from foreplan.planner.recompute.search import record


@jit.compiled
def drop_batch(t, s, state, place, wanted, trust, chosen):  # type: ignore[no-untyped-def]
    """Drop values that live through a position, the most bytes a price first, until enough bytes are dropped.

    Args:
        trust: factors on the score of each gap.
        chosen: written: the gaps changed.

    Returns:
        How many gaps were changed.
    """
    score = np.zeros(state.size)
    for g in range(state.size):
        if t.gap_first[g] <= place <= t.gap_last[g] < t.order.size and state[g] < DISCARD and trust[g] > 1e-9:
            nbytes, known = gain(t, state, g, s.stack)
            score[g] = -trust[g] * nbytes / known
    count, dropped = 0, np.int64(0)
    for g in np.argsort(score, kind="stable"):
        if score[g] >= 0.0 or dropped >= wanted:
            break
        dropped += t.problem.size[t.gap_value[g]] if state[g] == KEEP else 0
        state[g] = following(t, state, g, s.stack)
        chosen[count] = g
        count += 1
        if dropped == 0 and count >= 64:
            break
    return count


@jit.compiled
def descend_coarsely(t, s, state, archive, most_cost, most_work, batches):  # type: ignore[no-untyped-def]
    """Go down the targets, dropping one batch of values at the peak after the other. A batch that does not help is
    taken back, and its values are trusted less.

    Args:
        batches: number of batches in a row without success that ends the descent.

    Returns:
        The work done.
    """
    trust = np.ones(state.size)
    chosen = np.zeros(state.size, np.int64)
    peak, place, _, cost, work = evaluate(t, s, state, 0)
    for j in range(archive.targets.size):
        vain = 0
        while peak > archive.targets[j]:
            count = drop_batch(t, s, state, place, peak - archive.targets[j], trust, chosen)
            new_peak, new_place, _, new_cost, more = evaluate(t, s, state, 0)
            work += more + state.size
            if count == 0 or work > most_work:
                return work
            better = new_peak < peak or (new_peak == peak and new_place != place)
            if better:
                peak, place, cost, vain = new_peak, new_place, new_cost, 0
                record(archive, state, peak, cost)
                if cost > most_cost:
                    return work
                continue
            vain += 1
            for k in range(count):
                state[chosen[k]] = KEEP if state[chosen[k]] == OFFLOAD else state[chosen[k]] - 1
                trust[chosen[k]] /= 4.0 if new_peak < NEVER else 1e6
            if vain > batches:
                return work
    return work

"""Mending: lower a placement of any number of buffers, step by step toward the live set.

What sticks out of a slightly lower capacity is placed again by chains of ejection (chains.py). Where they fail, all
buffers that lie are pushed up or down, each into the first gap: that gathers small gaps, and the chains go on
(justification: Valls, Ballestín and Quintanilla, "Justification and RCPSP: a technique that pays", European Journal of
Operational Research 2005; theirs moves activities in time, this one buffers in memory).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from foreplan.planner.effort import PlacementEffort
from foreplan.planner.placement.problem import PlacementProblem

if TYPE_CHECKING:
    from foreplan.planner.placement.chains import Columns, Scratch

_HEAVIEST = 100_000  # the weight of the buffer of the largest area
_LOGGED = 100_000  # moves of one chain, beside one for each buffer
Push = Callable[[PlacementProblem, np.ndarray, np.ndarray], int]


def mended(
    problem: PlacementProblem,
    offsets: np.ndarray,
    goal: int,
    pairs: int,
    work: int,
    effort: PlacementEffort,
    push: Push,
    area: np.ndarray | None = None,
) -> np.ndarray:
    """The lowest placement found from a given one. More work never gives a higher one than less work.

    Args:
        problem: buffers, all with bytes, none fixed.
        offsets: of a placement.
        goal: a height that is low enough, not below the bound rounded up to the smallest alignment.
        pairs: how many pairs of buffers live at the same time.
        work: about how much to do, in buffers and ends of buffers looked at.
        push: the greedy placer by first fit: of a problem, in an order, to offsets; returns its work.
        area: of each buffer, how hard it is to place again, by default its size times its life.
    """
    from foreplan.planner.placement.chains import OFFSET, PENALTY, WEIGHT, mend

    grain = int(problem.alignment.min())
    rounded = replace(problem, size=-(-problem.size // grain) * grain)
    rows, arrays = _prepared(rounded, area)
    pushes = pairs <= effort.pushed and grain == problem.alignment.max()  # else what is pushed up would not be aligned
    best, height, goal = offsets, int((offsets + rounded.size).max()), goal // grain * grain
    piece, failed, run = min(effort.chains + effort.chains_pair * pairs, effort.chains_most), 0, 0
    while work > 0 and height > goal:
        less = (height - goal) // (effort.mend_step << failed)
        capacity = max(goal, height - max(grain, less // grain * grain))
        rows[:, OFFSET] = np.where(best + rounded.size > capacity, -1, best)
        for turn in range(effort.mend_turns):
            run += 1
            out = np.flatnonzero(rows[:, OFFSET] < 0)
            waiting = np.zeros(len(rows), np.int64)
            waiting[: len(out)] = out[np.argsort(-rows[out, WEIGHT], kind="stable")]
            rows[:, PENALTY] = _blurred(rows[:, WEIGHT], run)
            random = np.uint64(run)
            left, done = mend(rows, *arrays, capacity, min(work, piece), random, waiting, len(out), effort.chain_steps)
            work -= done
            if not left or work <= 0:
                break
            if pushes:
                rows[:, OFFSET], done = _pushed(rounded, rows[:, OFFSET], capacity, turn % 2 == 0, push)
                work -= done
        if left:
            failed += 1
            if failed > effort.mend_fails:
                failed, piece = 0, 2 * piece
            continue
        best, failed = rows[:, OFFSET].copy(), 0
        if pushes and turn:
            for upward in (True, False):
                best, done = _pushed(rounded, best, capacity, upward, push)
                work -= done
        height = int((best + rounded.size).max())
    return best


def _prepared(problem: PlacementProblem, area: np.ndarray | None) -> tuple[np.ndarray, tuple[Columns, Scratch]]:
    """The rows, columns and scratch of `chains.mend`."""
    from foreplan.planner.placement.chains import Columns, Scratch
    from foreplan.planner.placement.placers import columns_of

    n = len(problem.size)
    count, origin, width = columns_of(problem.lower, problem.upper)
    low, high = (problem.lower - origin) // width, (problem.upper - 1 - origin) // width + 1
    lengths = high - low
    buffer = np.repeat(np.arange(n), lengths)
    column = np.arange(len(buffer)) + np.repeat(low - (np.cumsum(lengths) - lengths), lengths)
    order = np.argsort(column, kind="stable")
    columns = Columns(low, high, np.searchsorted(column[order], np.arange(count + 1)), buffer[order])
    if area is None:
        area = problem.size.astype(np.float64) * (problem.upper - problem.lower)
    weight = np.maximum(1, area / area.max() * _HEAVIEST).astype(np.int64)
    nothing = np.zeros(n, np.int64)
    rows = np.stack([problem.lower, problem.upper, problem.size, problem.alignment - 1, low, weight, nothing, nothing])
    at, change, order, begins, near, stack = (np.zeros(times * n + 16, np.int64) for times in (2, 2, 2, 8, 1, 1))
    scratch = Scratch(at, change, order, begins, near, stack, log=np.zeros((n + _LOGGED, 2), np.int64))
    return np.ascontiguousarray(rows.T), (columns, scratch)


def _pushed(
    problem: PlacementProblem, offsets: np.ndarray, capacity: int, upward: bool, push: Push
) -> tuple[np.ndarray, int]:
    """The buffers that lie, each in the first gap from the top or from the bottom, in the order in which they lay; and
    the work. Each finds a gap where it lay or beyond, since all before it lie where they lay or beyond.
    """
    lies = offsets >= 0
    size = np.where(lies, problem.size, 0)
    order = np.argsort(-(offsets + size) if upward else offsets, kind="stable")
    found = np.zeros_like(offsets)
    work = push(replace(problem, size=size), order, found)
    return np.where(lies, capacity - found - size if upward else found, -1), work


def _blurred(weight: np.ndarray, run: int) -> np.ndarray:
    """Weights, in all but the first run each up to a quarter higher, by a hash of its place and the run."""
    if run == 1:
        return weight
    x = (np.arange(len(weight), dtype=np.uint64) + np.uint64(run << 32)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    return weight + (weight * (x >> np.uint64(48)).astype(np.int64) >> 18)

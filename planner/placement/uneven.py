"""Offsets of buffers that change their size while they live: piles of boxes that keep their places to one another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foreplan.planner.memory.outlines import Box
from foreplan.planner.rows import array, slices

_HEAVIEST = 1 << 32  # of the weights to begin with
_NOWHERE = 1 << 62


@dataclass(frozen=True)
class UnevenBuffer:
    """A buffer to place.

    Attributes:
        boxes: what it holds, and when; one or more.
        alignment, residue: of its offset.
    """

    boxes: Sequence[Box]
    alignment: int
    residue: int = 0


def place_uneven(buffers: Sequence[UnevenBuffer], most_work: int) -> tuple[list[int], int]:
    """Offsets of buffers, one each, and their height, the lowest found.

    First fit in several orders, each of which then learns from where it fails (`squeaky_wheel`), until the height is
    what the boxes of some step take together.

    Args:
        most_work: pairs of boxes looked at, in all.
    """
    from foreplan.planner.placement import uneven_placer

    if not buffers:
        return [], 0
    lower, upper, low, high = (array(box[i] for one in buffers for box in one.boxes) for i in range(4))
    first = slices([one.boxes for one in buffers])
    top = np.maximum.reduceat(high, first[:-1])
    life = np.maximum.reduceat(upper, first[:-1]) - np.minimum.reduceat(lower, first[:-1])
    area = np.add.reduceat((upper - lower) * (high - low), first[:-1])
    shape = first, lower, upper, low, high, array(b.alignment for b in buffers), array(b.residue for b in buffers)
    offsets, best, goal = np.zeros(len(buffers), np.int64), _NOWHERE, _highest(lower, upper, high - low)
    ways = (top, area, life, np.maximum.reduceat(high - low, first[:-1]))
    for key in ways:
        weight = np.maximum(key * (_HEAVIEST / max(int(key.max()), 1)), 1).astype(np.int64)
        best, _ = uneven_placer.squeaky_wheel(weight, *shape, goal, most_work // len(ways), best, offsets)
        if best <= goal:
            break
    return offsets.tolist(), int(best)


def _highest(lower: np.ndarray, upper: np.ndarray, size: np.ndarray) -> int:
    """The most bytes at any time."""
    times = np.concatenate([upper, lower])  # what ends at a time goes before what begins
    change = np.concatenate([-size, size])
    return int(np.cumsum(change[np.argsort(times, kind="stable")]).max())

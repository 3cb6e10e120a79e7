"""The core of a problem of offset search: the buffers that do not always find a place.

A placed buffer denies some offsets to each buffer that lives with it. If all others together deny a buffer fewer
offsets than the capacity has, it always finds a place, so it can be placed last. It then denies nothing to the others,
so that more of them always find a place. Graph colouring sets aside vertices of low degree in the same way (Matula and
Beck, "Smallest-last ordering and clustering and graph coloring algorithms", Journal of the ACM 1983). So a placement of
the core within the capacity, or any larger one, becomes a placement of all. All of it is compiled.
"""

from __future__ import annotations

import numpy as np

from foreplan import jit


@jit.compiled
def set_aside(lower, upper, size, alignment, total, count, capacity, order):  # type: ignore[no-untyped-def]
    """Find the buffers outside the core, for arrays of int64 with one entry a buffer.

    Args:
        size: rounded up to the smallest alignment of all; 0 is set aside at once.
        total: bytes of the others that live with each buffer; changed.
        count: how many of them have bytes; changed.
        capacity: a multiple of the smallest alignment.
        order: written: the buffers set aside; each finds a place when all but those before it are placed.

    Returns:
        How many there are.
    """
    n = size.size
    grain = alignment.min()
    left = np.ones(n, np.bool_)
    aside = 0
    before = -1
    while before < aside:
        before = aside
        for i in range(n):
            # An open interval as long as both sizes, between multiples of the grain, holds this many aligned offsets.
            denied = total[i] + count[i] * (size[i] - 2 * grain + alignment[i])
            if not left[i] or (size[i] and denied + size[i] > capacity):
                continue
            left[i] = False
            order[aside] = i
            aside += 1
            if size[i] == 0:
                continue
            for j in range(n):
                if lower[j] < upper[i] and lower[i] < upper[j]:
                    total[j] -= size[i]
                    count[j] -= 1
    return aside


def outside_core(
    lower: np.ndarray, upper: np.ndarray, size: np.ndarray, alignment: np.ndarray, capacity: int
) -> np.ndarray:
    """Buffers outside the core in the order in which they can be placed once it is; arguments as of `place`, int64."""
    grain = int(alignment.min())
    rounded = -(-size // grain) * grain
    order = np.empty(len(size), np.int64)
    total, others = (_together(lower, upper, weight) for weight in (rounded, (rounded > 0).astype(np.int64)))
    count = set_aside(lower, upper, rounded, alignment, total, others, capacity // grain * grain, order)
    return order[:count][::-1].copy()


def _together(lower: np.ndarray, upper: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """The weight of all others that live with each buffer: of those born before it dies, less those already dead."""
    births, deaths = np.argsort(lower, kind="stable"), np.argsort(upper, kind="stable")
    born = np.concatenate([[0], np.cumsum(weight[births])])[np.searchsorted(lower[births], upper)]
    dead = np.concatenate([[0], np.cumsum(weight[deaths])])[np.searchsorted(upper[deaths], lower, side="right")]
    return (born - dead - weight).astype(np.int64)

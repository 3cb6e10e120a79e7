"""An instance of offset search: buffers with their lives, sizes and alignments, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foreplan.errors import PlanError

Integers = Sequence[int] | np.ndarray


@dataclass(frozen=True)
class Instance:
    """Checked int64 arrays, one entry a buffer, as the arguments of `place`."""

    lower: np.ndarray
    upper: np.ndarray
    size: np.ndarray
    alignment: np.ndarray
    fixed: np.ndarray


def checked(
    lower: Integers, upper: Integers, size: Integers, alignment: Integers | int, fixed: Integers | None
) -> Instance:
    """The arguments of `place` as int64 arrays.

    Raises:
        PlanError: as `place`.
    """
    n = len(size)
    given = (lower, upper, size, np.full(n, alignment) if isinstance(alignment, int) else alignment)
    arrays = [np.array(a, dtype=np.int64).reshape(-1) for a in (*given, np.full(n, -1) if fixed is None else fixed)]
    if any(len(a) != n for a in arrays):
        raise PlanError(f"buffers to place: arrays of lengths {[len(a) for a in arrays]}, one entry a buffer is needed")
    low, up, sizes, aligns, at = arrays
    bad = (low >= up) | (sizes < 0) | (aligns < 1) | (aligns & (aligns - 1) != 0) | ((at >= 0) & (at % aligns != 0))
    if bad.any():
        i = int(bad.argmax())
        raise PlanError(
            f"buffer {i}: life [{low[i]}, {up[i]}) must not be empty, size {sizes[i]} not negative, alignment "
            f"{aligns[i]} a power of two, and a fixed offset ({at[i]}) a multiple of it"
        )
    _check_fixed(Instance(low, up, sizes, aligns, at))
    return Instance(low, up, sizes, aligns, at)


def _check_fixed(instance: Instance) -> None:
    held = [int(i) for i in np.flatnonzero((instance.fixed >= 0) & (instance.size > 0))]
    alive: list[int] = []
    for i in sorted(held, key=lambda i: (instance.lower[i], i)):
        alive = [j for j in alive if instance.upper[j] > instance.lower[i]]
        for j in alive:
            low = max(instance.fixed[i], instance.fixed[j])
            if low < min(instance.fixed[i] + instance.size[i], instance.fixed[j] + instance.size[j]):
                raise PlanError(f"buffers {j} and {i} are alive together and fixed to bytes that overlap, at {low}")
        alive.append(i)

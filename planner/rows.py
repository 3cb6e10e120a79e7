"""Lists of integers as flat int64 arrays, the form in which compiled loops read them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np


def array(numbers: Iterable[int]) -> np.ndarray:
    """The numbers as an array."""
    return np.array(list(numbers), dtype=np.int64)


def flat(lists: Iterable[Iterable[int]]) -> np.ndarray:
    """All rows behind one another."""
    return array(number for row in lists for number in row)


def slices(lists: Sequence[Sequence[object]]) -> np.ndarray:
    """Where each row begins in `flat`, and behind them where the last one ends."""
    return np.concatenate([[0], np.cumsum([len(row) for row in lists], dtype=np.int64)]).astype(np.int64)

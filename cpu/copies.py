"""Copies and zeros of arrays whose element type NumPy may not know: by their bits."""

from __future__ import annotations

from functools import partial

import numpy as np

from foreplan.cpu.kernel import Run


def bits(array: np.ndarray) -> np.ndarray:
    """Elements of bfloat16 as integers of sixteen bits, which NumPy and Numba move; others as they are."""
    return array.view(np.uint16) if array.dtype.name == "bfloat16" else array


def copy(target: np.ndarray, source: np.ndarray) -> Run:
    """A call that copies an array of the same element type."""
    return partial(np.copyto, bits(target), bits(source))


def clear(target: np.ndarray) -> Run:
    """A call that writes zeros."""
    return partial(bits(target).fill, 0)

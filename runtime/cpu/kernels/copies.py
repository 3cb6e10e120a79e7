"""Calls that copy arrays, and that clear them."""

from __future__ import annotations

from functools import partial

import numpy as np

from foreplan.runtime.cpu.codegen.elements import bits
from foreplan.runtime.kernel import Run


def copy(target: np.ndarray, source: np.ndarray) -> Run:
    """A call that copies an array of the same element type."""
    return partial(np.copyto, bits(target), bits(source))


def clear(target: np.ndarray) -> Run:
    """A call that writes zeros."""
    return partial(bits(target).fill, 0)

"""What compiled loops over rows of scores share: a row's maximum, and its exponentials, of which tiny ones are 0.

Floats have the order of their bits as integers once those of negative numbers are turned around, and a maximum of
integers vectorises where one of floats, NaN among them, does not.
"""

from __future__ import annotations

import numba
import numpy as np

from foreplan.cpu.functions import exp32

FLOAT = {"contract", "nsz"}  # nothing that changes what NaN and infinities give
SUMS = {"contract", "nsz", "reassoc"}  # sums in lanes

LOWEST = np.float32(-3e38)  # what a row's maximum is raised to, so that exp(-inf - maximum) is 0
FLUSH = np.float32(1e-25)  # probabilities below are 0: products, of gradients too, meet no denormal numbers
ZERO = np.float32(0)

_TINY = np.float32(-80)  # its exponential is flushed, and no denormal number either: those take many times as long
_SIGN, _MAGNITUDE = np.int32(31), np.int32(0x7FFFFFFF)


@numba.njit(forceinline=True)
def _ordered(x: np.float32) -> np.int32:
    bits = np.float32(x).view(np.int32)
    return np.int32(bits ^ np.int32(np.int32(bits >> _SIGN) & _MAGNITUDE))


@numba.njit(forceinline=True)
def largest(row: np.ndarray, count: int) -> np.float32:
    """The maximum of a row's first elements and `LOWEST`; perhaps NaN where there is one."""
    found = _ordered(LOWEST)
    for k in range(count):
        found = max(found, _ordered(row[k]))
    return np.int32(found ^ np.int32(np.int32(found >> _SIGN) & _MAGNITUDE)).view(np.float32)


@numba.njit(forceinline=True)
def probability(x: np.float32) -> np.float32:
    """exp(x) for x up to 0, flushed; NaN for NaN."""
    x = _TINY if x < _TINY else x
    p = exp32(x)
    return ZERO if p < FLUSH else p

"""What compiled loops over rows of scores share: a row's maximum, and its exponentials, of which tiny ones are 0.

Floats sort like their bits as integers, if the bits of negative numbers are inverted. A maximum of integers vectorises;
one of floats, which may be NaN, does not.
"""

from __future__ import annotations

import numpy as np

from foreplan.runtime.cpu.codegen.elements import number
from foreplan.runtime.cpu.codegen.functions import exp32
from foreplan.runtime.cpu.codegen.jit import SUMS, inlined, looped

BLOCK = 1024  # elements of a row, summed in float32
LOWEST = np.float32(-3e38)  # the least maximum of a row, so that exp(-inf - maximum) is 0
FLUSH = np.float32(1e-25)  # probabilities below are 0: products, of gradients too, meet no denormal numbers
ZERO = np.float32(0)

_TINY = np.float32(-80)  # its exponential is flushed to 0, and is not denormal: such numbers take many times as long
_SIGN, _MAGNITUDE = np.int32(31), np.int32(0x7FFFFFFF)


@inlined
def _ordered(x: np.float32) -> np.int32:
    bits = np.float32(x).view(np.int32)
    return np.int32(bits ^ np.int32(np.int32(bits >> _SIGN) & _MAGNITUDE))


@inlined
def largest(row: np.ndarray, count: int) -> np.float32:
    """The maximum of a row's first elements and `LOWEST`; perhaps NaN if an element is."""
    found = _ordered(LOWEST)
    for k in range(count):
        found = max(found, _ordered(number(row[k])))
    return np.int32(found ^ np.int32(np.int32(found >> _SIGN) & _MAGNITUDE)).view(np.float32)


@inlined
def probability(x: np.float32) -> np.float32:
    """exp(x) for x up to 0, flushed; NaN for NaN."""
    x = _TINY if x < _TINY else x
    p = exp32(x)
    return ZERO if p < FLUSH else p


@looped(fastmath=SUMS)
def row_sum(row):  # type: ignore[no-untyped-def]
    """The sum of a row, in float32 within blocks and in float64 over them."""
    total = 0.0
    for first in range(0, len(row), BLOCK):
        part, block = row[first : first + BLOCK], np.float32(0)
        for k in range(len(part)):
            block += number(part[k])
        total += block
    return total


@looped(fastmath=SUMS)
def scale_and_mask(row, width, scale, mask, base, step):  # type: ignore[no-untyped-def]
    """Scale the first numbers of a row, and add a mask's numbers, a step apart, unless the mask is empty."""
    for k in range(width):
        row[k] *= scale
    if mask.size:
        if step == 1:
            for k in range(width):
                row[k] += number(mask[base + k])
        else:
            for k in range(width):
                row[k] += number(mask[base + k * step])

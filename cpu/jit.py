"""How Numba compiles loops: kept on disk, and what it may change of what floating-point arithmetic gives."""

from __future__ import annotations

import numba

FLOAT = {"contract", "nsz"}  # nothing that changes what NaN and infinities give
SUMS = {"contract", "nsz", "reassoc"}  # sums in lanes
compiled = numba.njit(cache=True, nogil=True, fastmath=FLOAT)
summing = numba.njit(cache=True, nogil=True, fastmath=SUMS)
inlined = numba.njit(inline="always")

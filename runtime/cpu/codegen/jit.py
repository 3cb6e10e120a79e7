"""Options of Numba for loops: the cache on disk, and the changes to floating-point arithmetic that are allowed."""

from __future__ import annotations

from foreplan import jit

FLOAT = {"contract", "nsz"}  # nothing that changes results of NaN and infinities
SUMS = {"contract", "nsz", "reassoc"}  # sums in lanes
compiled = jit.compiled(nogil=True, fastmath=FLOAT)
summing = jit.compiled(nogil=True, fastmath=SUMS)
inlined = jit.compiled(inline="always")

"""How Numba compiles loops: kept on disk, and what it may change of what floating-point arithmetic gives."""

from __future__ import annotations

from foreplan import jit

FLOAT = {"contract", "nsz"}  # nothing that changes what NaN and infinities give
SUMS = {"contract", "nsz", "reassoc"}  # sums in lanes
compiled = jit.compiled(nogil=True, fastmath=FLOAT)
summing = jit.compiled(nogil=True, fastmath=SUMS)
inlined = jit.compiled(inline="always")

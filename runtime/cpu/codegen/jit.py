"""Compiled loops over elements, and in what their arithmetic of floats may differ from IEEE 754's."""

from __future__ import annotations

from functools import partial

from foreplan import jit

FLOAT = {"contract", "nsz"}  # nothing that changes results of NaN and infinities
SUMS = {"contract", "nsz", "reassoc"}  # sums in lanes
looped = partial(jit.compiled, vectorize=True)
compiled = looped(fastmath=FLOAT)
summing = looped(fastmath=SUMS)
inlined = jit.compiled(inline=True)

"""How long a call takes at best, and what is measured to know a machine's speed."""

from __future__ import annotations

import time
from collections.abc import Callable

SIDE, STREAM = 2048, 2**26  # of the product; bytes of the copy, far more than a core's own caches
TIMES = 5


def least_seconds(
    call: Callable[[], object],
    clock: Callable[[], float] = time.perf_counter,
    times: int = TIMES,
    before: Callable[[], object] | None = None,
) -> float:
    """The least time of some calls by a clock, after one that is not counted; `before` runs before each, unmeasured."""
    call()
    found = []
    for _ in range(times):
        if before is not None:
            before()
        started = clock()
        call()
        found.append(clock() - started)
    return min(found)

"""How many threads work on a kernel: oneDNN's, through the OpenMP runtime that it uses, and those of compiled loops."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from itertools import pairwise

from foreplan.cpu.kernel import Run
from foreplan.cpu.library import library
from foreplan.cpu.native import Function, together


def set_threads(count: int) -> None:
    """Let oneDNN use so many threads in every primitive that is described, made or run from now on."""
    library()
    ctypes.CDLL("libgomp.so.1").omp_set_num_threads(count)


def current_threads() -> int:
    """How many `set_threads` allows."""
    library()
    count: int = ctypes.CDLL("libgomp.so.1").omp_get_max_threads()
    return count


@lru_cache(maxsize=1)
def _helpers() -> ThreadPoolExecutor:
    """Threads beside the one that runs a step; they wait without taking time, and are made when first needed."""
    return ThreadPoolExecutor(thread_name_prefix="foreplan")


def ranged(
    function: Callable[..., object], count: int, grain: int, threads: int, *arguments: object, first: int = 0
) -> Run:
    """A call that runs a compiled loop over so many numbers, in parts by several threads where they are enough.

    Args:
        function: called as function(start, stop, *arguments); releases the interpreter's lock; its parts must not
            depend on one another, so that results do not depend on how many there are.
        grain: the least that is worth a part of its own.
        threads: the most parts.
        first: of the numbers.
    """
    parts = max(1, min(threads, count // max(grain, 1)))
    if parts == 1:
        return partial(function, first, first + count, *arguments)
    bounds = [first + count * i // parts for i in range(parts + 1)]
    calls = [partial(function, low, high, *arguments) for low, high in pairwise(bounds)]
    if isinstance(function, Function):
        return together(calls)
    own, *others = calls
    submit = _helpers().submit

    def run() -> None:
        waiting = [submit(other) for other in others]
        own()
        for each in waiting:
            each.result()

    return run

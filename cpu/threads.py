"""How many threads work on a kernel: oneDNN's, through the OpenMP runtime that it uses, and those of compiled loops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise

import numpy as np

from foreplan.cpu.kernel import Run
from foreplan.cpu.library import library
from foreplan.cpu.native import together


def set_threads(count: int) -> None:
    """Let oneDNN use so many threads in every primitive that is described, made or run from now on."""
    library().openmp.omp_set_num_threads(count)


def current_threads() -> int:
    """How many `set_threads` allows."""
    count: int = library().openmp.omp_get_max_threads()
    return count


@contextmanager
def one_thread() -> Iterator[None]:
    """Within, primitives are described for one thread: they are small, or a team's member runs them by itself."""
    threads = current_threads()
    set_threads(1)
    try:
        yield
    finally:
        set_threads(threads)


def ranged(
    function: Callable[..., object],
    count: int,
    grain: int,
    threads: int,
    *arguments: object,
    first: int = 0,
    own: np.ndarray | None = None,
) -> Run:
    """A call that runs a compiled loop over so many numbers, in parts by several threads where they are enough.

    Args:
        function: compiled, and called as function(start, stop, *arguments); its parts must not depend on one another,
            so that results do not depend on how many there are.
        grain: the least that is worth a part of its own.
        threads: the most parts.
        first: of the numbers.
        own: a row for each thread, which its part takes as one more argument.
    """
    parts = max(1, min(threads, count // max(grain, 1)))
    bounds = [first + count * i // parts for i in range(parts + 1)]
    rows = [(row,) for row in own] if own is not None else [()] * parts
    calls = [partial(function, low, high, *arguments, *row) for (low, high), row in zip(pairwise(bounds), rows)]
    return calls[0] if parts == 1 else together(calls)

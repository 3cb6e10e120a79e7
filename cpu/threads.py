"""How many threads work on a kernel: oneDNN's, through the OpenMP runtime that it uses, and the loops' own."""

from __future__ import annotations

import ctypes

from foreplan.cpu.library import library


def set_threads(count: int) -> None:
    """Let every kernel that is made or run from now on use so many threads."""
    library()
    ctypes.CDLL("libgomp.so.1").omp_set_num_threads(count)

"""Arenas between pages that nobody may touch: whoever reads or writes outside ends at once, by a signal."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from foreplan.base.units import align_up
from foreplan.runtime.numpy import engine

PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
NONE = 0  # PROT_NONE


def allocate(heights: Sequence[int]) -> list[np.ndarray]:
    """As the NumPy engine has it; every region ends right before a page out of bounds, and begins behind one."""
    made = []
    for height in heights:
        inside = align_up(max(height, 1), PAGE)
        pages = mmap.mmap(-1, inside + 2 * PAGE)
        whole = np.frombuffer(pages, np.uint8)
        address = whole.ctypes.data
        for edge in (address, address + PAGE + inside):
            if _libc.mprotect(edge, PAGE, NONE):
                raise OSError(ctypes.get_errno(), "mprotect")
        end = PAGE + inside
        start = end - align_up(height, 64)
        whole[PAGE:start] = 0xAA
        made.append(whole[start : start + height])
    return made


@contextmanager
def guarded() -> Iterator[None]:
    """Sessions that are bound within it have such arenas."""
    before = engine.allocate
    engine.allocate = allocate
    try:
        yield
    finally:
        engine.allocate = before

"""Python's garbage collector, which stands still while a graph is built and planned."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """Leave cycles of dead objects alone until the block ends.

    A graph of 100,000 nodes is millions of objects that live on and point at each other in no cycle, and the collector
    looks at all of them whenever their number has grown by a quarter.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()

"""Work that a machine does once, such as compiling the planner: how long it took here, and who is told of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_spent = 0.0
_depth = 0
listeners: list[Callable[[str], None]] = []  # each is called with what is done next


def seconds_spent() -> float:
    """How long this process has done such work so far, or has waited for another one to do it."""
    return _spent


@contextmanager
def once(what: str) -> Iterator[None]:
    """A context in which such work is done.

    Args:
        what: for people: "the planner", "loops".
    """
    global _spent, _depth
    for tell in listeners:
        tell(what)
    started, _depth = time.perf_counter(), _depth + 1
    try:
        yield
    finally:
        _depth -= 1
        if _depth == 0:
            _spent += time.perf_counter() - started

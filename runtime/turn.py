"""Whose turn it is: one call at a time works on an arena, and others wait until it is done."""

from __future__ import annotations

import os
import threading
from weakref import WeakSet


class Turn:
    """The lock of all sessions that share an arena. The thread that holds it may take it again.

    Attributes:
        lock: take it with `with turn.lock:`. That is one instruction of the interpreter, so that Ctrl-C comes before it
            is taken or after it is given back. A method of ours around it could be interrupted in between.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        _TURNS.add(self)


_TURNS: WeakSet[Turn] = WeakSet()


def _renew() -> None:
    """A forked process has one thread, and nobody who would give back what other threads held."""
    for turn in _TURNS:
        turn.lock = threading.RLock()


os.register_at_fork(after_in_child=_renew)

"""Functions that are compiled when they are first called with arguments of new types."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any

import numpy as np

from foreplan.jit.calls import NO_INDEX, NO_MEMORY
from foreplan.jit.entries import Entry, make_entry
from foreplan.jit.source import Source
from foreplan.jit.types import type_of, written

VARIABLE = "FOREPLAN_JIT"
_making = threading.RLock()  # held by the thread that makes machine code, which others may need too


def _renew() -> None:
    """A forked process has one thread, and nobody who would give back what another one held."""
    global _making
    _making = threading.RLock()


os.register_at_fork(after_in_child=_renew)


class Compiled:
    """A function in Python that runs as machine code."""

    __name__: str

    def __init__(self, source: Source) -> None:
        update_wrapper(self, source.function)
        self.source = source
        self._entries: dict[tuple[Any, ...], Entry] = {}

    def __call__(self, *arguments: Any) -> Any:
        """Call it.

        Raises:
            TypeError: it takes no arguments of these types, or does what compiled functions cannot.
            MemoryError: there is no memory for an array that it makes.
            IndexError: where indices are checked, one is not within its axis.
        """
        entry, table = self.prepared(arguments)
        status = entry.call(0, 0, table.ctypes.data)
        if status == NO_MEMORY:
            raise MemoryError(f"{self.__name__} has no memory for an array")
        if status:
            raise IndexError(f"{self.__name__}: in line {status - NO_INDEX}, an index is not within its axis")
        return entry.results(table)

    def prepared(self, arguments: tuple[Any, ...]) -> tuple[Entry, np.ndarray]:
        """Its machine code for arguments of such types, compiled now if it is not on disk; and the table for it, which
        does not keep arrays alive.
        """
        words: list[int] = []
        kinds: list[Any] = []
        for argument in arguments:
            written(argument, words, kinds)
        key = tuple(kinds)
        if (found := self._entries.get(key)) is None:
            checked = os.environ.get(VARIABLE) == "checked"
            with _making:
                if (found := self._entries.get(key)) is None:
                    found = make_entry(self.source, tuple(map(type_of, arguments)), checked=checked)
                    self._entries[key] = found
        return found, found.table(words)


def compiled(
    function: Callable[..., Any] | None = None,
    *,
    fastmath: set[str] | None = None,
    inline: bool = False,
    vectorize: bool = False,
) -> Any:
    """A function that is compiled when it is first called with arguments of new types.

    Args:
        function: in Python; None: the result is a decorator.
        fastmath: LLVM's names of what is allowed beyond IEEE 754, such as "contract" and "reassoc".
        inline: always put its code where it is called; its arithmetic is then as the caller's.
        vectorize: look for loops that may work on several elements at once, also in what it calls.
    """
    if function is None:
        return partial(compiled, fastmath=fastmath, inline=inline, vectorize=vectorize)
    if os.environ.get(VARIABLE) == "off":
        return function
    return Compiled(Source(function, tuple(sorted(fastmath or ())), inline, vectorize))

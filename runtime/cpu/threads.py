"""How many threads work on a kernel: oneDNN's, through the OpenMP runtime that it uses, and those of compiled loops."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import pairwise
from typing import TypeVar

import numpy as np

from foreplan.runtime.cpu.codegen.native import together
from foreplan.runtime.cpu.onednn.library import library
from foreplan.runtime.kernel import Run

T = TypeVar("T")
_forked: set[int] = set()  # in a forked process: the thread that this one copied


def _note_fork() -> None:
    _forked.clear()
    _forked.add(threading.get_ident())


os.register_at_fork(after_in_child=_note_fork)


def with_team(call: Callable[[], T], threads: int) -> T:
    """The result of a call whose kernels use `threads` threads.

    GCC's OpenMP keeps a team of threads for each thread that begins a parallel part. A forked process has a copy of the
    forking thread, but not its team, and would wait for the team without end. So the copy leaves the call to a new
    thread with a team of its own; that takes some hundred microseconds.
    """
    if threads == 1 or threading.get_ident() not in _forked:
        return call()
    done: Future[T] = Future()

    def work() -> None:
        set_threads(threads)  # each thread has its own number
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    worker = threading.Thread(target=work, name="foreplan step")
    worker.start()
    try:
        worker.join()
    except BaseException:  # Ctrl-C: the call ends before anybody reads its memory
        worker.join()
        raise
    return done.result()


def set_threads(count: int) -> None:
    """Let oneDNN use `count` threads in every primitive that is described, made or run from now on."""
    threads_set(count)()


def threads_set(count: int) -> Run:
    """A call of the compiled function behind `set_threads`, for the thread that makes the call."""
    return partial(library().openmp.omp_set_num_threads, count)


def current_threads() -> int:
    """The number that `set_threads` has set."""
    count: int = library().openmp.omp_get_max_threads()
    return count


@contextmanager
def threads_set_to(count: int) -> Iterator[None]:
    """A context in which primitives are described or made for `count` threads."""
    threads = current_threads()
    set_threads(count)
    try:
        yield
    finally:
        set_threads(threads)


def one_thread() -> AbstractContextManager[None]:
    """A context in which primitives are described for one thread: they are small, or run by one thread each."""
    return threads_set_to(1)


def ranged(
    function: Callable[..., object],
    count: int,
    grain: int,
    threads: int,
    *arguments: object,
    own: np.ndarray | None = None,
) -> Run:
    """A call that runs a compiled loop over a range; several threads share a long range.

    Args:
        function: compiled, and called as function(start, stop, *arguments). Its parts must not depend on one another,
            so that results do not depend on the number of parts.
        grain: the least length of a part.
        threads: the most parts.
        own: a row for each thread, a further argument of its part.
    """
    parts = max(1, min(threads, count // max(grain, 1)))
    bounds = [count * i // parts for i in range(parts + 1)]
    rows = [(row,) for row in own] if own is not None else [()] * parts
    calls = [partial(function, low, high, *arguments, *row) for (low, high), row in zip(pairwise(bounds), rows)]
    return calls[0] if parts == 1 else together(calls)

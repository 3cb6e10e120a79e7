"""A command of foreplan on one rank of a job, the last of which does something else, or the first.

mpiexec -n 2 python -m tests.ranks.faulty FAULT foreplan-words … [-- what the odd rank has instead]
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from collections.abc import Callable

from foreplan.runtime.launchers import launch_of

AT = 7  # the step behind which a fault comes
FIRST = ("full disk", "failing disk")  # faults of the rank that writes


def _disk(number: int) -> Callable[[], None]:
    """What lets all writes fail from now on."""

    def fail(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    return lambda: setattr(os, "fsync", fail)


def _error() -> None:
    raise ValueError("an error of one rank")


FAULTS: dict[str, Callable[[], object]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "terminate": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "interrupt": lambda: os.kill(os.getpid(), signal.SIGINT),
    "sleep": lambda: time.sleep(600),
    "exit": lambda: os._exit(7),
    "error": _error,
    "full disk": _disk(errno.ENOSPC),
    "failing disk": _disk(errno.EIO),
}
EARLY: dict[str, Callable[[], object]] = {
    "never starts": lambda: time.sleep(600),
    "fails to start": lambda: sys.exit(9),
}


def main() -> None:
    """Run the command, and let the fault come."""
    fault, words, *odd_words = sys.argv[1], *_split(sys.argv[2:])
    found = launch_of(os.environ)
    assert found is not None
    odd = found.rank == (0 if fault in FIRST else found.size - 1)
    if odd and fault in EARLY:
        EARLY[fault]()
    if odd and fault in FAULTS:
        from foreplan.cli import training

        after = training.Saving.after

        def with_fault(saving: training.Saving, step: int) -> None:
            after(saving, step)
            if step == AT:
                FAULTS[fault]()

        training.Saving.after = with_fault  # type: ignore[method-assign]
    sys.argv[1:] = odd_words[0] if odd and odd_words else words
    from foreplan.cli.main import main as command

    command()


def _split(words: list[str]) -> list[list[str]]:
    """Words before and behind a `--`."""
    if "--" not in words:
        return [words]
    at = words.index("--")
    return [words[:at], words[at + 1 :]]


if __name__ == "__main__":
    main()

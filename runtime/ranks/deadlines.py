"""Ranks that others wait for: until when, and what is said of one that has not come."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from foreplan.base.errors import SessionError
from foreplan.base.units import format_seconds

DEADLINE = 600.0  # seconds; the first rank may write a checkpoint meanwhile
WAY_OUT = "where ranks may take longer, raise the deadline (--deadline SECONDS, or current(deadline=…) in a script)"
STOPPED = 20.0  # seconds after which a process of this machine that is stopped, or has ended, counts as late
_STATES = {"T": "is stopped", "t": "is stopped", "Z": "has ended", "X": "has ended", "": "has ended"}


class RankProcess(NamedTuple):
    """A process that is a rank.

    Attributes:
        host: the machine, by the name that it has itself.
        process: its number there.
        where: what tells which processes have their numbers from the same system and container.
    """

    host: str
    process: int
    where: str = ""

    @classmethod
    def here(cls) -> RankProcess:
        """This process."""
        return cls(socket.gethostname(), os.getpid(), _here())

    def state(self) -> str:
        """What can be seen of it from here, for people; empty: nothing, since it runs, or runs elsewhere."""
        if not self.where or self.where != _here():
            return ""
        try:
            text = Path(f"/proc/{self.process}/stat").read_text()
        except FileNotFoundError:
            return _STATES[""]
        except OSError:
            return ""
        return _STATES.get(text.rpartition(")")[2].split()[0], "")

    def __str__(self) -> str:
        state = self.state()
        return f"process {self.process} on {self.host}" + (f", which {state}" if state else "")


@lru_cache(maxsize=1)
def _here() -> str:
    """See `RankProcess.where`; empty: nothing can be seen."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


class Look:
    """What a rank that waits sees of those of this machine that it waits for."""

    def __init__(self, rank: int, members: Sequence[int], who: Sequence[RankProcess]) -> None:
        """
        Args:
            rank: the one that waits.
            members: the ranks that take part.
            who: all ranks are.
        """
        self._others = [who[each] for each in members if each != rank]
        self._first: float | None = None  # when one of them was first seen so

    def is_over(self, now: float) -> bool:
        """Whether one has been stopped, or has ended, for as long as `STOPPED`; asked now and then."""
        if not any(each.state() for each in self._others):
            self._first = None
            return False
        self._first = now if self._first is None else self._first
        return now - self._first > STOPPED


class LateError(SessionError):
    """A rank that another one waits for has not come in time, or is gone.

    Attributes:
        ranks: those that have not come, as far as this is known.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


def late(
    what: str, rank: int, seconds: float, members: Sequence[int], waiting: Mapping[int, str], who: Sequence[RankProcess]
) -> LateError:
    """The error of a rank that has waited too long.

    Args:
        what: it waits for.
        rank: its number in the job.
        seconds: that it has waited.
        members: the ranks that take part in what it waits for.
        waiting: what other ranks wait for, of those that do.
        who: all ranks are.
    """
    missing = [each for each in members if each != rank and each not in waiting]
    if not missing:  # those wait for others
        missing = [each for each in range(len(who)) if each != rank and each not in waiting]
    lines = [f"rank {each} ({who[each]}) has not come" for each in missing[:5]]
    lines += [f"nor have {len(missing) - 5} more ranks"] if len(missing) > 5 else []
    elsewhere = {each: text for each, text in sorted(waiting.items()) if text != what and each != rank}
    lines += [f"rank {each} waits for {text}" for each, text in list(elsewhere.items())[:5]]
    if not missing:
        lines.append("all ranks wait, and each must make the same calls in the same order")
    told = f"rank {rank} has waited {format_seconds(seconds)} for {what}: {'; '.join(lines)}"
    return LateError(f"{told}. The job ends: go on from the last checkpoint; {WAY_OUT}", missing)


def lost(
    what: str, rank: int, reason: object, members: Sequence[int], waiting: Mapping[int, str], who: Sequence[RankProcess]
) -> LateError:
    """The error of a rank that the library says another one has left.

    Args:
        reason: in the library's words.
        waiting: see `late`; these have ended for this reason alone, where they have.
    """
    gone = [each for each in range(len(who)) if each not in waiting and who[each].state() == _STATES[""]]
    gone = [each for each in gone if each in members] or gone
    of = ", ".join(f"rank {each} ({who[each]})" for each in gone[:5]) or "another rank is gone"
    first = (str(reason).splitlines() or [type(reason).__name__])[0]
    return LateError(
        f"rank {rank} waits for {what} in vain: {of} ({first}). The job ends: go on from the last checkpoint", gone
    )

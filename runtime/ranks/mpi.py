"""Ranks that are processes of one MPI job, by mpi4py. Imported where a launcher has started several."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from foreplan.runtime.kernel import Run
from foreplan.runtime.ranks.deadlines import DEADLINE, Look, RankProcess, late, lost
from foreplan.runtime.world.world import Told, comes_true, gathered, place_in_group

_NOTE = 1  # the tag of what ranks tell one another while they wait
_SOON = 0.1  # seconds, after which a rank that waits no longer asks all the time,
_REST = 0.0002  # but after rests of so many; large messages go on in as large pieces as the library has room for
_LONG = 0.5  # seconds after which a rank that waits listens to what others ask
_ASKS, _ANSWERS = b"?", b"!"


class _Waits:
    """How the ranks of a job wait for one another: until a deadline, at which each asks all others what they wait for.
    Who waits answers, so whoever does not answer is late.
    """

    def __init__(self, comm: MPI.Comm, deadline: float) -> None:
        """All ranks of `comm`, at the same time; on it alone they ask and answer."""
        self.comm, self.deadline = comm, deadline
        self.who: list[RankProcess] = comm.allgather(RankProcess.here())
        self.heard: dict[int, str] = {}
        self._told: list[MPI.Request] = []

    def until(self, done: Callable[[], bool], what: str, members: Sequence[int]) -> None:
        """Return when something is done; libraries do their work in these questions.

        Raises:
            LateError: it is not done in time, or never will be.
        """
        try:
            if done():  # mostly
                return
            last, look = time.monotonic(), Look(self.comm.rank, members, self.who)
            seconds, listened = 0.0, _LONG
            while not done():
                time.sleep(_REST) if seconds > _SOON else os.sched_yield()
                now = time.monotonic()
                seconds, last = seconds + min(now - last, _LONG), now  # what is longer, this process has slept
                if seconds < listened:
                    continue
                listened = seconds + _LONG / 10
                self._listen(what)
                if seconds > self.deadline or look.is_over(seconds):
                    self._ask(what)
                    if not comes_true(lambda: self._listen(what) or done(), min(1.0, self.deadline)):
                        raise late(what, self.comm.rank, seconds, members, self.heard, self.who)
                    return
        except MPI.Exception as error:
            raise lost(what, self.comm.rank, error, members, self.heard, self.who) from None

    def _ask(self, what: str) -> None:
        self.heard.clear()
        for rank in range(self.comm.size):
            if rank != self.comm.rank:
                self._tell(rank, _ASKS, what)

    def _tell(self, rank: int, kind: bytes, what: str) -> None:
        text = np.frombuffer(kind + what.encode()[:500], np.uint8)
        self._told.append(self.comm.Isend(text, rank, _NOTE))

    def _listen(self, what: str) -> bool:
        """Hear what others tell, and answer those that ask; never done."""
        status = MPI.Status()
        while self.comm.Iprobe(MPI.ANY_SOURCE, _NOTE, status):
            text = np.empty(status.Get_count(MPI.BYTE), np.uint8)
            self.comm.Recv(text, status.source, _NOTE)
            told = text.tobytes()
            self.heard[status.source] = told[1:].decode(errors="replace")
            if told[:1] == _ASKS:
                self._tell(status.source, _ANSWERS, what)
        return False


class Mpi:
    """The world of an MPI library.

    What it moves are bytes, and it computes nothing: the order of sums is foreplan's own. Calls do not block. What has
    begun goes on in `poll` and in waits: few libraries have threads for it.
    """

    def __init__(self, comm: MPI.Comm = MPI.COMM_WORLD, whole: Mpi | None = None, deadline: float = DEADLINE) -> None:
        """All ranks of `comm` at the same time; `whole` is what a group is of."""
        self._comm, self._talk = comm.Dup(), comm.Dup()  # what plans exchange, and what else is told
        self.rank, self.size = self._comm.rank, self._comm.size
        self._waits: _Waits = _Waits(comm.Dup(), deadline) if whole is None else whole._waits
        self._members: list[int] = self._talk.allgather(self._waits.comm.rank)
        first = MPI.Get_library_version().splitlines()[0].partition(",")[0]
        self.name = " ".join(first.replace("Version:", "").split())
        self.neighbours = self._comm.Split_type(MPI.COMM_TYPE_SHARED).size
        self._open: list[MPI.Request] = [] if whole is None else whole._open
        self._groups: dict[tuple[int, int], Mpi] = {}

    def begin(self, kind: str, peer: int, source: np.ndarray, into: np.ndarray, what: str = "") -> Run:
        """One call that does not block; a shift is two."""
        comm = self._comm
        if kind == "all_gather":
            requests = [comm.Iallgather(source, into)]
        elif kind == "all_to_all":
            requests = [comm.Ialltoall(source, into)]
        elif kind == "broadcast":
            if self.rank == peer:
                np.copyto(into, source)
            requests = [comm.Ibcast(into, peer)]
        else:
            before, behind = (self.rank - peer) % self.size, (self.rank + peer) % self.size
            requests = [comm.Irecv(into, before), comm.Isend(source, behind)]
        return self._waiting(what or f"{kind} of {source.size} bytes", self._members, *requests)

    def send(self, rank: int, number: int, source: np.ndarray, what: str = "") -> Run:
        """Its number is the tag."""
        text, request = what or f"message {number} to be received", self._comm.Isend(source, rank, number)
        return self._waiting(text, [self._members[rank]], request)

    def receive(self, rank: int, number: int, into: np.ndarray, what: str = "") -> Run:
        """Its number is the tag."""
        text, request = what or f"message {number}", self._comm.Irecv(into, rank, number)
        return self._waiting(text, [self._members[rank]], request)

    def _waiting(self, what: str, members: Sequence[int], *requests: MPI.Request) -> Run:
        """What waits for requests, which are under way until then."""
        self._open += requests
        under_way = list(requests)

        def wait() -> None:
            self._waits.until(lambda: MPI.Request.Testall(under_way), what, members)
            self._open[:] = [each for each in self._open if each not in requests]

        return wait

    def group(self, ranks: int, stride: int) -> Mpi:
        """A communicator of its own, made when it is first asked for, by all ranks at the same time."""
        if (ranks, stride) == (self.size, 1):
            return self
        if (ranks, stride) not in self._groups:
            what = f"groups of {ranks} ranks to be made"
            self._waits.until(self._talk.Ibarrier().Test, what, self._members)
            first, number = place_in_group(self.rank, ranks, stride)
            self._groups[ranks, stride] = Mpi(self._comm.Split(first, number), self)
        return self._groups[ranks, stride]

    def poll(self) -> None:
        """Ask for all that has begun."""
        if self._open:
            MPI.Request.Testsome(self._open)

    def tell(self, note: bytes, what: str) -> Told:
        """One call that does not block."""
        own, notes = np.frombuffer(note, np.uint8), np.empty((self.size, len(note)), np.uint8)
        request = self._talk.Iallgather(own, notes)

        def told() -> list[bytes]:
            self._waits.until(request.Test, what, self._members)
            return [each.tobytes() for each in notes]

        return told

    def gather(self, content: Any, what: str = "what all ranks tell") -> list[Any]:
        """By pickling."""
        return gathered(self, content, what)

    def meet(self, note: bytes, seconds: float) -> list[bytes] | None:
        """On a communicator of its own. After it, all may finalize MPI, and each ends with its own code."""
        if self._open:
            return None
        notes = np.empty((self.size, len(note)), np.uint8)
        request = self._waits.comm.Iallgather(np.frombuffer(note, np.uint8), notes)
        return [each.tobytes() for each in notes] if comes_true(request.Test, seconds) else None

    def abort(self, code: int) -> None:
        """MPI_Abort."""
        self._comm.Abort(code)

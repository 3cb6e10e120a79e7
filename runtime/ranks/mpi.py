"""Ranks that are processes of one MPI job, by mpi4py. Imported where a launcher has started several."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from foreplan.runtime.kernel import Run
from foreplan.runtime.ranks.world import comes_true, place_in_group


class Mpi:
    """The world of an MPI library.

    What it moves are bytes, and it computes nothing: the order of sums is foreplan's own. Calls do not block. What has
    begun goes on in `poll` and in waits: few libraries have threads for it.
    """

    def __init__(self, whole: Mpi | None = None, comm: MPI.Comm = MPI.COMM_WORLD) -> None:
        """All ranks of `comm` at the same time; `whole` is what a group is of."""
        self._comm, self._ending = comm.Dup(), comm.Dup()
        self.rank, self.size = self._comm.rank, self._comm.size
        first = MPI.Get_library_version().splitlines()[0].partition(",")[0]
        self.name = " ".join(first.replace("Version:", "").split())
        self.neighbours = self._comm.Split_type(MPI.COMM_TYPE_SHARED).size
        self._open: list[MPI.Request] = [] if whole is None else whole._open
        self._groups: dict[tuple[int, int], Mpi] = {}

    def begin(self, kind: str, peer: int, source: np.ndarray, into: np.ndarray) -> Run:
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
        return self._waiting(*requests)

    def send(self, rank: int, number: int, source: np.ndarray) -> Run:
        """Its number is the tag."""
        return self._waiting(self._comm.Isend(source, rank, number))

    def receive(self, rank: int, number: int, into: np.ndarray) -> Run:
        """Its number is the tag."""
        return self._waiting(self._comm.Irecv(into, rank, number))

    def _waiting(self, *requests: MPI.Request) -> Run:
        """What waits for requests, which are under way until then."""
        self._open += requests

        def wait() -> None:
            MPI.Request.Waitall(list(requests))
            self._open[:] = [each for each in self._open if each not in requests]

        return wait

    def group(self, ranks: int, stride: int) -> Mpi:
        """A communicator of its own, made when it is first asked for, by all ranks at the same time."""
        if (ranks, stride) == (self.size, 1):
            return self
        if (ranks, stride) not in self._groups:
            first, number = place_in_group(self.rank, ranks, stride)
            self._groups[ranks, stride] = Mpi(self, self._comm.Split(first, number))
        return self._groups[ranks, stride]

    def poll(self) -> None:
        """Ask for all that has begun."""
        if self._open:
            MPI.Request.Testsome(self._open)

    def gather(self, content: Any) -> list[Any]:
        """By pickling."""
        found: list[Any] = self._comm.allgather(content)
        return found

    def meet(self, note: bytes, seconds: float) -> list[bytes] | None:
        """On a communicator of its own. After it, all may finalize MPI, and each ends with its own code."""
        if self._open:
            return None
        notes = np.empty((self.size, len(note)), np.uint8)
        request = self._ending.Iallgather(np.frombuffer(note, np.uint8), notes)
        return [each.tobytes() for each in notes] if comes_true(request.Test, seconds) else None

    def abort(self, code: int) -> None:
        """MPI_Abort."""
        self._comm.Abort(code)

"""Ranks that torchrun has started, by PyTorch's Gloo."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import numpy as np

from foreplan.runtime.kernel import Run
from foreplan.runtime.ranks.deadlines import DEADLINE, STOPPED, Look, RankProcess, late, lost
from foreplan.runtime.world.world import Told, comes_true, gathered, place_in_group

_LONG = 0.5  # seconds after which a rank that waits says so
_SETTLED = 0.1  # seconds in which the library's threads have let go of arrays; this one leaves them Python's lock
_MORE = 30.0  # seconds that the library waits beyond the deadline, so that it is foreplan that tells


def connected(deadline: float = DEADLINE) -> Gloo:
    """The world of all processes of a job, as torchrun's environment has it.

    Raises:
        ImportError: there is no PyTorch.
        ValueError: the environment does not say where they meet.
        RuntimeError: they do not come together.
    """
    import torch.distributed as dist

    store, rank, size = next(dist.rendezvous("env://", timeout=timedelta(seconds=deadline)))
    longest = timedelta(seconds=deadline + _MORE)
    own = dist.PrefixStore("foreplan", store)
    dist.init_process_group("gloo", store=own, rank=rank, world_size=size, timeout=longest)
    atexit.register(dist.destroy_process_group)
    return Gloo(list(range(size)), dist.group.WORLD, dist.new_group(timeout=longest), _Waits(own, rank, size, deadline))


class _Waits:
    """How the ranks of a job wait for one another: until a deadline, at which each looks what all others wait for. A
    rank that waits long has told it in the store where all have met, so whoever has not told is late.
    """

    def __init__(self, store: Any, rank: int, size: int, deadline: float) -> None:
        self.store, self.rank, self.deadline = store, rank, deadline
        self.who: list[RankProcess] = [RankProcess.here()] * size
        self.what = ""  # of the wait in which this rank is; empty: none
        self._members: Sequence[int] = ()  # of the same
        self._number = 0  # of waits so far
        self._told = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tell, name="foreplan: what ranks wait for", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def close(self) -> None:
        """Tell nothing more. A thread that is within the library when Python ends would end the process as a fault; so
        would the library's own threads, which take Python's lock to let go of the arrays of what they have just done.
        """
        self._over.set()
        self._thread.join(10 * _LONG)
        time.sleep(_SETTLED)

    def until(self, works: Sequence[Any], what: str, members: Sequence[int]) -> None:
        """Return when all works are done.

        Raises:
            LateError: they are not done in time, or never will be.
        """
        started = time.monotonic()
        self._number, self._members, self.what = self._number + 1, members, what
        try:
            for work in works:
                work.wait(timedelta(seconds=max(0.001, self.deadline - (time.monotonic() - started))))
        except RuntimeError as error:
            seconds = time.monotonic() - started
            heard = self._heard_last()
            if seconds < 0.95 * self.deadline:
                raise lost(what, self.rank, error, members, heard, self.who) from None
            raise late(what, self.rank, seconds, members, heard, self.who) from None
        self.what = ""
        if self._told:
            self._told = False
            self._put("")

    @contextmanager
    def losing(self, what: str, members: Sequence[int]) -> Iterator[None]:
        """A block in which the library may find that another rank is gone.

        Raises:
            LateError: it does.
        """
        try:
            yield
        except RuntimeError as error:
            self.what = what
            raise lost(what, self.rank, error, members, self._heard_last(), self.who) from None

    def _tell(self) -> None:
        """Of a thread: whatever this rank waits for at two looks is told once. Where it waits for a process that is
        stopped, which no library notices, the thread ends this one.
        """
        before, look = 0, Look(self.rank, (), self.who)
        while not self._over.wait(_LONG):
            number, what = self._number, self.what
            if number != before:
                before, look = number, Look(self.rank, self._members, self.who)
            elif what and not self._told:
                self._put(what)
                self._told = True
                if number != self._number or not self.what:  # it has just come
                    self._told = False
                    self._put("")
            elif what and look.is_over(time.monotonic()):
                error = late(what, self.rank, STOPPED, self._members, self._heard_last(), self.who)
                print(f"error: {error}", file=sys.stderr, flush=True)
                os._exit(1)

    def _put(self, what: str) -> None:
        """Tell what this rank waits for."""
        with suppress(RuntimeError):  # the store has gone, and the job with it
            self.store.set(f"waits/{self.rank}", what)

    def _heard_last(self) -> dict[int, str]:
        """What others have told that they wait for, when those have told it that came last. This rank's is told, too:
        it will be gone for that reason alone.
        """
        found = dict[int, str]()
        self._put(self.what)
        time.sleep(2 * _LONG)
        for rank in range(len(self.who)):
            try:
                if self.store.check([f"waits/{rank}"]) and (what := self.store.get(f"waits/{rank}")):
                    found[rank] = what.decode(errors="replace")
            except RuntimeError:
                break
        return found


class Gloo:
    """A world of processes that PyTorch connects.

    What it moves are bytes, and it computes nothing: the order of sums is foreplan's own. Calls do not block, and go on
    by threads of the library.
    """

    def __init__(self, ranks: list[int], group: Any, talk: Any, waits: _Waits, whole: Gloo | None = None) -> None:
        """
        Args:
            ranks: of the whole job, in the order of this world.
            group: PyTorch's, for what plans exchange.
            talk: one of the same ranks, for what else is told.
            waits: how they wait.
            whole: what a group is of.
        """
        import torch
        import torch.distributed as dist

        self._torch, self._dist = torch, dist
        self._all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # until 2.12
        self._ranks, self._group, self._talk, self._waits = ranks, group, talk, waits
        self.rank, self.size = ranks.index(dist.get_rank()), len(ranks)
        self.name = f"Gloo of PyTorch {torch.__version__}"
        self.neighbours = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        self._open: set[int] = set() if whole is None else whole._open
        self._groups: dict[tuple[int, int], Gloo] = {}
        if whole is None:
            self._ending = self._new_group(ranks)
            waits.who = self.gather(RankProcess.here(), "who all ranks are")

    def _new_group(self, ranks: list[int]) -> Any:
        return self._dist.new_group(ranks, timeout=timedelta(seconds=self._waits.deadline + _MORE))

    def begin(self, kind: str, peer: int, source: np.ndarray, into: np.ndarray, what: str = "") -> Run:
        """One call that does not block; a shift is two."""
        what = what or f"{kind} of {source.size} bytes"
        given, result = self._tensor(source), self._tensor(into)
        among: dict[str, Any] = {"group": self._group, "async_op": True}
        members = self._ranks
        with self._waits.losing(what, members):
            if kind == "all_gather":
                works = [self._all_gather(result, given, **among)]
            elif kind == "all_to_all":
                works = [self._dist.all_to_all_single(result, given, **among)]
            elif kind == "broadcast":
                if self.rank == peer:
                    np.copyto(into, source)
                works = [self._dist.broadcast(result, self._ranks[peer], **among)]
            elif not peer % self.size:
                np.copyto(into, source)
                return self.poll
            else:
                before, behind = members = [self._ranks[(self.rank + by) % self.size] for by in (-peer, peer)]
                works = [self._dist.irecv(result, before, group=self._group)]
                works.append(self._dist.isend(given, behind, group=self._group))
        return self._waiting(what, members, *works)

    def send(self, rank: int, number: int, source: np.ndarray, what: str = "") -> Run:
        """Its number is the tag."""
        what, to = what or f"message {number} to be received", self._ranks[rank]
        with self._waits.losing(what, [to]):
            work = self._dist.isend(self._tensor(source), to, self._group, number)
        return self._waiting(what, [to], work)

    def receive(self, rank: int, number: int, into: np.ndarray, what: str = "") -> Run:
        """Its number is the tag."""
        what, of = what or f"message {number}", self._ranks[rank]
        with self._waits.losing(what, [of]):
            work = self._dist.irecv(self._tensor(into), of, self._group, number)
        return self._waiting(what, [of], work)

    def _tensor(self, array: np.ndarray) -> Any:
        """An array as PyTorch has it; one that may not be written is only read."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            return self._torch.from_numpy(array)

    def _waiting(self, what: str, members: Sequence[int], *works: Any) -> Run:
        """What waits for calls, which are under way until then."""
        self._open.update(map(id, works))

        def wait() -> None:
            self._waits.until(works, what, members)
            self._open.difference_update(map(id, works))

        return wait

    def group(self, ranks: int, stride: int) -> Gloo:
        """A process group of its own, made when it is first asked for, by all ranks at the same time."""
        if (ranks, stride) == (self.size, 1):
            return self
        if (ranks, stride) not in self._groups:
            places = [place_in_group(rank, ranks, stride) for rank in range(self.size)]
            with self._waits.losing(f"groups of {ranks} ranks to be made", self._ranks):
                for first in sorted({first for first, _ in places}):  # every rank takes part in making each
                    numbers = [first + stride * number for number in range(ranks)]
                    members = [self._ranks[number] for number in numbers]
                    made, talk = self._new_group(members), self._new_group(members)
                    if self.rank in numbers:
                        self._groups[ranks, stride] = Gloo(members, made, talk, self._waits, self)
        return self._groups[ranks, stride]

    def poll(self) -> None:
        """The library has threads for it."""

    def tell(self, note: bytes, what: str) -> Told:
        """One call that does not block."""
        own, notes = np.frombuffer(note, np.uint8), np.empty((self.size, len(note)), np.uint8)
        with self._waits.losing(what, self._ranks):
            given, result = self._tensor(own), self._tensor(notes.reshape(-1))
            work = self._all_gather(result, given, group=self._talk, async_op=True)
        wait = self._waiting(what, self._ranks, work)

        def told() -> list[bytes]:
            wait()
            return [each.tobytes() for each in notes]

        return told

    def gather(self, content: Any, what: str = "what all ranks tell") -> list[Any]:
        """By pickling."""
        return gathered(self, content, what)

    def meet(self, note: bytes, seconds: float) -> list[bytes] | None:
        """In a group of its own."""
        if self._open:
            return None
        notes, own = (
            self._torch.empty(self.size * len(note), dtype=self._torch.uint8),
            self._torch.tensor(list(note), dtype=self._torch.uint8),
        )
        work = self._all_gather(notes, own, group=self._ending, async_op=True)
        if not comes_true(work.is_completed, seconds):
            return None
        return [each.tobytes() for each in np.split(notes.numpy(), self.size)]

    def abort(self, code: int) -> None:
        """The process ends at once; torchrun sees it, and ends the others."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

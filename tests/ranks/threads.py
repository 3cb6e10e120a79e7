"""A world whose ranks are threads of this process: what a job does, without a launcher."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from foreplan.runtime.kernel import Run
from foreplan.runtime.ranks import using
from foreplan.runtime.ranks.deadlines import RankProcess, late
from foreplan.runtime.world.world import Told, alike, place_in_group

Result = TypeVar("Result")
Message = tuple[int, int, int]  # from, to, number
Key = tuple[int, int, int, int]  # and how many of that name there were before


class Meeting:
    """Where ranks meet: the n-th call of each meets the n-th of all others."""

    def __init__(self, size: int, members: Sequence[int] = (), whole: Meeting | None = None) -> None:
        self.size, self.members = size, members or range(size)
        self.barrier = threading.Barrier(size, timeout=60)
        self.ended: set[int] = set() if whole is None else whole.ended  # ranks of the job, which come no more
        self.given: dict[int, dict[int, Any]] = {}
        self.lock = threading.Condition() if whole is None else whole.lock
        self.groups: dict[tuple[int, int, int], Meeting] = {}  # by first rank, number and stride

        # Of messages: what is sent and where it arrives, each when its side has begun.
        self.sides: dict[Key, dict[str, np.ndarray]] = {}
        self.counts: Counter[tuple[Message, str]] = Counter()

    def group(self, first: int, ranks: int, stride: int, members: Sequence[int] = ()) -> Meeting:
        """Where the ranks of a group meet."""
        with self.lock:
            return self.groups.setdefault((first, ranks, stride), Meeting(ranks, members, self))

    def give(self, call: int, rank: int, content: Any) -> None:
        """Give something for the call of that number."""
        with self.lock:
            self.given.setdefault(call, {})[rank] = content
            self.lock.notify_all()

    def take(self, call: int, rank: int, what: str) -> list[Any]:
        """What all have given for it, when they have."""
        with self.lock:
            given = self.given.setdefault(call, {})
            missing = self.wait(lambda: [each for each in range(self.size) if each not in given])
            if missing:
                waiting = {self.members[each]: what for each in given}
                raise late(what, self.members[rank], 0.0, self.members, waiting, self.who)
            return [given[rank] for rank in range(self.size)]

    def wait(self, missing: Callable[[], list[int]]) -> list[int]:
        """Wait until no rank is missing, or one that is has ended: which are."""
        came = self.lock.wait_for(
            lambda: not missing() or any(self.members[each] in self.ended for each in missing()), timeout=60
        )
        assert came, f"ranks {[self.members[each] for each in missing()]} neither come nor end"
        return missing()

    def end(self, rank: int) -> None:
        """A rank of the job ends."""
        with self.lock:
            self.ended.add(rank)
            self.lock.notify_all()

    @property
    def who(self) -> list[RankProcess]:
        """Each rank of the job is this process."""
        return [RankProcess.here()] * (max(self.members) + 1)

    def begin(self, message: Message, side: str, array: np.ndarray, what: str) -> Run:
        """One side of a message begins. The n-th of that name on one side is the n-th on the other."""
        with self.lock:
            key = (*message, self.counts[message, side])
            self.counts[message, side] += 1
            self.sides.setdefault(key, {})[side] = array
            self.lock.notify_all()
        return lambda: self.move(key, side, what)

    def move(self, key: Key, side: str, what: str) -> None:
        """One side waits until both have begun. What is sent is read then, or when it is to arrive, if that is before;
        it arrives when its receiver waits.
        """
        with self.lock:
            begun = self.sides[key]
            rank, other = key[:2] if side == "from" else key[1::-1]
            if self.wait(lambda: [] if len(begun) == 2 else [other]):
                raise late(what, self.members[rank], 0.0, [self.members[other]], {}, self.who)
            if side == "into":
                assert begun["from"].shape == begun["into"].shape, key
                begun["into"][...] = begun["from"]
            else:
                begun["from"] = begun["from"].copy()


class Thread:
    """One rank. Arrays are read when an exchange is waited for, as late as any library may."""

    name = "threads"

    def __init__(self, meeting: Meeting, rank: int, whole: Thread | None = None) -> None:
        self.meeting, self.rank, self.size = meeting, rank, meeting.size
        self.neighbours = meeting.size
        self.calls = 0
        # Of exchanges: how many ranks take part, kind, peer, bytes sent and received.
        self.log: list[tuple[int, str, int, int, int]] = [] if whole is None else whole.log
        self.groups: dict[tuple[int, int], Thread] = {}

    def group(self, ranks: int, stride: int) -> Thread:
        """Ranks that meet elsewhere."""
        if (ranks, stride) == (self.size, 1):
            return self
        if (ranks, stride) not in self.groups:
            first, number = place_in_group(self.rank, ranks, stride)
            members = [self.meeting.members[first + stride * each] for each in range(ranks)]
            self.groups[ranks, stride] = Thread(self.meeting.group(first, ranks, stride, members), number, self)
        return self.groups[ranks, stride]

    def begin(self, kind: str, peer: int, source: np.ndarray, into: np.ndarray, what: str = "") -> Run:
        """Nothing moves before the wait, but in the middle of it garbage lies there."""
        call, self.calls = self.calls, self.calls + 1
        self.log.append((self.size, kind, peer, source.size, into.size))
        into.fill(0xA5)
        self.meeting.give(call, self.rank, (kind, peer, source))
        given = source.copy()

        def wait() -> None:
            assert np.array_equal(source, given), f"{kind}: what is sent has changed before it is waited for"
            self._finish(call, kind, peer, into, what or kind)

        return wait

    def _finish(self, call: int, kind: str, peer: int, into: np.ndarray, what: str) -> None:
        given = self.meeting.take(call, self.rank, what)
        assert {(k, p) for k, p, _ in given} == {(kind, peer)}, given
        sources = [source for _, _, source in given]
        if kind == "all_gather":
            into[...] = np.concatenate(sources)
        elif kind == "all_to_all":
            into[...] = np.concatenate([np.split(source, self.size)[self.rank] for source in sources])
        elif kind == "broadcast":
            into[...] = sources[peer]
        else:
            into[...] = sources[(self.rank - peer) % self.size]
        self.meeting.barrier.wait()  # nobody changes what it sends before all have it

    def send(self, rank: int, number: int, source: np.ndarray, what: str = "") -> Run:
        """One side of a message."""
        self.log.append(("send", rank, source.size, 0))
        wait, given = self.meeting.begin((self.rank, rank, number), "from", source, what), source.copy()

        def unchanged() -> None:
            assert np.array_equal(source, given), f"message {number}: what is sent has changed before it is waited for"
            wait()

        return unchanged

    def receive(self, rank: int, number: int, into: np.ndarray, what: str = "") -> Run:
        """The other side: garbage lies there before the wait."""
        self.log.append(("receive", rank, 0, into.size))
        into.fill(0xA5)
        return self.meeting.begin((rank, self.rank, number), "into", into, what)

    def poll(self) -> None:
        """Nothing."""

    def tell(self, note: bytes, what: str) -> Told:
        """Notes of one length."""
        call, self.calls = self.calls, self.calls + 1
        self.meeting.give(call, self.rank, ("tell", note))

        def told() -> list[bytes]:
            given = self.meeting.take(call, self.rank, what)
            assert {(each[0], len(each[1])) for each in given} == {("tell", len(note))}, given
            return [note for _, note in given]

        return told

    def gather(self, content: Any, what: str = "what all ranks tell") -> list[Any]:
        """All of it."""
        call, self.calls = self.calls, self.calls + 1
        self.meeting.give(call, self.rank, ("gather", what, content))
        given = self.meeting.take(call, self.rank, what)
        assert {kind for kind, *_ in given} == {"gather"}, given
        return alike([(what, content) for _, what, content in given])

    def meet(self, note: bytes, seconds: float) -> list[bytes] | None:
        """As gather."""
        return self.gather(note)

    def abort(self, code: int) -> None:
        """The test fails."""
        raise AssertionError(f"rank {self.rank} ends the job with {code}")


def run(size: int, job: Callable[[Thread], Result]) -> list[Result]:
    """What a function gives on each rank of a new world, in the order of ranks; the first error of any is raised.
    Whoever waits for a rank that has ended has come to the deadline.
    """
    meeting = Meeting(size)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        world = Thread(meeting, rank)
        try:
            with using(world):
                results[rank] = job(world)
        except BaseException as error:
            errors.append(error)
            meeting.barrier.abort()
        finally:
            meeting.end(rank)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return results

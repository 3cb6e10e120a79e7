"""NCCL that is not there: ranks are threads, their cards are stand-ins, and bytes move between host memories.

As with NCCL, a call only queues work on the stream that it is given, and a group of calls is one piece of work. The
n-th piece of each rank meets the n-th of all others, when the queue of each comes to it.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import numpy as np
import pytest

from foreplan.runtime import session
from foreplan.runtime.cuda.libraries import driver, nccl
from foreplan.runtime.ranks import current
from foreplan.runtime.world.world import comes_true
from tests.gpu.card import LINKS, FakeCard, Transfer
from tests.ranks.threads import Meeting, Thread, run

Result = TypeVar("Result")
Call = tuple[Any, ...]  # a name, bytes, and the peer or the root, if there is one


def memory(address: int, nbytes: int) -> np.ndarray:
    """Bytes at an address."""
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)


class FakeNccl:
    """CuPy's module, as one rank sees it.

    Attributes:
        card: the rank's.
        log: the calls of the rank, in order; those of a group between "(" and ")". Peers are told by how many ranks
            further they are.
        version: that it has.
        identities: how many it was asked for.
    """

    NCCL_UINT8 = 1
    available = True

    def __init__(self, meeting: Meeting, card: FakeCard) -> None:
        self.meeting, self.card = meeting, card
        self.log: list[Call] = []
        self.version = 22707
        self.communicators: list[Communicator] = []
        self.group: list[tuple[Communicator, str, int, np.ndarray]] | None = None
        self.identities = 0

    def get_version(self) -> int:
        return self.version

    def get_unique_id(self) -> bytes:
        self.identities += 1
        return bytes([current().rank, self.identities, *range(126)])  # one rank of those who connect is asked

    def groupStart(self) -> None:
        assert self.group is None
        self.group = []
        self.log.append(("(",))

    def groupEnd(self) -> None:
        assert self.group is not None
        group, self.group = self.group, None
        self.log.append((")",))
        (communicator,) = {each[0] for each in group}
        self.card.enqueue(partial(communicator.transfer, [each[1:] for each in group]), LINKS)

    def NcclCommunicator(self, size: int, identity: bytes, rank: int) -> Communicator:
        assert identity[2:] == bytes(range(126))
        meeting = self.meeting.group(identity[0], size, -identity[1])
        self.communicators.append(Communicator(self, meeting, rank))
        return self.communicators[-1]


class Communicator:
    """As CuPy's, with its arguments."""

    def __init__(self, library: FakeNccl, meeting: Meeting, rank: int) -> None:
        self.library, self.meeting, self.rank = library, meeting, rank
        self.calls = self.moved = 0

    def met(self, given: object) -> list[Any]:
        """What all ranks give for this piece of work. Until all have come, messages go on."""
        call, self.calls = self.calls, self.calls + 1
        self.meeting.give(call, self.rank, given)
        assert comes_true(partial(self._here, call), 60), f"call {call}: only {sorted(self.meeting.given[call])} came"
        return self.meeting.take(call, self.rank, "work of a card")

    def _here(self, call: int) -> bool:
        self.library.card.go_between()
        return len(self.meeting.given[call]) == self.meeting.size

    def transfer(self, group: list[tuple[str, int, np.ndarray]]) -> None:
        """Sends and receives: between two ranks, in their order."""
        rank = self.rank
        told = self.met([(peer, x) for what, peer, x in group if what == "send"])
        for peer, sent in enumerate(told):
            mine = [x for to, x in sent if to == rank]
            wanted = [into for what, of, into in group if what == "recv" and of == peer]
            assert len(mine) == len(wanted), f"{peer} sends {len(mine)} times to {rank}, which receives {len(wanted)}"
            for x, into in zip(mine, wanted):
                into[...] = x
        self.meeting.barrier.wait()  # nobody changes what it sends before all have it

    def collective(self, name: str, root: int, source: np.ndarray, into: np.ndarray) -> None:
        """All ranks make the same call."""
        told = self.met((name, root, source))
        assert {(each, of, x.size) for each, of, x in told} == {(name, root, source.size)}
        sources = [x for _, _, x in told]
        into[...] = np.concatenate(sources) if name == "allGather" else sources[root]
        self.meeting.barrier.wait()

    def _queued(self, name: str, peer: int, source: int, into: int, count: int, type: int, stream: int) -> None:
        library = self.library
        assert type == library.NCCL_UINT8 and stream == library.card.stream and library.group is None
        library.log.append((name, count, peer))
        many = self.meeting.size if name == "allGather" else 1
        work = partial(self.collective, name, peer, memory(source, count), memory(into, count * many))
        library.card.enqueue(work, LINKS)

    def allGather(self, source: int, into: int, count: int, type: int, stream: int) -> None:
        self._queued("allGather", 0, source, into, count, type, stream)

    def broadcast(self, source: int, into: int, count: int, type: int, root: int, stream: int) -> None:
        self._queued("broadcast", root, source, into, count, type, stream)

    def _grouped(self, name: str, peer: int, at: int, count: int, type: int, stream: int) -> None:
        library = self.library
        assert type == library.NCCL_UINT8
        library.log.append((name, count, (peer - self.rank) % self.meeting.size))
        if stream != library.card.stream:
            self._between(name, peer, memory(at, count), stream)
            return
        assert library.group is not None, "a call alone would wait for a rank that waits for this one"
        library.group.append((self, name, peer, memory(at, count)))

    def _between(self, name: str, peer: int, x: np.ndarray, stream: int) -> None:
        """One way between two cards, on a stream of its own: each call ends when both sides have come to it."""
        assert self.meeting.size == 2 and peer == 1 - self.rank and self.library.group is None
        assert (name == "send") == (self.rank == 0), "the other way has another communicator"
        sides = self.meeting.given

        def blocked() -> bool:
            own = sides.setdefault(self.moved, {})
            own.setdefault(name, x)
            return ("moved" if name == "send" else "send") not in own

        def move() -> None:
            if name == "recv":
                sides[self.moved]["recv"][...] = sides[self.moved]["send"]
                sides[self.moved]["moved"] = True
            self.moved += 1

        card = self.library.card
        card.enqueue(Transfer(blocked, move), card.queue_at(stream))

    def send(self, source: int, count: int, type: int, peer: int, stream: int) -> None:
        self._grouped("send", peer, source, count, type, stream)

    def recv(self, into: int, count: int, type: int, peer: int, stream: int) -> None:
        self._grouped("recv", peer, into, count, type, stream)


class EachItsTurn:
    """Cards of ranks that are threads: sessions of one rank take turns, and ranks do not."""

    def __init__(self) -> None:
        self.of = threading.local()

    @property
    def lock(self) -> Any:
        return self.of.__dict__.setdefault("lock", threading.RLock())


def on_cards(
    patch: pytest.MonkeyPatch,
    size: int,
    job: Callable[[Thread, FakeNccl], Result],
    make: Callable[[], FakeCard] = FakeCard,
) -> list[Result]:
    """What a function gives on each of so many ranks, with cards of their own.

    Args:
        make: makes a card.
    """
    meeting = Meeting(size)
    libraries = [FakeNccl(meeting, make()) for _ in range(size)]
    for rank, library in enumerate(libraries):
        library.card.bus = f"0000:{rank:02x}:00.0"
    patch.setattr(driver, "card", lambda: libraries[current().rank].card)
    patch.setattr(nccl, "_library", lambda: libraries[current().rank])
    patch.setattr(session, "_CARD", EachItsTurn())
    return run(size, lambda world: job(world, libraries[world.rank]))

"""What a session needs of the ranks of its job."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from foreplan.base.errors import SessionError
from foreplan.base.late import late
from foreplan.runtime.kernel import Run

Told = Callable[[], list[bytes]]


class World(Protocol):
    """All ranks of a job. Every rank makes the same calls in the same order.

    Attributes:
        rank: this one, from 0 on.
        size: how many there are.
        name: of the library that moves bytes, for people.
        neighbours: how many of the ranks run on this machine, this one among them.
    """

    rank: int
    size: int
    name: str
    neighbours: int

    def begin(self, kind: str, peer: int, source: np.ndarray, into: np.ndarray, what: str = "") -> Run:
        """Begin an exchange; the returned call waits until it is done.

        Args:
            kind: all_gather, all_to_all, broadcast or shift, as ops of these names say.
            peer: see `foreplan.ops.collective.Begin`.
            source: bytes that this rank sends; they stay as they are until the end.
            into: bytes that arrive.
            what: it is, for an error. The call raises `LateError` where a rank does not come until the deadline; so do
                all that wait.
        """

    def group(self, ranks: int, stride: int) -> World:
        """This rank's group: so many, each `stride` behind the one before it. When asked again, the same object."""

    def send(self, rank: int, number: int, source: np.ndarray, what: str = "") -> Run:
        """Begin to send bytes to a rank, which stay as they are until the end; the returned call waits until then.

        Args:
            number: of the message, which that rank receives by the same number.
        """

    def receive(self, rank: int, number: int, into: np.ndarray, what: str = "") -> Run:
        """Begin to receive bytes from a rank; the returned call waits until they are there."""

    def poll(self) -> None:
        """Let what has begun go on, in all groups."""

    def tell(self, note: bytes, what: str) -> Told:
        """Begin to tell all ranks a note, as long as theirs; the returned call waits for the notes of all, in their
        order. It is apart from exchanges.
        """

    def gather(self, content: Any, what: str = ...) -> list[Any]:
        """What each rank gives here, in the order of ranks, on every rank; small, and pickled.

        Args:
            what: the call is for, the same on all ranks.

        Raises:
            SessionError: another rank makes another call.
        """

    def meet(self, note: bytes, seconds: float) -> list[bytes] | None:
        """The notes (16 bytes each) of all ranks that end, if all come to this call within so many seconds, and nothing
        is under way between them; otherwise None.
        """

    def abort(self, code: int) -> None:
        """End all ranks at once: this one cannot go on, and the others would wait for it for ever."""


def place_in_group(rank: int, ranks: int, stride: int) -> tuple[int, int]:
    """The first rank of the group that a rank is in, and its number there."""
    number = rank // stride % ranks
    return rank - number * stride, number


def gathered(world: World, content: Any, what: str) -> list[Any]:
    """`World.gather` by pickling: ranks tell how long their texts are, and then these, as long as the longest.

    Raises:
        SessionError: see `alike`.
    """
    text = pickle.dumps((what, content))
    sizes = [int.from_bytes(note, "little") for note in world.tell(len(text).to_bytes(8, "little"), what)()]
    texts = world.tell(text.ljust(max(sizes), b"\0"), what)()
    return alike([pickle.loads(each[:size]) for each, size in zip(texts, sizes)])


def alike(told: Sequence[tuple[str, Any]]) -> list[Any]:
    """What ranks have told in one call, without what each says that the call is for.

    Raises:
        SessionError: these are several calls.
    """
    others = [rank for rank, (what, _) in enumerate(told) if what != told[0][0]]
    if others:
        raise SessionError(
            f"rank 0 has come to {told[0][0]}, and rank {others[0]} to {told[others[0]][0]}: all ranks must make the "
            "same calls in the same order"
        )
    return [content for _, content in told]


def comes_true(done: Callable[[], bool], seconds: float) -> bool:
    """Whether something is so within so many seconds; asked again and again."""
    until = time.monotonic() + seconds
    while not done():
        if time.monotonic() > until:
            return False
        time.sleep(0.001)
    return True


class Alone:
    """One rank."""

    rank, size, name, neighbours = 0, 1, "one process", 1

    def begin(self, kind: str, peer: int, source: np.ndarray, into: np.ndarray, what: str = "") -> Run:
        """A copy."""
        np.copyto(into, source)
        return self.poll

    def group(self, ranks: int, stride: int) -> World:
        """Itself."""
        return self

    def send(self, rank: int, number: int, source: np.ndarray, what: str = "") -> Run:
        """There is no other."""
        raise AssertionError(f"one rank sends to rank {rank}")

    def receive(self, rank: int, number: int, into: np.ndarray, what: str = "") -> Run:
        """There is no other."""
        raise AssertionError(f"one rank receives from rank {rank}")

    def poll(self) -> None:
        """Nothing goes on."""

    def tell(self, note: bytes, what: str) -> Told:
        """Its own."""
        return lambda: [note]

    def gather(self, content: Any, what: str = "") -> list[Any]:
        """What this one gives."""
        return [content]

    def meet(self, note: bytes, seconds: float) -> list[bytes] | None:
        """Its own."""
        return [note]

    def abort(self, code: int) -> None:
        """The caller ends as always."""


ALONE = Alone()


def world_here() -> World:
    """The world of this thread, for what runs on several ranks: see `foreplan.runtime.ranks.current`.

    Raises:
        TargetError: see there.
    """
    world: World = late("foreplan.runtime.ranks.launch:current")()
    return world

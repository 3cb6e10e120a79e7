"""What moves bytes between the cards of ranks: NCCL, by CuPy. It only moves them: foreplan's own kernels add."""

from __future__ import annotations

import contextlib
import ctypes
import socket
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from foreplan.base.errors import TargetError
from foreplan.runtime.world.world import World

NAME = "nccl"  # of its kernels in plans
INSTALL = "`pip install 'foreplan[cuda13]'` brings it, or 'foreplan[cuda12]' for a driver older than 580"


Way = tuple[int, int]  # from one rank to another


class OnBus(Protocol):
    """A card, as far as NCCL needs to know it: see `foreplan.runtime.cuda.libraries.driver.Card`."""

    title: str
    bus: str

    def use(self) -> None:
        """Let this thread work on it."""


class Nccl:
    """One communicator of all ranks, each with a card of its own.

    Attributes:
        rank, size: of this one, and the number of all.
        version: of NCCL, such as 2.27.7.
    """

    def __init__(self, world: World, card: OnBus) -> None:
        """All ranks at the same time.

        Raises:
            TargetError: see `communicator`.
        """
        self.rank, self.size = world.rank, world.size
        self.library, self.version = _agreed(world, card)
        identity = _identity(self.library) if self.rank == 0 else None
        self.comm = _connected(self.library, card, self.size, world.gather(identity)[0], self.rank)

    def exchange(self, kind: str, peer: int, source: int, into: int, nbytes: int, stream: int) -> None:
        """Queue an exchange on a stream.

        Args:
            kind, peer: see `foreplan.ops.collective.Begin`.
            source, into: addresses on the card.
            nbytes: that this rank sends.

        Raises:
            RuntimeError: NCCL's own error, with its name.
        """
        byte = self.library.NCCL_UINT8
        if kind == "all_gather":
            self.comm.allGather(source, into, nbytes, byte, stream)
        elif kind == "broadcast":
            self.comm.broadcast(source, into, nbytes, byte, peer, stream)
        elif kind == "shift":
            with self._together():
                self.comm.send(source, nbytes, byte, (self.rank + peer) % self.size, stream)
                self.comm.recv(into, nbytes, byte, (self.rank - peer) % self.size, stream)
        else:
            piece = nbytes // self.size
            with self._together():
                for further in range(self.size):
                    behind, before = (self.rank + further) % self.size, (self.rank - further) % self.size
                    self.comm.send(source + behind * piece, piece, byte, behind, stream)
                    self.comm.recv(into + before * piece, piece, byte, before, stream)

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """Calls that are made as one: none waits for another."""
        self.library.groupStart()
        try:
            yield
        finally:
            self.library.groupEnd()


class Link:
    """What goes from one card to one other, in its order: a communicator of these two."""

    def __init__(self, library: Any, comm: Any) -> None:
        self.byte, self.comm = library.NCCL_UINT8, comm

    def send(self, source: int, nbytes: int, stream: int) -> None:
        """Queue that bytes at an address go to the other card."""
        self.comm.send(source, nbytes, self.byte, 1, stream)

    def receive(self, into: int, nbytes: int, stream: int) -> None:
        """Queue that bytes from the other card arrive at an address."""
        self.comm.recv(into, nbytes, self.byte, 0, stream)


def _identity(library: Any) -> tuple[Any, str]:
    """What those who connect name each other by; or why there is none."""
    try:
        return library.get_unique_id(), ""
    except RuntimeError as error:
        return None, str(error)


def _connected(library: Any, card: OnBus, size: int, identity: tuple[Any, str], rank: int) -> Any:
    """A communicator.

    Raises:
        TargetError: they cannot reach one another.
    """
    name, failed = identity
    try:
        if failed:
            raise RuntimeError(f"rank 0: {failed}")
        card.use()
        comm = library.NcclCommunicator(size, name, rank)
    except RuntimeError as error:
        raise TargetError(
            f"NCCL {_told(library.get_version())} cannot connect {size} ranks: {error}; with NCCL_DEBUG=INFO in the "
            "environment it says why"
        ) from None
    # It is never destroyed: that would wait, at the end of the process, for each graph with a call of it.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(comm))
    return comm


_made: WeakKeyDictionary[World, Nccl] = WeakKeyDictionary()
_links: WeakKeyDictionary[World, dict[Way, Link]] = WeakKeyDictionary()


def ways(world: World, card: OnBus, own: Collection[Way]) -> Mapping[Way, Link]:
    """The links of a rank with others, each for one direction, so that none waits for what goes another way. Each is
    made once; all ranks call it at the same time.

    Args:
        own: those that this rank has an end of.

    Raises:
        TargetError: see `communicator`.
    """
    made = _links.setdefault(world, {})
    every = sorted(set().union(*world.gather(set(own).difference(made))))
    if not every:
        return made
    library, _ = _agreed(world, card)
    names = world.gather({way: _identity(library) for way in every if way[0] == world.rank})
    for way in every:  # in one order, so that none waits for another in a circle
        if world.rank in way:
            made[way] = Link(library, _connected(library, card, 2, names[way[0]][way], way.index(world.rank)))
    return made


def communicator(world: World, card: OnBus) -> Nccl:
    """The communicator of a world, made once, by all ranks at the same time.

    Raises:
        TargetError: a rank has no NCCL, or one of another version, or the card of another rank; or they cannot reach
            one another.
    """
    found = _made.get(world)
    if found is None:
        found = _made[world] = Nccl(world, card)
    return found


def _agreed(world: World, card: OnBus) -> tuple[Any, str]:
    """NCCL, and its version, after a check that all ranks have the same and cards of their own."""
    library, version, missing = None, "", ""
    try:
        library = _library()
        version = _told(library.get_version())
    except (ImportError, RuntimeError) as error:
        missing = str(error)
    here = socket.gethostname()
    told: list[tuple[str, str, str, str]] = world.gather((missing, version, here, card.bus))
    lacking = [rank for rank, each in enumerate(told) if each[0]]
    if lacking:
        rank = world.rank if missing else lacking[0]
        raise TargetError(
            f"NCCL, which moves bytes between cards, cannot be loaded on rank {rank}, on {told[rank][2]}: "
            f"{told[rank][0]}; {INSTALL}"
        )
    for rank, (_, other, where, bus) in enumerate(told):
        if other != told[0][1]:
            raise TargetError(f"rank {rank} has NCCL {other} and rank 0 {told[0][1]}: install one version everywhere")
        first = next(i for i, each in enumerate(told) if each[2:] == (where, bus))
        if first != rank:
            raise TargetError(
                f"ranks {first} and {rank} have one card, {card.title} at {bus} of {where}: start at most as many "
                "processes on a machine as it has cards"
            )
    return library, version


def _library() -> Any:
    """CuPy's module of that name.

    Raises:
        ImportError: it does not find NCCL.
    """
    from cupy.cuda import nccl

    if not nccl.available:
        raise ImportError("CuPy finds no libnccl.so.2")
    return nccl


def _told(number: int) -> str:
    """A version as NCCL has it, for people: 22707 is 2.27.7."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"

"""Memory and tensors of a card, as a session reads and writes them from the host."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from foreplan.base.errors import SessionError
from foreplan.graph import Window
from foreplan.runtime.cuda.libraries.driver import Card, Event
from foreplan.runtime.kernel import Run

_HALF = (
    ". What it holds may be half updated: load the last checkpoint, in a new process if the card goes on failing in "
    "this one"
)


@contextlib.contextmanager
def told(when: str, harmless: bool = False) -> Iterator[None]:
    """Turn errors of the driver into errors of a session; any work queued before may have caused them.

    Args:
        harmless: whether the work within cannot have damaged a session.
    """
    try:
        yield
    except RuntimeError as error:
        raise SessionError(f"the card failed, as was seen {when}: {error}{'' if harmless else _HALF}") from error


class DeviceMemory:
    """A stretch of memory that a card can address, of its own or pinned.

    Attributes:
        address: of its first byte.
    """

    def __init__(self, card: Card, owner: object, address: int, nbytes: int) -> None:
        self.card, self.owner, self.address, self.nbytes = card, owner, address, nbytes

    def __len__(self) -> int:
        return self.nbytes

    def __getitem__(self, span: slice) -> DeviceMemory:
        low, high, _ = span.indices(self.nbytes)
        return DeviceMemory(self.card, self.owner, self.address + low, max(high - low, 0))

    def fill(self, byte: int) -> None:
        """Set every byte."""
        with told("while memory was filled"):
            if self.nbytes:
                self.card.filling(self.address, byte, self.nbytes)()

    def copy(self) -> np.ndarray:
        """Its bytes on the host, copied."""
        found = np.empty(self.nbytes, np.uint8)
        with told("while memory was read"):
            if self.nbytes:
                self.card.copying(found.ctypes.data, self.address, self.nbytes)()
                self.card.synchronize()
        return found


class DevicePlace:
    """A tensor on a card.

    A tensor that is copied at every step has pinned memory of its own. A write returns before the card has read this
    memory, and waits only until the card has read the content before.
    """

    def __init__(self, card: Card, window: Window, first: int, pinned: np.ndarray | None = None) -> None:
        """A tensor that lies as the window says, its first element at an address."""
        self.card, self.window = card, window
        self.nbytes, self.low = span_of(window)
        self.start = first - self.low
        self.pinned = pinned
        self.taken = None if pinned is None else card.event()
        self.last: Event | None = self.taken  # after the last transfer

    def read(self) -> np.ndarray:
        """Its elements, when the card has done all queued work."""
        memory = self._host()
        with told("while a tensor was read"):
            self._fetch(memory)
        return self.elements(memory)

    def fill(self, make: Callable[[np.ndarray], object]) -> None:
        """Give it elements, after all queued work."""
        memory = self._host()
        with told("while a tensor was written"):
            self.wait()
            if not self.window.is_compact:
                self._fetch(memory)  # bytes between its elements stay
        make(self.elements(memory))
        with told("while a tensor was written"):
            if self.nbytes:
                self.card.copying(self.start, memory.ctypes.data, self.nbytes)()
            self._crossed()

    def write(self, array: np.ndarray) -> None:
        """Give it these elements, likewise."""
        self.fill(lambda elements: np.copyto(elements, array, "unsafe"))

    def fetch(self, into: np.ndarray) -> Run:
        """Begin to copy its elements, after all queued work; the returned call waits for them."""
        memory = self._host()
        with told("while a result was fetched"):
            if self.nbytes:
                self.card.copying(memory.ctypes.data, self.start, self.nbytes)()
            self._crossed()
        return partial(self._arrive, memory, into)

    def _arrive(self, memory: np.ndarray, into: np.ndarray) -> None:
        with told("while a result was fetched"):
            self.wait()
        np.copyto(into, self.elements(memory))

    def wait(self) -> None:
        """Wait until the last transfer is done, so that the pinned memory is free again."""
        if self.last is not None:
            self.last.wait()

    def _crossed(self) -> None:
        if self.taken is None:
            self.card.synchronize()
        else:
            self.taken.record()
            self.last = self.taken

    def _host(self) -> np.ndarray:
        return np.empty(self.nbytes, np.uint8) if self.pinned is None else self.pinned

    def _fetch(self, memory: np.ndarray) -> None:
        if self.nbytes:
            self.card.copying(memory.ctypes.data, self.start, self.nbytes)()
        self.card.synchronize()

    def elements(self, memory: np.ndarray) -> np.ndarray:
        """Its elements as they lie in host memory of its number of bytes."""
        type = self.window.type
        if not self.nbytes:
            return np.empty(type.shape, type.dtype.numpy)
        return np.ndarray(type.shape, type.dtype.numpy, memory, self.low, self.window.strides)


class DeviceAhead:
    """The second slot of an input on a card: a write is copied there while a step runs.

    The copy goes through the input's pinned memory to the slot, and later from the slot to the input. Events keep the
    order: the move waits until all has arrived, and the next batch waits until the move is done.
    """

    def __init__(self, card: Card, place: DevicePlace, start: int) -> None:
        """The slot at an address, and the input, which lies in C order and has pinned memory."""
        self.card, self.place, self.start = card, place, start
        self.arrived, self.moved = card.event(beside=True), card.event()

    def write(self, array: np.ndarray) -> None:
        """Give it these elements, in the second queue."""
        place = self.place
        memory = place.pinned
        assert memory is not None
        with told("while the next batch was written"):
            place.wait()
            np.copyto(place.elements(memory), array, "unsafe")
            self.card.hold(self.moved, beside=True)
            if place.nbytes:
                self.card.copying(self.start, memory.ctypes.data, place.nbytes, beside=True)()
            self.arrived.record()
        place.last = self.arrived

    def move(self) -> None:
        """Copy them to the input's own place, when they have arrived."""
        with told("while the next batch was moved to its place"):
            self.card.hold(self.arrived)
            if self.place.nbytes:
                self.card.copying(self.place.start, self.start, self.place.nbytes)()
            self.moved.record()


def span_of(window: Window) -> tuple[int, int]:
    """How many bytes a tensor spans, and how many of them lie before its first element."""
    if not window.type.size:
        return 0, 0
    steps = [(extent - 1) * step for extent, step in zip(window.shape, window.strides)]
    low = -sum(step for step in steps if step < 0)
    return low + sum(step for step in steps if step > 0) + window.type.dtype.itemsize, low

"""Memory and tensors of a card, as a session reads and writes them from the host."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import numpy as np

from foreplan.errors import SessionError
from foreplan.gpu.driver import Card
from foreplan.graph import Window

_HALF = (
    ". What it holds may be half updated: load the last checkpoint, in a new process if the card goes on failing in "
    "this one"
)


@contextlib.contextmanager
def told(when: str, harmless: bool = False) -> Iterator[None]:
    """Say what the driver says as an error of a session; it may come from anything that was queued before.

    Args:
        harmless: whether no session can have been damaged by what is done meanwhile.
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

    What crosses at every step goes through pinned memory of its own: it is given before the card has taken it, and
    waits only until the card has taken what was given before.
    """

    def __init__(self, card: Card, window: Window, first: int, pinned: np.ndarray | None = None) -> None:
        """A tensor that lies as the window says, its first element at an address."""
        self.card, self.window = card, window
        self.nbytes, self.low = span_of(window)
        self.start = first - self.low
        self.pinned = pinned
        self.taken = None if pinned is None else card.event()

    def read(self) -> np.ndarray:
        """Its elements, when the card is done with all that is queued."""
        memory = self._host()
        with told("while a tensor was read"):
            self._fetch(memory)
        return self._elements(memory)

    def fill(self, make: Callable[[np.ndarray], object]) -> None:
        """Give it elements, behind all that is queued."""
        memory = self._host()
        with told("while a tensor was written"):
            if self.taken is not None:
                self.taken.wait()
            if not self.window.is_compact:
                self._fetch(memory)  # what lies between its elements stays
        make(self._elements(memory))
        with told("while a tensor was written"):
            if self.nbytes:
                self.card.copying(self.start, memory.ctypes.data, self.nbytes)()
            if self.taken is None:
                self.card.synchronize()
            else:
                self.taken.record()

    def write(self, array: np.ndarray) -> None:
        """Give it these elements, likewise."""
        self.fill(lambda elements: np.copyto(elements, array, "unsafe"))

    def _host(self) -> np.ndarray:
        return np.empty(self.nbytes, np.uint8) if self.pinned is None else self.pinned

    def _fetch(self, memory: np.ndarray) -> None:
        if self.nbytes:
            self.card.copying(memory.ctypes.data, self.start, self.nbytes)()
        self.card.synchronize()

    def _elements(self, memory: np.ndarray) -> np.ndarray:
        type = self.window.type
        if not self.nbytes:
            return np.empty(type.shape, type.dtype.numpy)
        return np.ndarray(type.shape, type.dtype.numpy, memory, self.low, self.window.strides)


def span_of(window: Window) -> tuple[int, int]:
    """How many bytes a tensor spans, and how many of them lie before its first element."""
    if not window.type.size:
        return 0, 0
    steps = [(extent - 1) * step for extent, step in zip(window.shape, window.strides)]
    low = -sum(step for step in steps if step < 0)
    return low + sum(step for step in steps if step > 0) + window.type.dtype.itemsize, low

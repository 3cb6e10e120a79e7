"""What an engine gives a session: memory for the regions, and a plan bound to it as a flat list of ready calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from foreplan.lower.program import Operand, Program
from foreplan.planner.plan import Plan
from foreplan.runtime.kernel import Run

At = tuple[Operand, int]  # a tensor, and where its value lies in its region


@dataclass(frozen=True)
class Peak:
    """What a machine does at best.

    Attributes:
        flops_per_second: operations of a large product of float32.
        bytes_per_second: read and written by a large copy, together.
        source: where the figures are from, for people.
    """

    flops_per_second: int
    bytes_per_second: int
    source: str


class Memory(Protocol):
    """One stretch of an arena, on the host or on a device: a NumPy array of bytes is one."""

    def __len__(self) -> int:
        """Bytes."""

    def __getitem__(self, span: slice, /) -> Memory:
        """A part of it."""

    def fill(self, byte: int, /) -> None:
        """Set every byte."""

    def copy(self) -> np.ndarray:
        """Its bytes on the host, copied."""


class Place(Protocol):
    """A tensor in an engine's memory, as a session reads and writes it from the host."""

    def read(self) -> np.ndarray:
        """Its elements as an array on the host, which may be the tensor itself: the next run or write changes it."""

    def fill(self, make: Callable[[np.ndarray], object]) -> None:
        """Give it the elements that a function writes into an array of its shape and type."""

    def write(self, array: np.ndarray) -> None:
        """Give it these elements, converted to its type."""

    def fetch(self, into: np.ndarray) -> Run:
        """Begin to copy its elements into an array on the host, after all work that was begun before.

        The returned call waits until they are there; it must be made before the next fetch.
        """


class Ahead(Protocol):
    """The second slot of an input."""

    def write(self, array: np.ndarray) -> None:
        """Give it these elements, converted to its type, while a step runs."""

    def move(self) -> None:
        """Copy them to the input's own place, after all work that was begun before."""


class Bound(Protocol):
    """A plan bound to memory: `run` executes every step, in order, and allocates nothing."""

    def run(self) -> None:
        """Execute the plan once. On a device it may still run when this returns; reads wait for it."""

    def run_watched(self, watch: Watch) -> None:
        """Execute the plan once and call `watch` around every step, for debugging."""

    def place(self, operand: Operand, offset: int) -> Place:
        """The tensor whose value lies at `offset` of its region."""

    def ahead(self, second: At, first: At) -> Ahead:
        """The second slot of an input of the plan, and the input."""


class Watch(Protocol):
    """Sees a plan run, step by step."""

    def before(self, step: int) -> None:
        """Called before step number `step` runs."""

    def after(self, step: int, seconds: float) -> None:
        """Called after it ran; `seconds` is its time."""


class Engine(Protocol):
    """Binds plans to memory."""

    name: str

    def allocate(self, heights: Sequence[int]) -> Sequence[Memory]:
        """One arena on the device holding regions of these heights, aligned as the target says; returns the regions.

        Raises:
            MemoryError, DoesNotFitError: there is no memory for it.
        """

    def allocate_host(self, heights: Sequence[int]) -> Sequence[Memory]:
        """Likewise in host memory, as the device can copy from and to it fastest."""

    def use_threads(self, program: Program, threads: int | None) -> None:
        """Let `threads` threads work on each kernel of a program; None: as many as it was planned for, or as there are.

        Raises:
            UsageError: the program was planned for another number.
        """

    def peak(self, program: Program) -> Peak:
        """What the machine does at best with the threads of a program."""

    def bind(self, program: Program, plan: Plan, regions: Sequence[Memory]) -> Bound:
        """Every step as a ready call on the regions' memory, which `allocate` and `allocate_host` made."""

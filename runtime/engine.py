"""What a session asks of an engine: memory for the regions, and a plan bound to it as a flat list of ready calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from foreplan.lower.program import Operand, Program
from foreplan.planner.plan import Plan

Memory = np.ndarray  # uint8, one stretch of an arena


class Bound(Protocol):
    """A plan bound to memory: `run` executes every step, in order, and allocates nothing."""

    def run(self) -> None:
        """Execute the plan once."""

    def run_watched(self, watch: Watch) -> None:
        """Execute the plan once and call `watch` around every step, for debugging."""

    def window(self, operand: Operand, offset: int) -> Any:
        """The engine's array for a tensor whose value lies at `offset` of its region."""


class Watch(Protocol):
    """Sees a plan run, step by step."""

    def before(self, step: int) -> None:
        """Called before step number `step` runs."""

    def after(self, step: int) -> None:
        """Called after it ran."""


Run = Callable[[], object]  # a kernel bound to its arrays


class Engine(Protocol):
    """Binds plans to memory."""

    name: str

    def allocate(self, heights: Sequence[int]) -> list[Memory]:
        """One arena on the device holding regions of these heights, aligned to 64 bytes; the regions in order."""

    def allocate_host(self, heights: Sequence[int]) -> list[Memory]:
        """Likewise in host memory, as the device can copy from and to it fastest."""

    def use_threads(self, program: Program, threads: int | None) -> None:
        """Let so many threads work on each kernel of a program; None: as many as it was planned for, or as there are.

        Raises:
            UsageError: the program was planned for another number.
        """

    def bind(self, program: Program, plan: Plan, regions: Sequence[Memory]) -> Bound:
        """Every step as a ready call on the regions' memory."""

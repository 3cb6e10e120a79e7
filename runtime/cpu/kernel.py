"""What a CPU kernel is: the exact bytes that it needs, and a call bound to addresses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from foreplan.graph import Op, Window

Run = Callable[[], object]
Windows = Sequence[Window]


class Kernel(Protocol):
    """One op on tensors that lie in a certain way.

    One that joins tensors may also have `parts`, triples (output, input, byte): that input may lie within that output
    already, from that byte on. One of several for an op has `nanoseconds`, what it is predicted to take.
    """

    @property
    def workspace(self) -> int:
        """Bytes of scratch memory that a run needs, exact."""

    @property
    def overwrites(self) -> tuple[tuple[int, int], ...]:
        """Pairs (output, input): that output may take exactly that input's bytes."""

    def bind(self, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], workspace: np.ndarray) -> Run:
        """A call that runs it on this memory, creating no Python object for any tensor.

        Args:
            inputs, outputs: arrays that lie as the windows said.
            workspace: uint8, `workspace` bytes, 64-byte aligned, content undefined.
        """


Make = Callable[[Op, Windows, Windows], Kernel]  # may raise `Refused`


class Refused(Exception):
    """A kernel cannot be made for an op on such tensors."""


@dataclass(frozen=True)
class Several:
    """A call that makes several."""

    runs: tuple[Run, ...]

    def __call__(self) -> None:
        """One after the other."""
        for run in self.runs:
            run()


def one_after_another(*runs: Run) -> Run:
    """A call that makes these."""
    return runs[0] if len(runs) == 1 else Several(runs)

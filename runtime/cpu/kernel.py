"""What a CPU kernel is: the exact bytes that it needs, and a call bound to addresses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from foreplan.graph import Op
from foreplan.graph.op import Windows
from foreplan.runtime.kernel import Kernel, Run


class CpuKernel(Kernel, Protocol):
    """A kernel of the CPU engine."""

    def bind(self, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], workspace: np.ndarray) -> Run:
        """A call that runs it on this memory, creating no Python object for any tensor.

        Args:
            inputs, outputs: arrays that lie as the windows said.
            workspace: uint8, `workspace` bytes, 64-byte aligned, content undefined.
        """


Make = Callable[[Op, Windows, Windows], CpuKernel]  # may raise `Refused`


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

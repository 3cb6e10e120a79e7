"""CPU kernels: the exact bytes that each needs, and a call bound to addresses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from foreplan.graph import Op
from foreplan.graph.blocks import Blocks
from foreplan.graph.op import Arrays, Windows
from foreplan.ops.blocks import Piece, carve, carve_bytes
from foreplan.runtime.kernel import Kernel, Run


class CpuKernel(Kernel, Protocol):
    """A kernel of the CPU engine."""

    def bind(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray) -> Run:
        """A call that runs it on this memory, creating no Python object for any tensor.

        Args:
            inputs, outputs: arrays with the layouts of the windows.
            workspace: uint8, `workspace` bytes, 64-byte aligned, content undefined.
        """


Make = Callable[[Op, Windows, Windows], CpuKernel]  # may raise `Refused`


@dataclass(frozen=True)
class LoopKernel:
    """A kernel of compiled loops.

    Attributes:
        loops: from inputs, outputs and scratch arrays to a call of the loops on them.
        pieces: the scratch arrays.
        overwrites, parts, nanoseconds: see `Kernel`.
        wants: the blocks in which weights, input 1, would not be packed with every run.
    """

    loops: Callable[[Arrays, Arrays, Arrays], Run]
    pieces: tuple[Piece, ...] = ()
    overwrites: tuple[tuple[int, int], ...] = ()
    parts: tuple[tuple[int, int, int], ...] = ()
    nanoseconds: int | None = None
    wants: Blocks | None = None

    @property
    def workspace(self) -> int:
        """All scratch arrays."""
        return carve_bytes(*self.pieces)

    def bind(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray) -> Run:
        """See `CpuKernel`."""
        return self.loops(inputs, outputs, carve(workspace, *self.pieces))

"""Loops: the calls of all steps of a body that was planned once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from foreplan.graph import Op, Window
from foreplan.graph.op import Arrays, Windows
from foreplan.graph.types import types_of
from foreplan.lower.program import Call
from foreplan.ops.loop import Loop
from foreplan.ops.map import COPY
from foreplan.runtime.cpu.kernel import CpuKernel
from foreplan.runtime.cpu.threads import current_threads
from foreplan.runtime.kernel import Refused, Run, one_after_another
from foreplan.runtime.loop import Arrays as Memory
from foreplan.runtime.loop import PlannedLoop, planned_loop

Kernels = Callable[[Op, Windows, Windows, int], Mapping[str, CpuKernel]]


@dataclass(frozen=True)
class LoopOfCalls:
    """A kernel that runs the body's calls in every step.

    Attributes:
        kernels: the engine's, for an op on tensors that lie so, by name.
        threads: the number that works on each call.
    """

    planned: PlannedLoop
    kernels: Kernels
    threads: int

    @property
    def workspace(self) -> int:
        """The arena of the body."""
        return self.planned.workspace

    @property
    def overwrites(self) -> tuple[tuple[int, int], ...]:
        """A carry may begin where it ends."""
        return self.planned.overwrites

    @property
    def nanoseconds(self) -> int:
        """Predicted."""
        return self.planned.nanoseconds

    def bind(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray) -> Run:
        """See `CpuKernel`."""
        arrays = Memory(inputs, outputs, workspace)
        return one_after_another(*self.planned.runs(arrays, self._call, self._copy))

    def _call(self, call: Call, inputs: Arrays, outputs: Arrays, scratch: np.ndarray) -> Run:
        reads, writes = ([operand.window for operand in found] for found in (call.inputs, call.outputs))
        return self._kernel(call.op, call.kernel, reads, writes, inputs, outputs, scratch)

    def _copy(self, source: np.ndarray, result: np.ndarray) -> Run:
        reads, writes = ([Window(type, x.strides) for type in types_of(x)] for x in (source, result))
        return self._kernel(COPY, "lanes", reads, writes, [source], [result], np.empty(0, np.uint8))

    def _kernel(
        self, op: Op, name: str, reads: Windows, writes: Windows, inputs: Arrays, outputs: Arrays, scratch: np.ndarray
    ) -> Run:
        return self.kernels(op, reads, writes, self.threads)[name].bind(inputs, outputs, scratch)


def planned(op: Op, kernels: Kernels) -> LoopOfCalls:
    """The kernel of `Loop`; none where a call of its body would run NumPy's kernel.

    Args:
        kernels: the engine's table.
    """
    assert isinstance(op, Loop)
    threads = current_threads()
    found = planned_loop(op, f"cpu:threads={threads}")
    calls = found.body.program.calls
    if any(calls[step.action].kernel == "reference" for step in found.plan.steps):
        raise Refused("NumPy's kernels are for whole tensors: the loop is written out")
    return LoopOfCalls(found, kernels, threads)

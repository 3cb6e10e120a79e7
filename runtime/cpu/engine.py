"""The CPU engine: a plan becomes a flat list of ready calls of oneDNN's primitives and compiled loops on one arena."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cached_property, partial

import numpy as np

from foreplan.base.errors import PlanError, UsageError
from foreplan.graph import Window
from foreplan.graph.types import types_of
from foreplan.lower.program import Call, Program
from foreplan.lower.targets import options_of
from foreplan.ops.collective import Collective
from foreplan.ops.loop import Loop
from foreplan.ops.map import COPY
from foreplan.planner.plan import Plan
from foreplan.runtime.cpu.codegen.native import Joined, joined
from foreplan.runtime.cpu.machine import measured
from foreplan.runtime.cpu.table import kernels_for
from foreplan.runtime.cpu.target import target
from foreplan.runtime.cpu.threads import set_threads, threads_set, with_team
from foreplan.runtime.engine import Memory, Peak, Watch
from foreplan.runtime.kernel import Run, one_after_another
from foreplan.runtime.numpy.engine import NumpyBound, NumpyEngine, limit_threads


class CpuBound(NumpyBound):
    """A plan on the CPU engine.

    Attributes:
        threads: the number that works on each kernel. OpenMP keeps it apart for each Python thread, with its own
            default, so it is set for whichever thread runs the plan.
        joined: the calls; one call makes several of compiled functions.
    """

    def __init__(self, program: Program, plan: Plan, regions: Sequence[Memory]) -> None:
        self.threads = _threads(program)
        super().__init__(program, plan, regions)
        self.joined = joined([threads_set(self.threads), *self.run_calls])
        self._native = all(isinstance(call, Joined) for call in self.joined)

    def run(self) -> None:
        """Execute the plan once."""
        with_team(self._run, self.threads)

    def _run(self) -> None:
        with nullcontext() if self._native else np.errstate(all="ignore"):  # which takes a few microseconds
            for call in self.joined:
                call()

    def run_watched(self, watch: Watch) -> None:
        """Execute the plan once, with `watch` called around every step."""
        set_threads(self.threads)
        with_team(partial(super().run_watched, watch), self.threads)

    @cached_property
    def apart(self) -> Sequence[Run]:
        """The calls one by one, each made as in `run`: denormal numbers count as zero."""
        return [one_after_another(*joined([call])) for call in self.calls]

    def bind(self, call: Call, inputs: list[np.ndarray], outputs: list[np.ndarray], scratch: np.ndarray) -> Run:
        """A call of one kernel on these arrays."""
        if call.kernel == "reference" or call.of(Loop, Collective):
            return super().bind(call, inputs, outputs, scratch)
        reads, writes = ([operand.window for operand in found] for found in (call.inputs, call.outputs))
        kernel = kernels_for(call.op, reads, writes, self.threads).get(call.kernel)
        if kernel is None or kernel.workspace != scratch.size:
            raise PlanError(f"node {call.node!r}: this machine's {call.kernel} needs another workspace; plan again")
        return kernel.bind(inputs, outputs, scratch)

    def copy(self, source: np.ndarray, result: np.ndarray) -> Run:
        """A call of compiled loops, which is joined with those around it."""
        reads, writes = ([Window(type, x.strides) for type in types_of(x)] for x in (source, result))
        return kernels_for(COPY, reads, writes, self.threads)["lanes"].bind([source], [result], np.empty(0, np.uint8))


def _threads(program: Program) -> int:
    """The number of threads that a program was planned for."""
    return target(options_of(program.target)).threads


class CpuEngine(NumpyEngine):
    """Runs programs lowered for the target `cpu`."""

    name = "cpu"

    def use_threads(self, program: Program, threads: int | None) -> None:
        """The threads that the program was planned for; NumPy's kernels use as many."""
        planned = _threads(program)
        if threads is not None and threads != planned:
            raise UsageError(
                f"the step was planned for {planned} threads and cannot run with {threads}: scratch memory depends on "
                f"them; compile it for the target cpu:threads={threads}"
            )
        limit_threads(planned)
        set_threads(planned)

    def peak(self, program: Program) -> Peak:
        """Measured, with as many threads."""
        threads = _threads(program)
        return Peak(*measured(threads), f"measured now, {threads} thread{'s' * (threads > 1)}")

    def bind(self, program: Program, plan: Plan, regions: Sequence[Memory]) -> CpuBound:
        """Every step as a ready call."""
        return CpuBound(program, plan, regions)


def engine(program: Program, capture: bool) -> CpuEngine:
    """The engine for a program; nothing is captured."""
    return CpuEngine()

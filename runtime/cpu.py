"""The CPU engine: a plan becomes a flat list of ready calls of oneDNN's primitives and compiled loops on one arena."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from foreplan.cpu.kernel import Run
from foreplan.cpu.table import kernel_for
from foreplan.cpu.threads import set_threads
from foreplan.errors import PlanError, UsageError
from foreplan.lower import target_named
from foreplan.lower.cpu import CpuTarget
from foreplan.lower.program import Operand, Program
from foreplan.planner.plan import Plan, Step
from foreplan.runtime.engine import Watch
from foreplan.runtime.numpy import allocate, window


class CpuBound:
    """A plan on the CPU engine.

    Attributes:
        regions: memory of each region.
        calls: one a step, without arguments.
    """

    def __init__(self, program: Program, plan: Plan, regions: Sequence[np.ndarray]) -> None:
        self.program, self.regions = program, regions
        self.threads = _threads(program)
        self.calls = [self._ready(step) for step in plan.steps]

    def _ready(self, step: Step) -> Run:
        action, call = self.program.actions[step.action], self.program.calls[step.action]
        at = dict(zip((*action.reads, *action.writes), (*step.reads, *step.writes)))
        inputs = [self.window(operand, at[operand.value]) for operand in call.inputs]
        outputs = [self.window(operand, at[operand.value]) for operand in call.outputs]
        scratch = self.regions[action.workspace_region][step.workspace : step.workspace + action.workspace]
        for array in inputs:
            array.flags.writeable = False
        if call.kernel == "reference":
            return partial(call.op.compute, inputs, outputs, scratch)
        reads, writes = ([operand.window for operand in found] for found in (call.inputs, call.outputs))
        kernel = kernel_for(call.op, reads, writes, self.threads)
        if kernel is None or kernel.workspace != action.workspace:
            raise PlanError(f"node {call.node!r}: this machine's {call.kernel} needs another workspace; plan again")
        return kernel.bind(inputs, outputs, scratch)

    def window(self, operand: Operand, offset: int) -> np.ndarray:
        """The array of a tensor whose value lies at `offset` of its region."""
        return window(self.program, self.regions, operand, offset)

    def run(self) -> None:
        """Execute the plan once."""
        with np.errstate(all="ignore"):
            for call in self.calls:
                call()

    def run_watched(self, watch: Watch) -> None:
        """Execute the plan once, with `watch` called around every step."""
        with np.errstate(all="ignore"):
            for i, call in enumerate(self.calls):
                watch.before(i)
                call()
                watch.after(i)


def _threads(program: Program) -> int:
    """How many a program was planned for."""
    target = target_named(program.target)
    assert isinstance(target, CpuTarget)
    return target.threads


class CpuEngine:
    """Runs programs lowered for the target `cpu`."""

    name = "cpu"

    def allocate(self, heights: Sequence[int]) -> list[np.ndarray]:
        """One arena for all regions."""
        return allocate(heights)

    def allocate_host(self, heights: Sequence[int]) -> list[np.ndarray]:
        """Another one of the same kind."""
        return allocate(heights)

    def use_threads(self, program: Program, threads: int | None) -> None:
        """Those that it was planned for; kernels that fall to NumPy use as many."""
        from threadpoolctl import threadpool_limits

        planned = _threads(program)
        if threads is not None and threads != planned:
            raise UsageError(
                f"the step was planned for {planned} threads and cannot run with {threads}: scratch memory depends on "
                f"them; compile it for the target cpu:threads={threads}"
            )
        threadpool_limits(planned)
        set_threads(planned)

    def bind(self, program: Program, plan: Plan, regions: Sequence[np.ndarray]) -> CpuBound:
        """Every step as a ready call."""
        return CpuBound(program, plan, regions)

"""An engine that runs programs for cards on the CPU: in one arena, with the plan's offsets."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from foreplan.errors import PlanError
from foreplan.gpu.device import device_named
from foreplan.gpu.launch import ALIGNMENT
from foreplan.gpu.table import OWN, kernel_for
from foreplan.graph import Op, Window
from foreplan.lower.cuda import CudaTarget
from foreplan.lower.program import Call, Program
from foreplan.lower.target import Kernel
from foreplan.planner.plan import Plan
from foreplan.runtime.engine import Memory, Run
from foreplan.runtime.numpy import NumpyBound, NumpyEngine
from foreplan.units import align_up
from tests.gpu.binder import Bound


class OwnTarget(CudaTarget):
    """A card, with our own kernels alone."""

    def kernels(self, op: Op, inputs: Sequence[Window], outputs: Sequence[Window]) -> Sequence[Kernel]:
        return [kernel for kernel in super().kernels(op, inputs, outputs) if kernel.name == OWN]


class ShimBound(NumpyBound):
    """A plan on the CPU, its workspaces poisoned before each call."""

    def __init__(self, program: Program, plan: Plan, regions: Sequence[Memory], reverse: bool) -> None:
        self.device = device_named(program.target.partition(":")[2])
        self.reverse = reverse
        super().__init__(program, plan, regions)

    def bind(self, call: Call, inputs: list[np.ndarray], outputs: list[np.ndarray], scratch: np.ndarray) -> Run:
        reads, writes = ([operand.window for operand in found] for found in (call.inputs, call.outputs))
        kernel = kernel_for(call.op, reads, writes, self.device)
        if kernel is None or kernel.workspace != scratch.size:
            raise PlanError(f"node {call.node!r} was planned with another workspace")
        bound = Bound(kernel, inputs, outputs, scratch, self.reverse)

        def run() -> None:
            scratch[...] = 0xFF
            bound()

        return run


class ShimEngine(NumpyEngine):
    """Runs programs lowered for a card.

    Attributes:
        reverse: whether threads and blocks run in reverse.
    """

    name = "shim"

    def __init__(self, reverse: bool = False) -> None:
        self.reverse = reverse

    def allocate(self, heights: Sequence[int]) -> list[np.ndarray]:
        starts, total = [], 0
        for height in heights:
            starts.append(total)
            total = align_up(total + height, ALIGNMENT)
        raw = np.full(total + ALIGNMENT, 0xFF, np.uint8)
        shift = -raw.ctypes.data % ALIGNMENT
        return [raw[shift + start : shift + start + height] for start, height in zip(starts, heights)]

    def bind(self, program: Program, plan: Plan, regions: Sequence[Memory]) -> ShimBound:
        return ShimBound(program, plan, regions, self.reverse)

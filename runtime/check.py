"""Debug modes: poison and guards check on a real run that kernels touch only planned bytes; trace times each step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from foreplan.base.errors import SessionError
from foreplan.lower.program import Program
from foreplan.ops.collective import Begin, Finish
from foreplan.planner import buffers
from foreplan.planner.plan import Buffer, Plan
from foreplan.runtime.engine import Memory

POISON = 0xFF  # an array of these bytes is NaN in every float type
MARGIN = 4096  # bytes watched on each side of a step's outputs and workspace


class Poison:
    """Fills bytes that hold no live value with poison, and watches the bytes around each step's outputs and workspace.

    A kernel that reads dead bytes then computes NaNs; one that writes past its outputs or workspace is refused.
    """

    def __init__(self, program: Program, plan: Plan, regions: Sequence[Memory]) -> None:
        self.program, self.plan, self.regions = program, plan, regions
        self.margins: list[tuple[Memory, np.ndarray]] = []
        self.dead_after: dict[int, list[Memory]] = defaultdict(list)
        starting: list[list[tuple[int, int]]] = [[] for _ in regions]
        found = buffers(plan, program)
        for buffer in found:
            if buffer.lower == 0 and buffer.value >= 0:
                starting[buffer.region].append((buffer.offset, buffer.offset + buffer.nbytes))
        for buffer in found:
            if buffer.upper < len(plan.steps) and not self._taken_in_place(buffer):
                region = regions[buffer.region]
                self.dead_after[buffer.upper - 1].append(region[buffer.offset : buffer.offset + buffer.nbytes])
        self.arriving = _arriving(program, plan)
        self.unused_at_start = [gap for region, used in zip(regions, starting) for gap in _gaps(region, used)]

    def _taken_in_place(self, buffer: Buffer) -> bool:
        """Whether the first step after the buffer's life still reads it, and writes its result over it."""
        step = self.plan.steps[buffer.upper]
        return (buffer.value, buffer.offset) in zip(self.program.actions[step.action].reads, step.reads)

    def start(self) -> None:
        """Poison every byte that holds nothing when a step begins."""
        for gap in self.unused_at_start:
            gap.fill(POISON)

    def before(self, step: int) -> None:
        """Remember the bytes around everything that the step may write."""
        self.margins = [(span, span.copy()) for span in self._margins(step)]

    def after(self, step: int, seconds: float) -> None:
        """Compare the bytes around the step's writes, then poison the buffers that have died.

        Raises:
            SessionError: names the node that wrote outside its outputs and workspace.
        """
        for span, old in self.margins:
            if not np.array_equal(span.copy(), old):
                name = self.program.actions[self.plan.steps[step].action].name
                raise SessionError(f"node {name!r} (step {step}) wrote outside its outputs and workspace")
        for span in self.dead_after.get(step, ()):
            span.fill(POISON)

    def _margins(self, step: int) -> Iterator[Memory]:
        """Up to MARGIN bytes on both sides of each output and of the workspace, where nothing may be written; what
        arrives from other ranks meanwhile has its place.
        """
        planned = self.plan.steps[step]
        action, values = self.program.actions[planned.action], self.program.values
        spans = [
            (values[v].region, offset, offset + values[v].nbytes) for v, offset in zip(action.writes, planned.writes)
        ]
        spans.append((action.workspace_region, planned.workspace, planned.workspace + action.workspace))
        spans += self.arriving.get(step, ())
        for index, memory in enumerate(self.regions):
            written = sorted((low, high) for region, low, high in spans if region == index and low < high)
            for i, (low, high) in enumerate(written):
                floor = written[i - 1][1] if i else 0
                ceiling = written[i + 1][0] if i + 1 < len(written) else len(memory)
                yield memory[max(floor, low - MARGIN) : low]
                yield memory[high : min(ceiling, high + MARGIN)]


def _arriving(program: Program, plan: Plan) -> dict[int, list[tuple[int, int, int]]]:
    """By step, the places where something may arrive from other ranks while it runs: region, first byte, last byte."""
    found: dict[int, list[tuple[int, int, int]]] = {}
    under_way: dict[int, tuple[int, int, int]] = {}  # by value
    for number, step in enumerate(plan.steps):
        action, call = program.actions[step.action], program.calls[step.action]
        if call.of(Finish):
            under_way.pop(call.inputs[0].value, None)
        if under_way:
            found[number] = list(under_way.values())
        if (begin := call.of(Begin)) and not begin.op.wait:
            value, offset = action.writes[0], step.writes[0]
            under_way[value] = (program.values[value].region, offset, offset + program.values[value].nbytes)
    return found


def _gaps(region: Memory, used: Sequence[tuple[int, int]]) -> Iterator[Memory]:
    """The parts of a region that lie in none of these spans."""
    low = 0
    for lower, upper in (*sorted(used), (len(region), len(region))):
        if low < lower:
            yield region[low:lower]
        low = max(low, upper)


@dataclass(frozen=True)
class Timing:
    """One executed instruction.

    Attributes:
        node: that it ran.
        op, kernel: by which; `reference` is NumPy's kernel of the op.
        seconds: that it took.
        predicted_seconds: that the planner counted.
        nbytes, flops: bytes that it reads and writes, each once, and floating-point operations.
    """

    node: str
    op: str
    kernel: str
    seconds: float
    predicted_seconds: float
    nbytes: int
    flops: int


class Trace:
    """Adds the time of every step to a list."""

    def __init__(self, program: Program, plan: Plan, timings: list[Timing]) -> None:
        self.program, self.plan, self.timings = program, plan, timings

    def before(self, step: int) -> None:
        """Do nothing."""

    def after(self, step: int, seconds: float) -> None:
        """Store its time."""
        index = self.plan.steps[step].action
        action, call = self.program.actions[index], self.program.calls[index]
        predicted = action.nanoseconds / 1e9
        timing = Timing(action.name, call.op.name, call.kernel, seconds, predicted, action.nbytes, action.flops)
        self.timings.append(timing)

"""Debug modes: poison and guards prove on a real run that kernels touch what the plan says; trace times each step."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foreplan.errors import SessionError
from foreplan.lower.program import Program
from foreplan.planner import buffers
from foreplan.planner.plan import Plan

POISON = 0xFF  # an array of these bytes is NaN in every float type


class Poison:
    """Fills bytes with poison when nothing alive lies in them, and checks that each step wrote only where it may.

    A kernel that reads dead bytes then computes NaNs; one that writes outside its outputs and workspace is refused.
    """

    def __init__(self, program: Program, plan: Plan, regions: Sequence[np.ndarray]) -> None:
        self.program, self.plan, self.regions = program, plan, regions
        self.before_step: list[np.ndarray] = []
        self.dead_after: dict[int, list[np.ndarray]] = defaultdict(list)
        starting: list[np.ndarray] = [np.ones(len(region), bool) for region in regions]
        found = buffers(plan, program)
        for buffer in found:
            if buffer.lower == 0 and buffer.value >= 0:
                starting[buffer.region][buffer.offset : buffer.offset + buffer.nbytes] = False
        for buffer in found:
            if buffer.upper < len(plan.steps):
                region = regions[buffer.region]
                self.dead_after[buffer.upper - 1].append(region[buffer.offset : buffer.offset + buffer.nbytes])
        self.unused_at_start = starting

    def start(self) -> None:
        """Poison every byte that holds nothing when a step begins."""
        for region, unused in zip(self.regions, self.unused_at_start):
            region[unused] = POISON

    def before(self, step: int) -> None:
        """Remember every byte."""
        self.before_step = [region.copy() for region in self.regions]

    def after(self, step: int) -> None:
        """Compare what the step was not allowed to write, then poison what has died.

        Raises:
            SessionError: names the node that wrote outside its outputs and workspace.
        """
        planned = self.plan.steps[step]
        action = self.program.actions[planned.action]
        spans = [
            (self.program.values[v].region, offset, self.program.values[v].nbytes)
            for v, offset in zip(action.writes, planned.writes)
        ]
        spans.append((action.workspace_region, planned.workspace, action.workspace))
        for region, offset, nbytes in spans:
            self.before_step[region][offset : offset + nbytes] = self.regions[region][offset : offset + nbytes]
        for index, (old, new) in enumerate(zip(self.before_step, self.regions)):
            if not np.array_equal(old, new):
                at = int(np.flatnonzero(old != new)[0])
                name = self.program.regions[index].name
                raise SessionError(f"node {action.name!r} wrote outside its outputs and workspace: byte {at} of {name}")
        for span in self.dead_after.get(step, ()):
            span[...] = POISON


@dataclass(frozen=True)
class Timing:
    """One executed step: the node it ran and how long that took."""

    node: str
    op: str
    seconds: float
    nbytes: int
    flops: int


class Trace:
    """Times every step."""

    def __init__(self, program: Program, plan: Plan) -> None:
        self.program, self.plan = program, plan
        self.timings: list[Timing] = []
        self.started = 0.0

    def before(self, step: int) -> None:
        """Start the clock."""
        self.started = time.perf_counter()

    def after(self, step: int) -> None:
        """Stop it."""
        seconds = time.perf_counter() - self.started
        index = self.plan.steps[step].action
        action, call = self.program.actions[index], self.program.calls[index]
        self.timings.append(Timing(action.name, call.op.name, seconds, action.nbytes, action.flops))

"""What a process holds besides the arena of a step that runs NumPy's kernels."""

from __future__ import annotations

from foreplan.base.outside import Part
from foreplan.lower.outside import Use
from foreplan.lower.program import Program
from foreplan.planner.plan import Plan
from foreplan.runtime.processes import outside_on_host


def outside(program: Program, plan: Plan, use: Use) -> tuple[Part, ...]:
    """The process's own."""
    return outside_on_host(program, plan, use)

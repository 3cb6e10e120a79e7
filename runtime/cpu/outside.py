"""The memory that a process holds besides the arena of a step that runs oneDNN and compiled loops."""

from __future__ import annotations

from foreplan.base.outside import Part
from foreplan.lower.outside import Use
from foreplan.lower.program import Program
from foreplan.lower.targets import options_of
from foreplan.planner.plan import Plan
from foreplan.runtime.cpu.target import target
from foreplan.runtime.processes import outside_on_host


def outside(program: Program, plan: Plan, use: Use) -> tuple[Part, ...]:
    """The process's own, its libraries and threads."""
    return outside_on_host(program, plan, use, threads=target(options_of(program.target)).threads)

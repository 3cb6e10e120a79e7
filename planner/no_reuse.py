"""The no-reuse twin of a plan: the same steps, every value in memory of its own."""

from __future__ import annotations

from dataclasses import replace

from foreplan.base.units import align_up
from foreplan.planner.memory.alias_sets import AliasSets
from foreplan.planner.placement.layout import Layout, assemble, schedule, stack_stored
from foreplan.planner.plan import Plan
from foreplan.planner.problem import ALIGNMENT, Problem
from foreplan.planner.verify.verifier import verify
from foreplan.planner.verify.wellformed import check_plan


def without_reuse(plan: Plan, problem: Problem) -> Plan:
    """The no-reuse twin of a plan, verified: the same steps, and no byte used twice. A planned run must equal its run
    bit for bit.

    Every write has 64-byte aligned memory of its own, unless it must take a read's bytes (a required overwrite, a
    value with a home). All workspaces of a region share one stretch: no step may rely on what is in them.

    Raises:
        PlanError: the problem is not well-formed, or the plan answers another one.
    """
    check_plan(plan, problem)
    order = [step.action for step in plan.steps]
    twin = schedule(problem, plan.certificate.order, order, in_place=False)
    offsets = [0] * len(twin.alias_sets.region)
    tops = [stack_stored(twin.alias_sets, region, offsets) for region in range(len(problem.regions))]
    _stack_others(twin.alias_sets, offsets, tops)
    workspaces = _workspaces(problem, order, tops)
    heights = [align_up(top, problem.unit) for top in tops]
    layout = Layout(twin.alias_sets, offsets, workspaces, heights, "no reuse")
    made = assemble(problem, twin, layout, plan.order_lower_bound_bytes)
    made = replace(made, certificate=replace(made.certificate, stages=(("no reuse", made.arena_bytes),)))
    verify(made, problem)
    return made


def _stack_others(alias_sets: AliasSets, offsets: list[int], tops: list[int]) -> None:
    for alias_set, region in enumerate(alias_sets.region):
        if alias_sets.stored[alias_set] < 0:
            offsets[alias_set] = align_up(tops[region], max(ALIGNMENT, alias_sets.alignment[alias_set]))
            tops[region] = offsets[alias_set] + alias_sets.nbytes[alias_set]


def _workspaces(problem: Problem, order: list[int], tops: list[int]) -> list[int]:
    """Offset of each step's workspace: the top of its region, which is raised above them all."""
    starts = [align_up(top, problem.unit) for top in tops]
    offsets = []
    for index in order:
        action = problem.actions[index]
        offsets.append(starts[action.workspace_region] if action.workspace else 0)
        if action.workspace:
            tops[action.workspace_region] = max(tops[action.workspace_region], offsets[-1] + action.workspace)
    return offsets

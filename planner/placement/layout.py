"""Layout: from a schedule with its alias sets to a plan with offsets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foreplan.planner.effort import USUAL, PlacementEffort
from foreplan.planner.memory.alias_sets import AliasSets, merge
from foreplan.planner.memory.bounds import granularities, live_bytes, reserved_bytes
from foreplan.planner.memory.concatenations import join
from foreplan.planner.memory.liveness import LiveRanges, live_ranges
from foreplan.planner.placement.offsets import NO_LIMIT, place
from foreplan.planner.plan import Certificate, Plan, Step
from foreplan.planner.problem import ALIGNMENT, Problem, Role
from foreplan.units import align_up


@dataclass(frozen=True)
class Schedule:
    """An order of actions, and what follows from it.

    Attributes:
        name: of the heuristic that found the order.
        order: indices of actions, one a step.
        ranges: when every instance lives.
        alias_sets: the instances that share bytes.
        bound: the most bytes that its alias sets and workspaces reserve at any step.
    """

    name: str
    order: tuple[int, ...]
    ranges: LiveRanges
    alias_sets: AliasSets
    bound: int


@dataclass(frozen=True)
class Layout:
    """The offsets of a schedule.

    Attributes:
        alias_sets: offset of each alias set.
        workspaces: offset of each step's workspace, 0 where it has none.
        heights: bytes of each region.
        placement: the placer that found the offsets of the device's largest region.
    """

    alias_sets: list[int]
    workspaces: list[int]
    heights: list[int]
    placement: str


def schedule(problem: Problem, name: str, order: Sequence[int], *, in_place: bool = True) -> Schedule:
    """Live ranges, alias sets and bound of an order; without `in_place`, nothing takes bytes that it need not take."""
    ranges = live_ranges(problem, order)
    alias_sets = merge(problem, order, ranges, optional=in_place)
    if in_place:
        alias_sets = join(problem, order, ranges, alias_sets)
    return Schedule(
        name, tuple(order), ranges, alias_sets, int(reserved_bytes(problem, order, ranges, alias_sets).max())
    )


def settle(
    problem: Problem, plan: Schedule, layout: Layout, effort: PlacementEffort = USUAL.placement
) -> tuple[Schedule, Layout]:
    """A schedule and its layout; where that is above the bound, the lowest of these and of its loosened forms."""
    best, height = plan, arena_bytes(problem, layout.heights)
    for share in effort.loose:
        loose = loosened(problem, plan, plan.bound // share) if height > plan.bound else None
        if loose is not None:
            trial = lay_out(problem, loose, effort)
            if (found := arena_bytes(problem, trial.heights)) < height:
                best, layout, height = loose, trial, found
    return best, layout


def loosened(problem: Problem, plan: Schedule, least: int) -> Schedule | None:
    """The same order, but results of at least `least` bytes no longer overwrite a read where both fit below the bound.

    Values that follow one another in the same bytes through many actions are one long buffer. Where two of them fit
    below the bound together, the alias set may be cut: the next value can then lie anywhere, which gives placement
    more freedom. None if nothing can be cut.
    """
    alias_sets, ranges = plan.alias_sets, plan.ranges
    live = reserved_bytes(problem, plan.order, ranges, alias_sets)
    grain, within, apart = granularities(problem), alias_sets.within(), set()
    for instance, over in enumerate(alias_sets.over):
        value = problem.values[ranges.values[instance]]
        if over < 0 or value.home >= 0 or value.nbytes < least or instance in within:
            continue
        step, nbytes = ranges.lower[instance], align_up(value.nbytes, grain[value.region])
        if live[step] + nbytes <= plan.bound:
            live[step] += nbytes
            apart.add(instance)
    loose = join(problem, plan.order, ranges, merge(problem, plan.order, ranges, apart=apart))
    bound = int(reserved_bytes(problem, plan.order, ranges, loose).max())
    return Schedule(plan.name, plan.order, ranges, loose, bound) if apart and bound <= plan.bound else None


def lay_out(
    problem: Problem, plan: Schedule, effort: PlacementEffort = USUAL.placement, *, quick: bool = False
) -> Layout:
    """Offsets for a schedule: in every region the stored values at the bottom, as listed, the others packed above.

    Stored values live throughout, so this costs nothing. Programs that list the same ones first place them alike.

    Args:
        quick: take what the first placer finds.
    """
    alias_sets = plan.alias_sets
    layout = Layout([0] * len(alias_sets.region), [0] * len(plan.order), [], "nothing to place")
    largest = 0
    for region in range(len(problem.regions)):
        bottom = stack_stored(alias_sets, region, layout.alias_sets)
        buffers = [c for c, at in enumerate(alias_sets.region) if at == region and alias_sets.stored[c] < 0]
        actions = [problem.actions[index] for index in plan.order]
        scratch = [s for s, a in enumerate(actions) if a.workspace and a.workspace_region == region]
        alignment = [alias_sets.alignment[c] for c in buffers] + [problem.unit] * len(scratch)
        bottom = align_up(bottom, max(alignment, default=1))
        placement = place(
            [alias_sets.lower[c] for c in buffers] + scratch,
            [alias_sets.upper[c] for c in buffers] + [s + 1 for s in scratch],
            [alias_sets.nbytes[c] for c in buffers] + [actions[s].workspace for s in scratch],
            alignment,
            capacity=NO_LIMIT if quick else None,
            work=effort.layout_work,
            effort=effort,
        )
        offsets = [bottom + offset for offset in placement.offsets.tolist()]
        for alias_set, offset in zip(buffers, offsets):
            layout.alias_sets[alias_set] = offset
        for step, offset in zip(scratch, offsets[len(buffers) :]):
            layout.workspaces[step] = offset
        layout.heights.append(align_up(bottom + placement.height, problem.unit))
        if placement.height > largest and problem.regions[region].on_device:
            largest = placement.height
            layout = Layout(layout.alias_sets, layout.workspaces, layout.heights, placement.heuristic)
    return layout


def stack_stored(alias_sets: AliasSets, region: int, offsets: list[int]) -> int:
    """Put a region's stored values one above another, as listed; returns the bytes they take."""
    top = 0
    for alias_set, stored in enumerate(alias_sets.stored):
        if stored >= 0 and alias_sets.region[alias_set] == region:
            offsets[alias_set] = align_up(top, max(ALIGNMENT, alias_sets.alignment[alias_set]))
            top = offsets[alias_set] + alias_sets.nbytes[alias_set]
    return top


def assemble(
    problem: Problem,
    plan: Schedule,
    layout: Layout,
    order_lower_bound: int | None,
    stages: tuple[tuple[str, int], ...] = (),
) -> Plan:
    """The plan that a schedule and its layout make."""
    ranges, live = plan.ranges, live_bytes(problem, plan.order)
    at = [layout.alias_sets[alias_set] + inside for alias_set, inside in zip(plan.alias_sets.of, plan.alias_sets.at)]
    last: dict[int, int] = {}
    for instance, value in enumerate(ranges.values):
        last[value] = instance
    replaced = {value.home for value in problem.values if value.home >= 0}
    roles = [value.role for value in problem.values]
    return Plan(
        problem_digest=problem.digest,
        steps=tuple(
            Step(
                action,
                tuple([at[i] for i in ranges.reads[step]]),
                tuple([at[i] for i in ranges.writes[step]]),
                layout.workspaces[step],
            )
            for step, action in enumerate(plan.order)
        ),
        starts=tuple((v, at[last_start]) for last_start, v in enumerate(ranges.values[: _starts(problem)])),
        ends=tuple(
            (v, at[last[v]])
            for v, role in enumerate(roles)
            if role is Role.OUTPUT or (role is Role.STORED and v not in replaced)
        ),
        heights=tuple(layout.heights),
        arena_bytes=arena_bytes(problem, layout.heights),
        lower_bound_bytes=int(live.max()),
        order_lower_bound_bytes=order_lower_bound,
        certificate=Certificate(int(live.argmax()), layout.placement, plan.name, stages),
    )


def arena_bytes(problem: Problem, heights: Sequence[int]) -> int:
    """Bytes of all regions on the device."""
    return sum(height for height, region in zip(heights, problem.regions) if region.on_device)


def _starts(problem: Problem) -> int:
    return sum(value.role in (Role.INPUT, Role.STORED) for value in problem.values)

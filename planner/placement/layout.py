"""Layout: from a schedule with its alias sets to a plan with offsets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from foreplan.base.units import align_up
from foreplan.planner.effort import USUAL, PlacementEffort
from foreplan.planner.memory.alias_sets import AliasSets, merge
from foreplan.planner.memory.bounds import granularities, live_bytes, reserved_bytes
from foreplan.planner.memory.concatenations import join
from foreplan.planner.memory.liveness import LiveRanges, live_ranges
from foreplan.planner.memory.outlines import Box, Outlines, outlines
from foreplan.planner.placement.offsets import NO_LIMIT, place
from foreplan.planner.placement.uneven import UnevenBuffer, place_uneven
from foreplan.planner.plan import Certificate, Plan, Step
from foreplan.planner.problem import ALIGNMENT, Problem, Role


@dataclass(frozen=True)
class Schedule:
    """An order of actions, and what follows from it.

    Attributes:
        name: of the heuristic that found the order.
        order: indices of actions, one a step.
        ranges: when every instance lives.
        alias_sets: the instances that share bytes, if each alias set holds its bytes as long as it lives.
        bound: the most bytes that live at any step.
        in_place: whether writes take bytes that they need not take.
    """

    name: str
    order: tuple[int, ...]
    ranges: LiveRanges
    alias_sets: AliasSets
    bound: int
    in_place: bool


@dataclass(frozen=True)
class Layout:
    """The offsets of a schedule.

    Attributes:
        alias_sets: the instances that share bytes.
        offsets: of each alias set.
        workspaces: offset of each step's workspace, 0 where it has none.
        heights: bytes of each region.
        placement: the placer that found the offsets of the device's largest region.
    """

    alias_sets: AliasSets
    offsets: list[int]
    workspaces: list[int]
    heights: list[int]
    placement: str


def schedule(problem: Problem, name: str, order: Sequence[int], *, in_place: bool = True) -> Schedule:
    """Live ranges, alias sets and bound of an order; without `in_place`, nothing takes bytes that it need not take."""
    ranges = live_ranges(problem, order)
    alias_sets = merge(problem, order, ranges, optional=in_place)
    if in_place:
        alias_sets, live = join(problem, order, ranges, alias_sets), live_bytes(problem, order)
    else:
        live = reserved_bytes(problem, order, ranges, alias_sets)
    return Schedule(name, tuple(order), ranges, alias_sets, int(live.max()), in_place)


def settle(
    problem: Problem, plan: Schedule, layout: Layout, effort: PlacementEffort = USUAL.placement
) -> tuple[Layout, bool]:
    """The lowest of a layout and, where that is above the bound, of the schedule's loosened forms; whether it is one of
    these.

    Values that follow one another in the same bytes through many actions are one long buffer. Where two of them fit
    below the bound together, the alias set may be cut: the next value can then lie anywhere, which gives placement
    more freedom.
    """
    height, better = arena_bytes(problem, layout.heights), False
    effort = effort.lessened()
    for share in effort.loose:
        for lay_out_loose in (_loose_solid, _loose_uneven):
            loose = lay_out_loose(problem, plan, plan.bound // share, effort) if height > plan.bound else None
            if loose is not None and (found := arena_bytes(problem, loose.heights)) < height:
                layout, height, better = loose, found, True
    return layout, better


def _loose_solid(problem: Problem, plan: Schedule, least: int, effort: PlacementEffort) -> Layout | None:
    loose = loosened(problem, plan, least)
    return None if loose is None else _lay_out_solid(problem, plan, loose, effort, quick=False)


def _loose_uneven(problem: Problem, plan: Schedule, least: int, effort: PlacementEffort) -> Layout | None:
    whole, live = outlines(problem, plan.order, plan.ranges).alias_sets, live_bytes(problem, plan.order)
    apart, copied = _apart(problem, plan, whole.over, live, least), _copied(problem, plan, whole, live, least)
    if not apart and not copied:
        return None
    return _lay_out_uneven(problem, plan, outlines(problem, plan.order, plan.ranges, apart, copied), effort)


def loosened(problem: Problem, plan: Schedule, least: int) -> AliasSets | None:
    """Solid alias sets in which results of at least `least` bytes no longer overwrite a read where both fit below the
    bound. None if nothing can be cut.
    """
    live, within = reserved_bytes(problem, plan.order, plan.ranges, plan.alias_sets), plan.alias_sets.within()
    over = [-1 if instance in within else read for instance, read in enumerate(plan.alias_sets.over)]
    apart = _apart(problem, plan, over, live, least)
    loose = join(problem, plan.order, plan.ranges, merge(problem, plan.order, plan.ranges, apart=apart))
    bound = int(reserved_bytes(problem, plan.order, plan.ranges, loose).max())
    return loose if apart and bound <= plan.bound else None


def _apart(problem: Problem, plan: Schedule, over: Sequence[int], live: np.ndarray, least: int) -> set[int]:
    """Instances of at least `least` bytes that need not take a read's bytes, since both fit below the bound; they are
    added to `live`.
    """
    grain, found = granularities(problem), set()
    for instance, read in enumerate(over):
        value = problem.values[plan.ranges.values[instance]]
        step, nbytes = plan.ranges.lower[instance], align_up(value.nbytes, grain[value.region])
        if read >= 0 and value.home < 0 and value.nbytes >= least and live[step] + nbytes <= plan.bound:
            live[step] += nbytes
            found.add(instance)
    return found


def _copied(problem: Problem, plan: Schedule, whole: AliasSets, live: np.ndarray, least: int) -> set[int]:
    """Parts of at least `least` bytes that need not lie within their wholes, likewise."""
    grain, found = granularities(problem), set()
    for step, index in enumerate(plan.order):
        for part in problem.actions[index].parts:
            piece, into = plan.ranges.reads[step][part.read], plan.ranges.writes[step][part.write]
            value = problem.values[plan.ranges.values[piece]]
            nbytes = align_up(value.nbytes, grain[value.region])
            placed = whole.of[piece] == whole.of[into]
            if placed and value.nbytes >= least and live[step] + nbytes <= plan.bound:
                live[step] += nbytes
                found.add(piece)
    return found


def lay_out(
    problem: Problem, plan: Schedule, effort: PlacementEffort = USUAL.placement, *, quick: bool = False
) -> Layout:
    """Offsets for a schedule: in every region the stored values at the bottom, as listed, the others packed above.

    Stored values live throughout, so this costs nothing. Programs that list the same ones first place them alike. Where
    alias sets that hold their bytes as long as they live need more than the bound, they are placed as they are.

    Args:
        quick: take what the first placer finds.
    """
    layout = _lay_out_solid(problem, plan, plan.alias_sets, effort, quick=quick)
    if plan.in_place and not quick and arena_bytes(problem, layout.heights) > plan.bound:
        shapes = outlines(problem, plan.order, plan.ranges)
        if not shapes.is_solid:
            other = _lay_out_uneven(problem, plan, shapes, effort)
        elif shapes.alias_sets != plan.alias_sets:
            other = _lay_out_solid(problem, plan, shapes.alias_sets, effort, quick=False)
        else:
            return layout
        return min(layout, other, key=lambda each: arena_bytes(problem, each.heights))
    return layout


def _lay_out_solid(
    problem: Problem, plan: Schedule, alias_sets: AliasSets, effort: PlacementEffort, *, quick: bool
) -> Layout:
    """Offsets for alias sets that hold their bytes as long as they live."""
    layout = Layout(alias_sets, [0] * len(alias_sets.region), [0] * len(plan.order), [], "nothing to place")
    largest = 0
    for region in range(len(problem.regions)):
        bottom, buffers, scratch = _to_place(problem, plan, alias_sets, region, layout.offsets)
        placement = place(
            [alias_sets.lower[c] for c in buffers] + scratch,
            [alias_sets.upper[c] for c in buffers] + [s + 1 for s in scratch],
            [alias_sets.nbytes[c] for c in buffers] + [problem.actions[plan.order[s]].workspace for s in scratch],
            [alias_sets.alignment[c] for c in buffers] + [problem.unit] * len(scratch),
            capacity=NO_LIMIT if quick else None,
            work=effort.layout_work,
            effort=effort,
        )
        _put(layout, buffers, scratch, [bottom + offset for offset in placement.offsets.tolist()])
        layout.heights.append(align_up(bottom + placement.height, problem.unit))
        if placement.height > largest and problem.regions[region].on_device:
            largest = placement.height
            layout = replace(layout, placement=placement.heuristic)
    return layout


def _lay_out_uneven(problem: Problem, plan: Schedule, shapes: Outlines, effort: PlacementEffort) -> Layout:
    """Offsets for alias sets that grow and shrink."""
    alias_sets = shapes.alias_sets
    layout = Layout(alias_sets, [0] * len(alias_sets.region), [0] * len(plan.order), [], "squeaky wheel, first fit")
    for region in range(len(problem.regions)):
        bottom, buffers, scratch = _to_place(problem, plan, alias_sets, region, layout.offsets)
        buffers = [c for c in buffers if shapes.boxes[c]]
        items = [UnevenBuffer(shapes.boxes[c], alias_sets.alignment[c], alias_sets.residue[c]) for c in buffers]
        items += [
            UnevenBuffer([Box(s, s + 1, 0, problem.actions[plan.order[s]].workspace)], problem.unit) for s in scratch
        ]
        offsets, height = place_uneven(items, effort.shaking)
        _put(layout, buffers, scratch, [bottom + offset for offset in offsets])
        layout.heights.append(align_up(bottom + height, problem.unit))
    return layout


def _to_place(
    problem: Problem, plan: Schedule, alias_sets: AliasSets, region: int, offsets: list[int]
) -> tuple[int, list[int], list[int]]:
    """Where a region's stored values end, whose offsets are written; the alias sets above; steps with workspace."""
    bottom = stack_stored(alias_sets, region, offsets)
    buffers = [
        c
        for c, at in enumerate(alias_sets.region)
        if at == region and alias_sets.stored[c] < 0 and alias_sets.lower[c] < alias_sets.upper[c]
    ]
    actions = [problem.actions[index] for index in plan.order]
    scratch = [s for s, a in enumerate(actions) if a.workspace and a.workspace_region == region]
    widest = max([1, *(alias_sets.alignment[c] for c in buffers), *([problem.unit] if scratch else [])])
    return align_up(bottom, widest), buffers, scratch


def _put(layout: Layout, buffers: Sequence[int], scratch: Sequence[int], offsets: Sequence[int]) -> None:
    for alias_set, offset in zip(buffers, offsets):
        layout.offsets[alias_set] = offset
    for step, offset in zip(scratch, offsets[len(buffers) :]):
        layout.workspaces[step] = offset


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
    sets = layout.alias_sets
    at = [layout.offsets[alias_set] + inside for alias_set, inside in zip(sets.of, sets.at)]
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

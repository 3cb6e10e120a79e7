"""The choice among candidates: a curve of schedules without them becomes one with them.

For every height of the arena, each step takes the fastest candidate that still fits. So a schedule of the search, which
saw the least workspace, stands for many: from its own bytes up to those of the fastest candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from foreplan.base.units import align_up
from foreplan.planner.candidates import Lean
from foreplan.planner.memory.bounds import granularities, live_bytes
from foreplan.planner.placement.layout import arena_bytes, lay_out, schedule
from foreplan.planner.recompute.front import Base, Curve
from foreplan.planner.recompute.schedules import Point, frontier


@dataclass(frozen=True)
class Option:
    """One of several candidates.

    Attributes:
        action: index into the actions of the whole problem.
        nbytes: on the device, beyond those of the candidate of the least workspace.
        cost: beyond that of the cheapest candidate.
    """

    action: int
    nbytes: int
    cost: int


def choose_candidates(lean: Lean, costs: Sequence[int], curve: Curve, most: int | None = None) -> Curve:
    """The curve of a lean problem as a curve of the whole problem: point 0 runs the fastest candidates and recomputes
    nothing. Costs are those beyond point 0.

    Args:
        costs: of one run of each action of the whole problem.
        curve: of the lean problem, for its costs.
        most: only the lowest point of at most this cost is wanted.
    """
    if lean.problem is lean.whole:
        return curve
    options = _options(lean, costs)
    once = curve.base.schedule
    first = _Steps.of(lean, options, Point(once.order, once.bound, 0))
    made = schedule(lean.whole, once.name, first.actions(first.enough))
    effort = curve.effort
    layout = lay_out(lean.whole, made, effort.placement)
    base = Base(made, layout, (*curve.base.stages, ("fastest kernels", arena_bytes(lean.whole, layout.heights))))
    if most is None:
        some = _evenly(curve.points, effort.recompute.candidates)
        steps = [first, *(_Steps.of(lean, options, point) for point in some)]
        notable = max(sum(lean.costs[index] for index in once.order) // effort.recompute.notable, 1)
        found = [steps[i].point_at(highest, cost) for i, highest, cost in _choices(steps, notable)]
    else:
        found = _lowest(lean, options, first, curve.points, most)
    return Curve(lean.whole, base, tuple(frontier(found, made.bound)), effort)


def _lowest(
    lean: Lean, options: Sequence[tuple[Option, ...]], first: _Steps, points: Sequence[Point], most: int
) -> list[Point]:
    """Of each schedule the lowest form within a cost; from the lowest schedule up, while that helps."""
    found: list[Point] = []
    for point in (*reversed(points), first.point):
        if found and point.bound >= min(each.bound for each in found):
            break
        one = first if point is first.point else _Steps.of(lean, options, point)
        enough = int(np.searchsorted(-one.cost, -most))
        if enough < len(one.cost):
            last = int(np.searchsorted(one.highest, one.highest[enough], side="right")) - 1
            found.append(one.point_at(int(one.highest[last]), int(one.cost[last])))
    return found


def _options(lean: Lean, costs: Sequence[int]) -> list[tuple[Option, ...]]:
    """By action of the lean problem, those that no other beats in both workspace and cost; of equals the first."""
    grain = granularities(lean.whole)
    found = []
    for candidates, cheapest in zip(lean.sets, lean.costs):
        kept: list[Option] = []
        for index in candidates:
            action = lean.whole.actions[index]
            counts = lean.whole.regions[action.workspace_region].on_device
            nbytes = align_up(action.workspace, grain[action.workspace_region]) * counts
            if not kept or costs[index] < kept[-1].cost + cheapest:
                kept.append(Option(index, nbytes - (kept[0].nbytes if kept else 0), costs[index] - cheapest))
        found.append((Option(kept[0].action, 0, kept[0].cost), *kept[1:]))
    return found


@dataclass(frozen=True)
class _Steps:
    """A schedule of a lean problem and what its steps may run instead.

    Attributes:
        point: the schedule.
        options: of each step.
        live: bytes of each step with the least workspace.
        room: live bytes that each further option needs, ascending,
        highest: the highest live set once all options up to each are taken,
        cost: and the cost of the whole schedule then.
    """

    point: Point
    options: tuple[tuple[Option, ...], ...]
    live: np.ndarray
    room: np.ndarray
    highest: np.ndarray
    cost: np.ndarray

    @classmethod
    def of(cls, lean: Lean, found: Sequence[tuple[Option, ...]], point: Point) -> _Steps:
        """Of one point of a lean curve."""
        live = live_bytes(lean.problem, point.order)
        options = tuple(found[index] for index in point.order)
        slowest = point.cost + sum(own[0].cost for own in options)
        more = [
            (int(live[step]) + option.nbytes, before.cost - option.cost)
            for step, own in enumerate(options)
            for before, option in pairwise(own)
        ]
        more.sort()
        room = np.array([0, *(nbytes for nbytes, _ in more)], np.int64)
        saved = np.cumsum(np.array([0, *(cost for _, cost in more)], np.int64))
        return cls(point, options, live, room, np.maximum(room, live.max(initial=0)), slowest - saved)

    @property
    def enough(self) -> int:
        """Bytes with which every step runs the fastest."""
        return int(self.highest[-1])

    def point_at(self, highest: int, cost: int) -> Point:
        """What the schedule becomes within a number of live bytes."""
        return Point(tuple(self.actions(highest)), highest, cost)

    def actions(self, most: int) -> list[int]:
        """What each step runs within a number of live bytes: the last of its options that find room."""
        return [
            next((o.action for o in reversed(own) if live + o.nbytes <= most), own[0].action)
            for live, own in zip(self.live.tolist(), self.options)
        ]


def _choices(steps: Sequence[_Steps], notable: int) -> list[tuple[int, int, int]]:
    """By ascending bytes and notably descending cost: a schedule, the bytes of its highest step, its cost."""
    which = np.concatenate([np.full(len(one.cost), i) for i, one in enumerate(steps)])
    highest, cost = (np.concatenate([getattr(one, name) for one in steps]) for name in ("highest", "cost"))
    found: list[tuple[int, int, int]] = []
    for i in np.lexsort((which, cost, highest)).tolist():
        if not found or cost[i] <= found[-1][2] - notable:
            found.append((int(which[i]), int(highest[i]), int(cost[i])))
    return found


def _evenly(points: Sequence[Point], most: int) -> list[Point]:
    """At most `most` points, spread evenly, with the last."""
    count = min(len(points), most)
    return [points[(i + 1) * len(points) // count - 1] for i in range(count)]

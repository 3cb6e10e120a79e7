"""Dives: short runs of the systematic search, straight for the highest live set, also for many buffers.

Training plans have one highest live set, or few, and room elsewhere. A search that decides on the tightest section
places most of them with few wrong decisions (`exact.dive`). It works on the core; the other buffers find a place.
"""

from __future__ import annotations

import numpy as np

from foreplan.planner.effort import PlacementEffort
from foreplan.planner.placement.exact import dive
from foreplan.planner.placement.orders import pairs
from foreplan.planner.placement.problem import PlacementProblem
from foreplan.planner.placement.sections import sections_of


def dives(core: PlacementProblem, goal: int, effort: PlacementEffort) -> np.ndarray | None:
    """Offsets of a placement within the goal, if dives find one.

    Args:
        core: buffers, none fixed, without those that always find a place.
        goal: a height, a multiple of the smallest alignment.
    """
    if len(core.size) > effort.dives:
        return None
    work = min(effort.dive_pair * pairs(core), effort.dive_work)
    return dive(sections_of(core.lower, core.upper, core.size, core.alignment, core.fixed), goal, work, effort).offsets

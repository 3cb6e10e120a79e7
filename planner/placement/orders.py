"""Orders in which buffers are placed, and how many of them live together."""

from __future__ import annotations

import numpy as np

from foreplan.planner.placement.problem import PlacementProblem


def pairs(problem: PlacementProblem) -> int:
    """How many pairs of buffers live at the same time."""
    born = np.searchsorted(np.sort(problem.lower), problem.upper)  # born before a buffer dies, the buffer included
    dead = np.searchsorted(np.sort(problem.upper), problem.lower, side="right")
    return int((born - dead - 1).sum()) // 2


def by_size(problem: PlacementProblem) -> np.ndarray:
    """Largest first: greedy by size of Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference",
    arXiv 2001.03288."""
    n = np.arange(len(problem.size))
    return np.lexsort((n, problem.lower, problem.lower - problem.upper, -problem.size))


def by_area(problem: PlacementProblem) -> np.ndarray:
    """Largest size times lifetime first."""
    n = np.arange(len(problem.size))
    area = problem.size.astype(np.float64) * (problem.upper - problem.lower)
    return np.lexsort((n, problem.lower, -area))


def by_lifetime(problem: PlacementProblem) -> np.ndarray:
    """Longest-lived first, which suits nested lives."""
    n = np.arange(len(problem.size))
    return np.lexsort((n, problem.lower, -problem.size, problem.lower - problem.upper))

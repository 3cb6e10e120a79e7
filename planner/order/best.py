"""A better order than a given one: an exact search where it ends in time, then moves, then windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foreplan.planner.effort import USUAL, OrderEffort
from foreplan.planner.order.arrays import OrderArrays, order_arrays
from foreplan.planner.order.dependences import Dependences
from foreplan.planner.problem import Problem


@dataclass(frozen=True)
class BestOrder:
    """An order and how good it is.

    Attributes:
        order: actions, each once.
        nbytes: its highest live set.
        least: no order that runs each of these actions once needs less; 0 where nothing was proved.
    """

    order: tuple[int, ...]
    nbytes: int
    least: int


def improve(
    problem: Problem, graph: Dependences, order: Sequence[int], effort: OrderEffort = USUAL.order
) -> BestOrder | None:
    """An order that needs no more than a given one; None if that is empty, or two nodes write the same value."""
    arrays = order_arrays(problem, graph, effort.readers)
    if arrays is None or not order:
        return None
    node = {action: i for i, action in enumerate(graph.actions)}
    best = _Best(arrays, np.array([node[action] for action in order], np.int64), effort)
    best.search_whole()
    if best.nbytes > best.least:
        best.move()
    if best.nbytes > best.least:
        best.search_windows()
    return BestOrder(tuple(graph.actions[i] for i in best.order.tolist()), best.nbytes, best.least)


class _Best:
    """The best order so far, its live bytes, and a lower bound of all orders."""

    def __init__(self, arrays: OrderArrays, order: np.ndarray, effort: OrderEffort) -> None:
        from foreplan.planner.memory.kernels import make_count
        from foreplan.planner.order import kernels as order_kernels
        from foreplan.planner.order import moves as order_moves
        from foreplan.planner.order import search as order_search

        self.kernels, self.moves, self.searches = order_kernels, order_moves, order_search
        self.arrays, self.order, self.effort = arrays, order, effort
        self.state = order_kernels.make_state(arrays)
        self.count = make_count(arrays.problem, len(order))
        self.live = np.zeros(len(order), np.int64)
        self.nbytes = int(order_kernels.live_bytes(arrays, self.count, order, self.live))
        hardest = np.argsort(-self.live, kind="stable")[: effort.hardest]
        start = arrays.base + arrays.given + arrays.unread
        self.least = max(start, int(order_kernels.unavoidable(arrays, order, hardest)))

    def keep(self, order: np.ndarray) -> bool:
        """Take an order if it is better."""
        live = np.zeros(len(order), np.int64)
        nbytes = int(self.kernels.live_bytes(self.arrays, self.count, order, live))
        if nbytes >= self.nbytes:
            return False
        self.order, self.nbytes, self.live = order, nbytes, live
        return True

    def attempt(self, low: int, high: int, ceiling: int, most_work: int, exact: bool = False) -> tuple[int, int, int]:
        """Search one window, as `order_search.search`; an order that is no better counts as UNKNOWN."""
        rank = np.empty(len(self.order), np.int64)
        rank[self.order] = np.arange(len(self.order))
        order = self.order.copy()
        nodes = high - low
        visited = self.searches.make_visited(nodes, min(self.effort.memory // (nodes // 8 + 24), most_work // 4 + 1))
        said, least, work = self.searches.search(
            self.arrays, self.state, self.count, visited, order, low, high, rank, ceiling, exact, most_work
        )
        if said == self.searches.FOUND and not self.keep(order):
            said = self.searches.UNKNOWN
        return int(said), int(least), int(work)

    def search_whole(self) -> None:
        """Close in on the optimum over all orders from both sides, until the work is spent.

        A ceiling that cannot be decided counts as too low. The last ceiling is one byte below the best: if no
        order stays within it, the best is optimal.
        """
        n, most = len(self.order), self.effort.search_work
        if n > self.effort.whole or not most:
            return
        work, floor = 0, self.least
        while work < most and self.nbytes > self.least:
            ceiling = floor if self.nbytes - floor > 1 else self.nbytes - 1
            said, least, more = self.attempt(0, n, ceiling, max((most - work) // 8, 1000))
            work += more + n
            if said == self.searches.NONE:
                self.least = max(self.least, min(least, self.nbytes))
            if said != self.searches.FOUND:
                if ceiling == self.nbytes - 1:
                    break
                step = (self.nbytes - ceiling) // 2
                floor = max(ceiling + step, self.least)
                if floor >= self.nbytes - max(self.nbytes >> 12, 64):
                    floor = self.nbytes - 1
        if self.nbytes > self.least and work < most:
            said, least, _ = self.attempt(0, n, self.nbytes - 1, most - work)
            if said == self.searches.NONE:
                self.least = max(self.least, min(least, self.nbytes))
        if n <= self.effort.tiny and self.nbytes > self.least:
            while self.attempt(0, n, self.nbytes - 1, self.effort.tiny_work, exact=True)[0] == self.searches.FOUND:
                pass
            self.least = self.nbytes

    def search_windows(self) -> None:
        """Search the nodes around the peak; all other nodes stay where they are."""
        n, most = len(self.order), self.effort.window_work
        for nodes in self.effort.windows:
            work = 0
            while nodes < n and work < most and self.nbytes > self.least:
                peak = int(np.argmax(self.live))
                low = max(min(peak - nodes // 2, n - nodes), 0)
                said, _, more = self.attempt(low, low + nodes, self.nbytes - 1, most - work)
                work += more + 1
                if said != self.searches.FOUND:
                    break

    def move(self) -> None:
        """Move single nodes across the peak."""
        order, effort = self.order.copy(), self.effort
        if effort.move_work:
            self.moves.move_across_peak(self.arrays, self.state, self.count, order, effort.width, effort.move_work)
            self.keep(order)

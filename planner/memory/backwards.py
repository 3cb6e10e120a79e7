"""A search backwards through what must be there together: the fewest bytes in which some values can all be made.

Of values that are there at one moment, one was written last. While the action that wrote it ran, the others were there
already, and before it ran, what it reads was. So each choice of the last one leads to an earlier set of values, and
the way back to the step's beginning that takes the fewest bytes at its highest is a bound for every schedule. It is
the game of pebbles on a graph (Sethi, "Complete register allocation problems", SIAM J. Computing 1975), played from its
end, of which small values are left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from heapq import heappop, heappush

from foreplan.planner.memory.bounds import DeviceBytes
from foreplan.planner.problem import Problem, Role

LARGE = 256  # values that are looked at; the others count while an action reads or writes them
FEW = 7  # values of a set whose subsets are looked up


class Backwards:
    """The search for one problem. Sets of values are integers, with a bit for each large value.

    Attributes:
        work: sets of values that may still be looked at.
    """

    def __init__(self, problem: Problem, sizes: DeviceBytes, work: int) -> None:
        """Nothing is looked at yet.

        Args:
            sizes: of the problem's values.
            work: how many sets of values may be looked at.
        """
        self.problem, self.sizes, self.work = problem, sizes, work
        values = [v for v, value in enumerate(problem.values) if value.role is not Role.STORED and sizes.of[v]]
        smallest = sorted((sizes.of[v] for v in values), reverse=True)[:LARGE][-1] if values else 0
        large = [v for v in values if sizes.of[v] >= smallest]
        self._bit = {v: i for i, v in enumerate(large)}
        self._size = [sizes.of[v] for v in large]
        self._makers = [() if problem.values[v].role is Role.INPUT else problem.producers[v] for v in large]
        self._made = sum(1 << i for i, makers in enumerate(self._makers) if makers)
        self._reads = [self._set(action.reads) for action in problem.actions]
        self._writes = [self._set(action.writes) for action in problem.actions]
        self._touched = [reads | writes for reads, writes in zip(self._reads, self._writes)]
        self._steps: dict[tuple[int, int], tuple[int, int]] = {}

    def least(self, there: Collection[int], known: int) -> int:
        """The fewest bytes, beside stored values, with which some values can be there together.

        Args:
            there: values, stored ones left out.
            known: what is needed at least.

        Returns:
            At least what is known. Less than the fewest where the work is spent before.
        """
        start = self._set(there)
        heap = [(known, 0, start, self._bytes(start))]
        best, settled, count = {start: known}, set[int](), 0
        while heap:
            nbytes, _, now, total = heappop(heap)
            made = now & self._made
            if not made or self.work <= 0:
                return nbytes
            if best[now] < nbytes or self._beaten(now, made, settled):
                continue
            settled.add(now)
            self.work -= 1
            for bit in _bits(made):
                for maker in self._makers[bit]:
                    before = now & ~self._writes[maker] | self._reads[maker]
                    running, more = self._step(maker, now & self._touched[maker])
                    needed = max(nbytes, total + running)
                    if needed < best.get(before, needed + 1):
                        best[before] = needed
                        count -= 1  # of equal ones the latest first, which soonest comes to an end
                        heappush(heap, (needed, count, before, total + more))
        return known

    def _set(self, values: Collection[int]) -> int:
        return sum(1 << self._bit[v] for v in set(values) if v in self._bit)

    def _bytes(self, values: int) -> int:
        return sum(self._size[bit] for bit in _bits(values))

    def _step(self, maker: int, after: int) -> tuple[int, int]:
        """How many bytes more there are while an action runs, and before it, than after it.

        Args:
            after: those of its reads and writes that are there after it.
        """
        if (found := self._steps.get((maker, after))) is None:
            reads = self._reads[maker]
            still = {v for v in self.problem.actions[maker].reads if v in self._bit and after >> self._bit[v] & 1}
            running = self.sizes.while_running(self.problem, maker, still)
            before, now = self._bytes(after & ~self._writes[maker] | reads), self._bytes(after)
            found = self._steps[maker, after] = running - now, before - now
        return found

    def _beaten(self, now: int, made: int, settled: set[int]) -> bool:
        """Whether fewer of the values took no more bytes: then all of them do not help."""
        bits = [1 << bit for bit in _bits(made)]
        if len(bits) > FEW:
            return False
        given = now & ~made
        return any(
            given | sum(some) in settled for count in range(len(bits)) for some in itertools.combinations(bits, count)
        )


def _bits(values: int) -> Iterator[int]:
    while values:
        low = values & -values
        yield low.bit_length() - 1
        values ^= low

"""Where a line of operations is cut into stages: balanced in time, and with little that crosses."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from itertools import accumulate

SLACK = 0.05  # the slowest stage may take so much longer than it must, where less crosses for it


def best_cuts(times: Sequence[int], traffic: Sequence[int], stages: int, slack: float = SLACK) -> tuple[int, ...]:
    """The positions at which a line is cut, exactly the best ones.

    Let T be the least time that the slowest stage can take. Of all cuts whose slowest stage takes at most
    (1 + slack) T, those are best across which the fewest bytes go in all; and of these, one whose slowest stage takes
    the least time. Finding it takes a time that grows with the line's length times the number of stages.

    Args:
        times: of each operation.
        traffic: bytes that cross before each operation; the first number means nothing.
        stages: how many there are, each of one operation or more.

    Returns:
        The first operation of each stage but the first, ascending.

    Raises:
        ValueError: there are more stages than operations.
    """
    if not 0 < stages <= len(times):
        raise ValueError(f"{len(times)} operations do not make {stages} stages")
    line = _Line(times, traffic, stages)
    least = line.slowest()
    most = least + int(least * slack)
    fewest, _ = line.fewest(most)
    while least < most:
        middle = (least + most) // 2
        if line.fewest(middle)[0] == fewest:
            most = middle
        else:
            least = middle + 1
    return line.fewest(most)[1]


class _Line:
    """Operations in a row."""

    def __init__(self, times: Sequence[int], traffic: Sequence[int], stages: int) -> None:
        self.traffic, self.stages, self.count = traffic, stages, len(times)
        self.until = [0, *accumulate(times)]  # the time of all before each position

    def slowest(self) -> int:
        """The least time that the slowest stage can take."""
        low, high = -(-self.until[-1] // self.stages), self.until[-1]
        while low < high:
            middle = (low + high) // 2
            if self.fits(middle):
                high = middle
            else:
                low = middle + 1
        return low

    def fits(self, limit: int) -> bool:
        """Whether there are stages of at most this time: each takes what it can."""
        at = 0
        for _ in range(self.stages):
            end = bisect_left(self.until, self.until[at] + limit + 1) - 1
            if end == self.count:
                return True
            at = end
        return False

    def fewest(self, limit: int) -> tuple[float, tuple[int, ...]]:
        """The fewest bytes that cross between stages of at most this time, and such cuts.

        By dynamic programming over positions: of each number of stages that end at a position, the best beginning of
        the last one lies in a window that only moves on.
        """
        until, count = self.until, self.count
        before = [0.0] + [float("inf")] * count  # the bytes of the stages so far, by where the last one ends
        chosen: list[list[int]] = []
        for _ in range(self.stages):
            after, begins = [float("inf")] * (count + 1), [0] * (count + 1)
            window: deque[tuple[float, int]] = deque()  # bytes and beginnings, each more than the one before
            for end in range(1, count + 1):
                begin = end - 1
                bytes_there = before[begin] + (self.traffic[begin] if begin else 0)
                while window and window[-1][0] >= bytes_there:
                    window.pop()
                window.append((bytes_there, begin))
                while window and until[end] - until[window[0][1]] > limit:
                    window.popleft()
                if window:
                    after[end], begins[end] = window[0]
            before = after
            chosen.append(begins)
        cuts, at = list[int](), count
        for begins in reversed(chosen[1:]):
            at = begins[at]
            cuts.append(at)
        return before[count], tuple(reversed(cuts))

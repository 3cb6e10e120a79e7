"""Abstract memory for the verifier: which bytes of which value lie where. Imports nothing of the planner."""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple


class Content(NamedTuple):
    """What a stretch of memory holds: byte k of the value is at address `base` + k.

    Attributes:
        end: address after the last byte of the stretch.
        value: index, or -1 for the rubbish that a workspace leaves.
        base: address at which the value's first byte is or would be.
        step: of the workspace that left the rubbish.
    """

    end: int
    value: int
    base: int
    step: int = -1


class Memory:
    """Disjoint stretches of one region, sorted by address."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._contents: list[Content] = []

    def write(self, start: int, content: Content) -> None:
        """Replace whatever lies in [start, content.end)."""
        starts, contents = self._starts, self._contents
        first = bisect_right(starts, start)
        new_starts, new_contents = [start], [content]
        if first and contents[first - 1].end > start:
            first -= 1
            if starts[first] < start:
                new_starts.insert(0, starts[first])
                new_contents.insert(0, contents[first]._replace(end=start))
        last = first
        while last < len(starts) and starts[last] < content.end:
            last += 1
        if last > first and contents[last - 1].end > content.end:
            new_starts.append(content.end)
            new_contents.append(contents[last - 1])
        starts[first:last] = new_starts
        contents[first:last] = new_contents

    def read(self, start: int, end: int) -> list[tuple[int, int, Content | None]]:
        """What lies in [start, end): (start, end, content) in order, None where nothing was ever written."""
        pieces: list[tuple[int, int, Content | None]] = []
        i = max(bisect_right(self._starts, start) - 1, 0)
        at = start
        while at < end:
            if i >= len(self._starts) or self._starts[i] >= end:
                pieces.append((at, end, None))
                break
            if self._starts[i] > at:
                pieces.append((at, self._starts[i], None))
                at = self._starts[i]
            content = self._contents[i]
            if content.end > at:
                pieces.append((at, min(content.end, end), content))
                at = min(content.end, end)
            i += 1
        return pieces

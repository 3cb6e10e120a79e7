"""What a step takes of a memory, and the largest count that fits."""

from __future__ import annotations

from collections.abc import Callable

from foreplan.base.outside import REST
from foreplan.compiler.compiled import Compiled
from foreplan.graph import Graph
from foreplan.lower.targets import engine_info

BISECT = 3  # consecutive answers on one side, after which the limit is sought in the middle
FARTHEST = 16  # the next count tried is at most this many times one that fits


def batch_of(graph: Graph) -> int | None:
    """The batch of a model: the extent of the first axis of every input without a default; None where they differ."""
    given = [value for value in graph.inputs if value.init is None]
    extents = {value.type.shape[0] if value.type.shape else None for value in given}
    return extents.pop() if len(extents) == 1 else None


def needed_bytes(compiled: Compiled, memory: int) -> int:
    """What a step takes of a memory, to find a batch by: without the rest of the arena's last page, since that does not
    grow with the batch; and yet above the memory where the step does not fit.
    """
    counted = compiled.counted_bytes
    rest = sum(part.nbytes for part in compiled.memory.outside if part.name == REST)
    smooth = counted - rest if engine_info(compiled.program.target).on_card else counted
    return smooth if counted <= memory else max(smooth, memory + 1)


def largest(needed: Callable[[int], int], memory: int, first: int = 1, fixed: int = 0) -> int:
    """The largest count (of samples, say) that fits, if a larger count never needs less; else a count that fits,
    followed by one that does not.

    The bytes needed grow nearly in proportion to the count. So the next count tried is where a straight line through
    the known counts meets the memory. Bisection takes over if the tries stay on one side (as in the Illinois form of
    regula falsi: Dowell and Jarratt, BIT 1971).

    Args:
        needed: the bytes that a count needs: at most `memory` where the count fits.
        memory: bytes available.
        first: the count to try first.
        fixed: about the bytes that every count needs.

    Returns:
        0 where not even one fits.
    """
    low, high = (0, min(fixed, memory)), None
    count, streak, fitted = first, 0, None
    while True:
        nbytes = needed(count)
        streak = streak + 1 if (nbytes <= memory) is fitted else 1
        fitted = nbytes <= memory
        if fitted:
            low = count, nbytes
        else:
            high = count, nbytes
        if high is not None and high[0] - low[0] <= 1:
            return low[0]
        if high is None:
            grown = nbytes - fixed
            guess = (memory - fixed) * count // grown if grown > 0 else FARTHEST * count
            count = min(max(guess, count + 2 ** max(streak - 2, 0)), FARTHEST * count)
        elif streak >= BISECT:
            count = (low[0] + high[0]) // 2
        else:
            line = low[0] + (memory - low[1]) * (high[0] - low[0]) // (high[1] - low[1])
            count = min(max(line, low[0] + 1), high[0] - 1)

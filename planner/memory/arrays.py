"""Problem arrays: the actions and values of a problem as integers, for compiled loops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from foreplan.base.units import align_up
from foreplan.planner.memory.bounds import granularities, may_lie_within
from foreplan.planner.problem import Action, Problem, Role
from foreplan.planner.rows import array, flat, slices

INPUT, STORED = 1, 2  # values that are there when a step begins; stored ones stay throughout


class Arrays(NamedTuple):
    """Actions and values as the problem numbers them; `_at` arrays have one entry more: slices.

    Attributes:
        read_at, reads: values that each action reads.
        write_at, writes: values that it writes.
        share_at, share_write, share_read, share_bytes: which of its writes may share how many bytes with which of its
            reads that nobody needs later, by positions, in the order in which they are taken. Each write takes the
            bytes of one read; a whole shares bytes with each of its parts, and -1 less the read stands for it.
        contested: whether the order in which an action's shares are taken does not find the most bytes.
        workspace: bytes on the device while an action runs.
        size: bytes on the device of each value, rounded; 0 for next contents at home and on the host.
        there: INPUT or STORED where a value is there from the start, else 0.
        output: whether it must be there at the end.
    """

    read_at: np.ndarray
    reads: np.ndarray
    write_at: np.ndarray
    writes: np.ndarray
    share_at: np.ndarray
    share_write: np.ndarray
    share_read: np.ndarray
    share_bytes: np.ndarray
    contested: np.ndarray
    workspace: np.ndarray
    size: np.ndarray
    there: np.ndarray
    output: np.ndarray


def problem_arrays(problem: Problem) -> Arrays:
    """The arrays of a problem."""
    grain = granularities(problem)
    on_device = [region.on_device for region in problem.regions]
    values, actions = problem.values, problem.actions
    size = [align_up(v.nbytes, grain[v.region]) if v.home < 0 and on_device[v.region] else 0 for v in values]
    shares = [_shares(problem, action, size) for action in actions]
    share_write, share_read, share_bytes = (array(share[i] for row in shares for share in row) for i in range(3))
    return Arrays(
        slices([a.reads for a in actions]),
        flat(a.reads for a in actions),
        slices([a.writes for a in actions]),
        flat(a.writes for a in actions),
        slices(shares),
        share_write,
        share_read,
        share_bytes,
        array(map(is_contested, shares)),
        array(align_up(a.workspace, grain[a.workspace_region]) * on_device[a.workspace_region] for a in actions),
        array(size),
        array({Role.INPUT: INPUT, Role.STORED: STORED}.get(v.role, 0) for v in values),
        array(v.role is Role.OUTPUT for v in values),
    )


def stay(p: Arrays) -> np.ndarray:
    """Of each value, whether it is there when the step ends, bool[values]: stored ones and outputs."""
    return (p.there == STORED) | (p.output != 0)


def _shares(problem: Problem, action: Action, size: Sequence[int]) -> list[tuple[int, int, int]]:
    """What writes of an action may share with its reads: (write, or -1 less the part, read, bytes), the largest first.

    A write that must take the bytes of a read is the only one that may.
    """
    values, found = problem.values, []
    required = [pair for pair in action.overwrites if pair.required and size[action.writes[pair.write]]]
    must = {pair.write: pair.read for pair in required}
    for pair in action.overwrites:
        new, old = action.writes[pair.write], action.reads[pair.read]
        free = size[new] and values[old].home < 0 and values[old].role is not Role.STORED
        taken = must.get(pair.write, pair.read) != pair.read or (not pair.required and pair.read in must.values())
        if free and not taken:
            found.append((pair.write, pair.read, size[new]))
    for part in action.parts:
        if may_lie_within(problem, action, part) and part.read not in must.values():
            found.append((-1 - part.read, part.read, size[action.reads[part.read]]))
    return sorted(found, key=lambda share: (-share[2], share[0]))


def is_contested(shares: Sequence[tuple[int, int, int]]) -> bool:
    """Whether a write that may take one of several reads may leave another write without one."""
    writes, reads = Counter(write for write, _, _ in shares), Counter(read for _, read, _ in shares)
    return any(writes[write] > 1 and reads[read] > 1 for write, read, _ in shares)

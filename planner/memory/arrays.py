"""Problem arrays: the actions and values of a problem as integers, for compiled loops."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from foreplan.planner.memory.bounds import granularities
from foreplan.planner.problem import ALIGNMENT, Problem, Role
from foreplan.planner.rows import array, flat, slices
from foreplan.units import align_up

INPUT, STORED = 1, 2  # values that are there when a step begins; stored ones stay throughout


class Arrays(NamedTuple):
    """Actions and values as the problem numbers them; `_at` arrays have one entry more: slices.

    Attributes:
        read_at, reads: values that each action reads.
        write_at, writes: values that it writes.
        pair_at, pair_write, pair_read, pair_required: its overwrites that change the live bytes, by their positions in
            its writes and reads: required ones first, then in the order in which they are tried.
        part_at, part_write, part_read, part_offset: reads that may be made in place within a write, by positions, and
            the byte of the write at which each begins; none for writes at home.
        workspace: bytes on the device while an action runs.
        size: bytes on the device of each value, rounded; 0 for next contents at home and on the host.
        nbytes: plain size of each value.
        rounded: the same, rounded to the alignment of buffers.
        alignment: of each value.
        there: INPUT or STORED where a value is there from the start, else 0.
        output: whether it must be there at the end.
    """

    read_at: np.ndarray
    reads: np.ndarray
    write_at: np.ndarray
    writes: np.ndarray
    pair_at: np.ndarray
    pair_write: np.ndarray
    pair_read: np.ndarray
    pair_required: np.ndarray
    part_at: np.ndarray
    part_write: np.ndarray
    part_read: np.ndarray
    part_offset: np.ndarray
    workspace: np.ndarray
    size: np.ndarray
    nbytes: np.ndarray
    rounded: np.ndarray
    alignment: np.ndarray
    there: np.ndarray
    output: np.ndarray


def problem_arrays(problem: Problem) -> Arrays:
    """The arrays of a problem."""
    grain = granularities(problem)
    on_device = [region.on_device for region in problem.regions]
    values, actions = problem.values, problem.actions
    pairs = [_pairs(problem, index) for index in range(len(actions))]
    pair_write, pair_read, pair_required = (array(pair[i] for row in pairs for pair in row) for i in range(3))
    parts = [[part for part in a.parts if values[a.writes[part.write]].home < 0] for a in actions]
    return Arrays(
        slices([a.reads for a in actions]),
        flat(a.reads for a in actions),
        slices([a.writes for a in actions]),
        flat(a.writes for a in actions),
        slices(pairs),
        pair_write,
        pair_read,
        pair_required,
        slices(parts),
        array(part.write for row in parts for part in row),
        array(part.read for row in parts for part in row),
        array(part.offset for row in parts for part in row),
        array(align_up(a.workspace, grain[a.workspace_region]) * on_device[a.workspace_region] for a in actions),
        array(align_up(v.nbytes, grain[v.region]) if v.home < 0 and on_device[v.region] else 0 for v in values),
        array(v.nbytes for v in values),
        array(align_up(v.nbytes, ALIGNMENT) for v in values),
        array(v.alignment for v in values),
        array({Role.INPUT: INPUT, Role.STORED: STORED}.get(v.role, 0) for v in values),
        array(v.role is Role.OUTPUT for v in values),
    )


def stay(p: Arrays) -> np.ndarray:
    """Of each value, whether it is there when the step ends, bool[values]: stored ones and outputs."""
    return (p.there == STORED) | (p.output != 0)


def _pairs(problem: Problem, index: int) -> list[tuple[int, int, int]]:
    """Overwrites of an action that change the live bytes, by the rules of `alias_sets.merge`: (write, read,
    required).
    """
    action, values = problem.actions[index], problem.values
    required, optional = [], []
    for i, pair in enumerate(action.overwrites):
        new, old = values[action.writes[pair.write]], values[action.reads[pair.read]]
        if new.home < 0 and pair.required:
            required.append((pair.write, pair.read, 1))
        elif new.home < 0 and old.home < 0:
            optional.append((-new.nbytes, i, (pair.write, pair.read, 0)))
    return required + [pair for _, _, pair in sorted(optional)]

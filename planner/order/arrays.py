"""What the search for orders needs of a problem, as integer arrays for compiled loops."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from foreplan.planner.effort import USUAL
from foreplan.planner.memory.arrays import INPUT, STORED, Arrays, problem_arrays
from foreplan.planner.order.dependences import Dependences
from foreplan.planner.problem import ALIGNMENT, Action, Problem
from foreplan.planner.rows import array, flat, slices
from foreplan.units import align_up

STAYS = 1 << 40  # readers of what nothing frees


class OrderArrays(NamedTuple):
    """Arrays over nodes (positions in a dependence graph) and values; `_at` arrays have one entry more: slices.

    Attributes:
        problem: its actions and values.
        action: of each node.
        before_at, before: nodes that must run before each node, each once.
        after_at, after: nodes that must run after it, each once.
        loose: whether a node has a write that would hold bytes of a read and not use them.
        readers: how many nodes read each value; more than there can be of one that stays to the end.
        event_at, events: of each patient node, those that must follow it or read what it reads; none for the others.
            While it frees nothing, it may as well wait until one of them comes next: it then needs no more than that
            one does.
        base: bytes of stored values, which live throughout.
        given: bytes of inputs that some node reads.
        unread: bytes of inputs that none reads: they live through the first step.
    """

    problem: Arrays
    action: np.ndarray
    before_at: np.ndarray
    before: np.ndarray
    after_at: np.ndarray
    after: np.ndarray
    loose: np.ndarray
    readers: np.ndarray
    event_at: np.ndarray
    events: np.ndarray
    base: int
    given: int
    unread: int


def order_arrays(problem: Problem, graph: Dependences, most_readers: int = USUAL.order.readers) -> OrderArrays | None:
    """The arrays of a dependence graph; None where two nodes write the same value, so that what lives between depends
    on which of them ran last.

    Args:
        most_readers: of what a node reads, for it to count as patient: keeps this near-linear.
    """
    actions = [problem.actions[index] for index in graph.actions]
    written = [v for a in actions for v in a.writes]
    if len(set(written)) < len(written):
        return None
    p = problem_arrays(problem)
    stays = (p.there == STORED) | (p.output > 0)
    read = np.array([v for a in actions for v in a.reads], np.int64)
    readers = np.bincount(read, minlength=len(problem.values)).astype(np.int64)
    before = [sorted(set(nodes)) for nodes in graph.before]
    after = [sorted(set(nodes)) for nodes in graph.after]
    mortal = [[v for v in a.reads if not stays[v]] for a in actions]
    lasting = [stays[v] or readers[v] > 0 for v in range(len(problem.values))]
    workspace = [int(p.workspace[index]) for index in graph.actions]
    events = _events(actions, mortal, after, workspace, lasting, p.size.tolist(), most_readers)
    inputs = p.there == INPUT
    return OrderArrays(
        p,
        array(graph.actions),
        slices(before),
        flat(before),
        slices(after),
        flat(after),
        array(_is_loose(problem, action, stays) for action in actions),
        np.where(stays, STAYS, readers),
        slices(events),
        flat(events),
        int(p.size[p.there == STORED].sum()),
        int(p.size[inputs & (readers > 0)].sum()),
        int(p.size[inputs & (readers == 0)].sum()),
    )


def _is_loose(problem: Problem, action: Action, stays: np.ndarray) -> bool:
    pairs = [
        (problem.values[action.reads[pair.read]], problem.values[action.writes[pair.write]])
        for pair in action.overwrites
        if not pair.required and not stays[action.reads[pair.read]]
    ]
    return any(align_up(old.nbytes, ALIGNMENT) != align_up(new.nbytes, ALIGNMENT) for old, new in pairs if new.home < 0)


def _events(
    actions: list[Action],
    reads: list[list[int]],
    after: list[list[int]],
    workspace: list[int],
    stays: list[bool],
    size: list[int],
    most_readers: int,
) -> list[list[int]]:
    """What patient nodes wait for; nothing for others.

    A node is patient if all that it writes stays and its workspace is no more than what each of those that it waits
    for needs beyond what lives before, whatever is in place.
    """
    coreaders: dict[int, list[int]] = {}
    for node, row in enumerate(reads):
        for v in row:
            coreaders.setdefault(v, []).append(node)
    least = []
    for action, ws in zip(actions, workspace):
        paired = {action.writes[pair.write] for pair in action.overwrites}
        least.append(ws + sum(size[v] for v in action.writes if v not in paired))
    events: list[list[int]] = []
    for node, action in enumerate(actions):
        others: set[int] = set()
        lasting = all(stays[v] or not size[v] for v in action.writes)
        if lasting and sum(len(coreaders[v]) for v in reads[node]) <= most_readers:
            others.update(after[node])
            others.update(other for v in reads[node] for other in coreaders[v] if other != node)
        patient = workspace[node] <= min((least[other] for other in others), default=-1)
        events.append(sorted(others) if patient else [])
    return events

"""A problem as integer arrays, for the compiled search for orders."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from foreplan.planner.effort import USUAL
from foreplan.planner.memory.arrays import INPUT, STORED, Arrays, problem_arrays, stay
from foreplan.planner.order.dependences import Dependences
from foreplan.planner.problem import Problem
from foreplan.planner.rows import array, flat, slices

STAYS = 1 << 40  # number of readers of a value that nothing frees


class OrderArrays(NamedTuple):
    """Arrays over nodes (positions in a dependence graph) and values; `_at` arrays have one entry more: slices.

    Attributes:
        problem: its actions and values.
        action: of each node.
        before_at, before: nodes that must run before each node, each once.
        after_at, after: nodes that must run after it, each once.
        readers: how many nodes read each value; STAYS for one that stays to the end.
        event_at, events: for each patient node, the nodes that must follow it or read a value that it reads; none for
            other nodes. While a patient node frees nothing, it may wait until one of its events comes next: it needs no
            more bytes than that event.
        base: bytes of stored values, which live throughout.
        given: bytes of inputs that some node reads.
        unread: bytes of inputs that no node reads: they are there when the step begins, and gone when a node runs.
    """

    problem: Arrays
    action: np.ndarray
    before_at: np.ndarray
    before: np.ndarray
    after_at: np.ndarray
    after: np.ndarray
    readers: np.ndarray
    event_at: np.ndarray
    events: np.ndarray
    base: int
    given: int
    unread: int


def order_arrays(problem: Problem, graph: Dependences, most_readers: int = USUAL.order.readers) -> OrderArrays | None:
    """The arrays of a dependence graph; None where two nodes write the same value: which values live would
    depend on which of them ran last.

    Args:
        most_readers: the values that a patient node reads have at most this many readers; keeps this near-linear.
    """
    actions = [problem.actions[index] for index in graph.actions]
    written = [v for a in actions for v in a.writes]
    if len(set(written)) < len(written):
        return None
    p = problem_arrays(problem)
    stays = stay(p)
    read = np.array([v for a in actions for v in a.reads], np.int64)
    readers = np.bincount(read, minlength=len(problem.values)).astype(np.int64)
    before = [sorted(set(nodes)) for nodes in graph.before]
    after = [sorted(set(nodes)) for nodes in graph.after]
    events = _events(p, graph, after, (stays | (readers > 0) | (p.size == 0)).tolist(), most_readers)
    inputs = p.there == INPUT
    return OrderArrays(
        p,
        array(graph.actions),
        slices(before),
        flat(before),
        slices(after),
        flat(after),
        np.where(stays, STAYS, readers),
        slices(events),
        flat(events),
        int(p.size[p.there == STORED].sum()),
        int(p.size[inputs & (readers > 0)].sum()),
        int(p.size[inputs & (readers == 0)].sum()),
    )


def hills(p: Arrays, graph: Dependences) -> list[int]:
    """The least bytes that each node needs beyond those that live before it: all that may share bytes does."""
    fresh = p.size[p.writes]
    action = np.repeat(np.arange(len(p.workspace)), np.diff(p.share_at))
    whole = p.share_write < 0
    fresh[p.write_at[action[~whole]] + p.share_write[~whole]] = 0
    ends = np.concatenate([[0], np.cumsum(fresh)])[p.write_at]
    parts = np.bincount(action[whole], p.share_bytes[whole], len(p.workspace)).astype(np.int64)
    return (p.workspace + np.diff(ends) - parts)[list(graph.actions)].tolist()


def _events(
    p: Arrays, graph: Dependences, after: list[list[int]], remains: list[bool], most_readers: int
) -> list[list[int]]:
    """The nodes that each patient node waits for; none for other nodes.

    A node is patient if all its results remain after it has run, and its workspace is no more than the least bytes
    that each node it waits for needs beyond those that live before.
    """
    stays, least = stay(p).tolist(), hills(p, graph)
    reads = [[v for v in p.reads[p.read_at[a] : p.read_at[a + 1]].tolist() if not stays[v]] for a in graph.actions]
    coreaders: dict[int, list[int]] = {}
    for node, row in enumerate(reads):
        for v in row:
            coreaders.setdefault(v, []).append(node)
    events: list[list[int]] = []
    for node, a in enumerate(graph.actions):
        others: set[int] = set()
        remaining = all(remains[v] for v in p.writes[p.write_at[a] : p.write_at[a + 1]].tolist())
        if remaining and sum(len(coreaders[v]) for v in reads[node]) <= most_readers:
            others.update(after[node])
            others.update(other for v in reads[node] for other in coreaders[v] if other != node)
        patient = p.workspace[a] <= min((least[other] for other in others), default=-1)
        events.append(sorted(others) if patient else [])
    return events

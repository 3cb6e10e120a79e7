"""An order tape: what the search for orders needs of a problem, as integer arrays for compiled loops."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from foreplan.planner.memory.bounds import granularities
from foreplan.planner.order.dependences import Dependences
from foreplan.planner.problem import ALIGNMENT, Action, Problem, Role
from foreplan.planner.rows import array, flat, slices
from foreplan.units import align_up

MOST = 64  # readers of what a node reads, for it to count as patient: keeps the tape near-linear


class OrderTape(NamedTuple):
    """Arrays over nodes (positions in a dependence graph) and values; `_at` arrays have one entry more: slices.

    Attributes:
        before_at, before: nodes that must run before each node, each once.
        after_at, after: nodes that must run after it, each once.
        read_at, reads: values that each node reads and that die with their last reader.
        write_at, writes: values that each node writes.
        pair_at, pair_write, pair_read: writes that may take the bytes of a read, by value: the required ones first,
            then in the order in which they get their chance.
        pair_required: whether it must.
        pair_wasted: bytes of the read that the write would hold and not use.
        loose: whether a node has a pair that wastes bytes.
        workspace: bytes on the device while a node runs.
        size: bytes on the device of each value, rounded; 0 for next contents at home and on the host.
        nbytes: plain size of each value.
        readers: how many nodes read each value.
        kept: whether a value stays to the end.
        event_at, events: of each patient node, those that must follow it or read what it reads; none for the others.
            While it frees nothing, it may as well wait until one of them comes next: it then needs no more than that
            one does.
        base: bytes of stored values, which live throughout.
        given: bytes of inputs that some node reads.
        unread: bytes of inputs that none reads: they live through the first step.
    """

    before_at: np.ndarray
    before: np.ndarray
    after_at: np.ndarray
    after: np.ndarray
    read_at: np.ndarray
    reads: np.ndarray
    write_at: np.ndarray
    writes: np.ndarray
    pair_at: np.ndarray
    pair_write: np.ndarray
    pair_read: np.ndarray
    pair_required: np.ndarray
    pair_wasted: np.ndarray
    loose: np.ndarray
    workspace: np.ndarray
    size: np.ndarray
    nbytes: np.ndarray
    readers: np.ndarray
    kept: np.ndarray
    event_at: np.ndarray
    events: np.ndarray
    base: int
    given: int
    unread: int


def make_order_tape(problem: Problem, graph: Dependences) -> OrderTape | None:
    """The tape of a dependence graph; None where two nodes write the same value, so that what lives between depends
    on which of them ran last.
    """
    grain = granularities(problem)
    on_device = [region.on_device for region in problem.regions]
    values = problem.values
    actions = [problem.actions[index] for index in graph.actions]
    size = [align_up(v.nbytes, grain[v.region]) if v.home < 0 and on_device[v.region] else 0 for v in values]
    mortal = [v.role in (Role.TRANSIENT, Role.INPUT) for v in values]
    written = [v for a in actions for v in a.writes]
    if len(set(written)) < len(written):
        return None
    reads = [[v for v in a.reads if mortal[v]] for a in actions]
    readers = np.bincount(np.array([v for row in reads for v in row], np.int64), minlength=len(values))
    workspace = [align_up(a.workspace, grain[a.workspace_region]) * on_device[a.workspace_region] for a in actions]
    pairs = [_pairs(problem, index) for index in graph.actions]
    before = [sorted(set(nodes)) for nodes in graph.before]
    after = [sorted(set(nodes)) for nodes in graph.after]
    events = _events(actions, reads, after, workspace, [r > 0 or not m for m, r in zip(mortal, readers)], size)
    inputs = [v for v, value in enumerate(values) if value.role is Role.INPUT]
    pair_write, pair_read, pair_required, pair_wasted = (array(p[i] for row in pairs for p in row) for i in range(4))
    return OrderTape(
        slices(before),
        flat(before),
        slices(after),
        flat(after),
        slices(reads),
        flat(reads),
        slices([a.writes for a in actions]),
        array(written),
        slices(pairs),
        pair_write,
        pair_read,
        pair_required,
        pair_wasted,
        array(any(pair[3] for pair in row) for row in pairs),
        array(workspace),
        array(size),
        array(v.nbytes for v in values),
        readers.astype(np.int64),
        array(v.role in (Role.OUTPUT, Role.STORED) for v in values),
        slices(events),
        flat(events),
        sum(size[v] for v, value in enumerate(values) if value.role is Role.STORED),
        sum(size[v] for v in inputs if readers[v]),
        sum(size[v] for v in inputs if not readers[v]),
    )


def _pairs(problem: Problem, index: int) -> list[tuple[int, int, int, int]]:
    """Overwrites that concern the live bytes, by the rules of `alias.merge`: (write, read, required, wasted)."""
    action, values = problem.actions[index], problem.values
    required: list[tuple[int, int, int, int]] = []
    optional: list[tuple[int, int, tuple[int, int, int, int]]] = []
    for i, pair in enumerate(action.overwrites):
        write, read = action.writes[pair.write], action.reads[pair.read]
        new, old = values[write], values[read]
        if new.home >= 0:
            continue
        wasted = align_up(old.nbytes, ALIGNMENT) - align_up(new.nbytes, ALIGNMENT)
        if pair.required:
            required.append((write, read, 1, 0))
        elif old.home < 0 and old.role in (Role.TRANSIENT, Role.INPUT):
            optional.append((-new.nbytes, i, (write, read, 0, wasted)))
    return required + [pair for _, _, pair in sorted(optional)]


def _events(
    actions: list[Action],
    reads: list[list[int]],
    after: list[list[int]],
    workspace: list[int],
    stays: list[bool],
    size: list[int],
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
        if all(stays[v] or not size[v] for v in action.writes) and sum(len(coreaders[v]) for v in reads[node]) <= MOST:
            others.update(after[node])
            others.update(other for v in reads[node] for other in coreaders[v] if other != node)
        patient = workspace[node] <= min((least[other] for other in others), default=-1)
        events.append(sorted(others) if patient else [])
    return events

"""A lower bound of any schedule, recomputation included."""

from __future__ import annotations

from collections.abc import Iterator

from foreplan.planner.candidates import merge_candidates
from foreplan.planner.memory.backwards import Backwards
from foreplan.planner.memory.bounds import DeviceBytes
from foreplan.planner.problem import Problem, Role

# These are no fields of an effort: the bound is computed again when a plan file is read.
HELD = 32  # values that are followed through the step
WORK = 1000  # sets of values whose making is looked at
TARGETS = 8  # moments that are looked back from


def order_bound(problem: Problem, work: int = WORK) -> int:
    """Bytes below which no schedule of the problem's actions goes, even with recomputation.

    In every order, these lie on the device together: stored values always; all inputs when the step begins; all
    outputs when it ends. And when an action that must run does so for the first time: its reads and writes (less what
    may lie in place), its workspace, and the values held meanwhile (`_held`). An action must run if it has an effect,
    or is the only producer of a value that an output or such an action needs.

    What lies there together has been made, one value after the other, while the others were there. So the moments of
    the most bytes are looked back from (`Backwards`).

    Args:
        work: sets of values whose making is looked at. More of them never give a lower bound.
    """
    problem = merge_candidates(problem, [0] * len(problem.actions)).problem
    sizes = DeviceBytes(problem)
    persistent = sizes.total(v for v, value in enumerate(problem.values) if value.role is Role.STORED)
    highest = sizes.total(v for v, value in enumerate(problem.values) if value.role is Role.INPUT)
    moments = sorted(_moments(problem, sizes), key=lambda moment: -moment[0])[:TARGETS]
    back = Backwards(problem, sizes, work)
    highest = max(highest, moments[0][0])
    for _, there in moments:
        highest = back.least(there, highest)
    return persistent + highest


def _moments(problem: Problem, sizes: DeviceBytes) -> Iterator[tuple[int, set[int]]]:
    """Moments that every schedule has: the end of the step, and each first run of an action that must run. Bytes that
    lie there then, and the values that were there just before; stored ones left out.
    """
    outputs = {v for v, value in enumerate(problem.values) if value.role is Role.OUTPUT}
    yield sizes.total(outputs), outputs
    unavoidable = _unavoidable(problem)
    held = _held(problem, unavoidable, sizes)
    for index in unavoidable:
        kept = held.get(index, set())
        reads = {v for v in problem.actions[index].reads if problem.values[v].role is not Role.STORED}
        yield sizes.while_running(problem, index, kept), reads | kept


def _held(problem: Problem, unavoidable: list[int], sizes: DeviceBytes) -> dict[int, set[int]]:
    """By action, the values that every schedule must hold when the action first runs, since they cannot be made later
    or again: inputs, and results of actions with an effect that must precede it. Each is read by some action that must
    follow it. Only the largest such values count, which keeps this near-linear.
    """
    needs = _needs(problem, unavoidable)
    feeds: dict[int, list[int]] = {index: [] for index in unavoidable}
    for index, earlier in needs.items():
        for other in earlier:
            feeds[other].append(index)
    once = [v for v, value in enumerate(problem.values) if value.role is Role.INPUT]
    effects = [index for index in unavoidable if problem.actions[index].effect]
    once += [v for index in effects for v in problem.actions[index].writes if len(problem.producers[v]) == 1]
    largest = sorted((v for v in once if sizes.of[v] and problem.readers[v]), key=lambda v: (-sizes.of[v], v))[:HELD]
    held: dict[int, set[int]] = {}
    for v in largest:
        actions = _reach([earlier for index in problem.readers[v] for earlier in needs.get(index, ())], needs)
        if problem.producers[v]:
            actions &= _reach(feeds[problem.producers[v][0]], feeds)
        for index in actions:
            held.setdefault(index, set()).add(v)
    return held


def _needs(problem: Problem, unavoidable: list[int]) -> dict[int, list[int]]:
    """By unavoidable action, those that must have run before it: the only producers of what it reads."""
    must = set(unavoidable)
    needs: dict[int, list[int]] = {}
    for index in unavoidable:
        makers = [_first_producers(problem, v) for v in problem.actions[index].reads]
        needs[index] = [maker[0] for maker in makers if len(maker) == 1 and maker[0] in must]
    return needs


def _reach(starts: list[int], edges: dict[int, list[int]]) -> set[int]:
    """The nodes that can be reached along edges, the starts included."""
    seen = set(starts)
    stack = list(starts)
    while stack:
        for other in edges[stack.pop()]:
            if other not in seen:
                seen.add(other)
                stack.append(other)
    return seen


def _unavoidable(problem: Problem) -> list[int]:
    """Actions that every schedule runs, ascending."""
    must = {index for index, action in enumerate(problem.actions) if action.effect}
    needed = [v for v, value in enumerate(problem.values) if value.role is Role.OUTPUT]
    for index in sorted(must):
        needed += problem.actions[index].reads
    while needed:
        makers = _first_producers(problem, needed.pop())
        if len(makers) == 1 and makers[0] not in must:
            must.add(makers[0])
            needed += problem.actions[makers[0]].reads
    return sorted(must)


def _first_producers(problem: Problem, v: int) -> tuple[int, ...]:
    """The actions that can write a value for the first time: all but the copy that brings it back to the device."""
    back = problem.round_trips.get(v, (-1, -1))[1]
    return tuple(index for index in problem.producers[v] if index != back)

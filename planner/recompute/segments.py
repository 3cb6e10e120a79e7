"""Segments recomputed by hand: what a segment of the forward pass computes is dropped when the forward pass has left
it, and computed once more for its backward pass.

The caller says which actions make a segment; everything else follows from reads and writes. What the forward pass reads
outside a segment is its output and stays; so does what it reads from outside. An action of a segment that only the
backward pass needs (a mask, say) runs in the recomputation alone. An effect runs once, in the forward pass.

References: Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174, for recomputing segments;
`torch.utils.checkpoint` for what becomes of a segment's inputs, outputs and inner values.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from foreplan.planner.driver import find_base
from foreplan.planner.memory.order_bound import order_bound
from foreplan.planner.order.dependences import Dependences, dependences
from foreplan.planner.order.heuristics import HEURISTICS
from foreplan.planner.placement.layout import Schedule, arena_bytes, assemble, lay_out, schedule
from foreplan.planner.plan import Plan
from foreplan.planner.problem import Action, Problem, Role
from foreplan.planner.recompute.arrays import may_run_again
from foreplan.planner.recompute.front import Base
from foreplan.planner.recompute.schedules import late_updates
from foreplan.planner.verify.verifier import verify

WAYS = ("at once", "late")
_ONCE = -1  # no segment: as the order has it


def plan_segments(problem: Problem, segments: Sequence[Collection[int]], forward: Collection[int]) -> Plan:
    """The lowest plan found that recomputes segments and nothing else; verified.

    Every order of the planner is tried, with each segment computed again in two ways: as a whole, when its backward
    pass begins; or action by action, each as late as possible. The second keeps less where a value is large and read
    late, and more where its inputs are larger still. Both run the same actions equally often.

    Args:
        segments: actions of each, disjoint; those with an effect are not run again.
        forward: actions of the whole forward pass: what the loss and the outputs depend on.

    Raises:
        PlanError: the problem allows no plan.
    """
    base = find_base(problem)
    sets, ahead = [frozenset(segment) for segment in segments], frozenset(forward)
    candidates: list[Schedule] = []
    for order, name in _orders(problem, base).items():
        for way in WAYS:
            again = recomputed(problem, order, sets, ahead, late=way == "late")
            candidates.append(schedule(problem, f"{name}, segments {way}", again))
    # An order may begin the backward pass before the forward pass has left a segment, where it needs nothing of it (in
    # linear networks); then nothing is recomputed, which is not what was asked for.
    longest = max(len(candidate.order) for candidate in candidates)
    candidates = [candidate for candidate in candidates if len(candidate.order) == longest]
    candidates.sort(key=lambda candidate: candidate.bound)
    best, layout = candidates[0], lay_out(problem, candidates[0])
    for candidate in candidates[1:]:
        if candidate.bound >= arena_bytes(problem, layout.heights):
            break
        trial = lay_out(problem, candidate)
        if arena_bytes(problem, trial.heights) < arena_bytes(problem, layout.heights):
            best, layout = candidate, trial
    stages = (*base.stages, ("segments", arena_bytes(problem, layout.heights)))
    found = assemble(problem, best, layout, order_bound(problem), stages)
    verify(found, problem)
    return found


def _orders(problem: Problem, base: Base) -> dict[tuple[int, ...], str]:
    """Orders that run each action once, with their names; updates that free nothing are late where they may be."""
    graph = dependences(problem)
    named = [(base.schedule.order, base.schedule.name)]
    named += [(tuple(heuristic(problem, graph)), name) for name, heuristic in HEURISTICS.items()]
    found: dict[tuple[int, ...], str] = {}
    for order, name in named:
        late = tuple(late_updates(problem, order))
        found.setdefault(late if _obeys(graph, late) else order, name)
    return found


def _obeys(graph: Dependences, order: Sequence[int]) -> bool:
    place = {action: position for position, action in enumerate(order)}
    at = [place[action] for action in graph.actions]
    return all(at[earlier] < at[node] for node, before in enumerate(graph.before) for earlier in before)


def recomputed(
    problem: Problem,
    order: Sequence[int],
    segments: Sequence[frozenset[int]],
    forward: frozenset[int],
    *,
    late: bool = False,
) -> list[int]:
    """An order that computes segments again, from one that runs each action once.

    Args:
        order: actions, each once.
        segments: as `plan_segments` has them.
        forward: likewise.
        late: every action again as late as something needs its results, instead of whole segments at once.
    """
    steps = _Order(problem, order)
    elsewhere = frozenset().union(forward, *segments)
    left_out: set[int] = set()
    again: dict[int, list[tuple[int, int]]] = {}
    for number, segment in enumerate(segments):
        part = _Segment(steps, segment, elsewhere - segment)
        left_out |= segment - part.first
        for place, actions in part.places(late=late).items():
            again.setdefault(place, []).extend((action, number) for action in actions)
    made: list[tuple[int, int]] = []
    for position, action in enumerate(order):
        made += again.get(position, [])
        if action not in left_out:
            made.append((action, _ONCE))
    return _with_inputs_again(problem, made)


def _with_inputs_again(problem: Problem, made: Sequence[tuple[int, int]]) -> list[int]:
    """An order in which nothing is kept for segments where an action that the order does not have makes it again:
    weights that are gathered from other ranks.

    Args:
        made: actions, with the segment that runs them again, or `_ONCE`.
    """
    once = {action for action, _ in made}
    other = {
        value: index
        for index, action in enumerate(problem.actions)
        if index not in once and len(action.writes) == 1 and may_run_again(problem, action)
        for value in action.writes
        if not any(i in once and may_run_again(problem, problem.actions[i]) for i in problem.producers[value])
    }
    last = {v: at for at, (index, by) in enumerate(made) if by == _ONCE for v in problem.actions[index].reads}
    reader: dict[int, int] = {}
    gone: set[int] = set()
    found: list[int] = []
    for at, (index, by) in enumerate(made):
        action = problem.actions[index]
        for value in action.reads:
            maker, before = other.get(value, -1), reader.get(value, _ONCE)
            reader[value] = by
            dropped = maker >= 0 and before != by and at > last.get(value, -1)
            if dropped and gone.isdisjoint(problem.actions[maker].reads):
                found.append(maker)
        found.append(index)
        gone.update(_taken(action), (problem.values[value].home for value in action.writes))
        gone.difference_update(action.writes)
    return found


class _Order:
    """An order, indexed.

    Attributes:
        order: actions, each once.
        position: of each action in it.
        made: by value, the position of the action that writes it.
        readers: by value, the actions of the order that read it.
        gone: by value, the position of the action that must take its bytes; the length of the order for none.
    """

    def __init__(self, problem: Problem, order: Sequence[int]) -> None:
        self.problem, self.order = problem, order
        self.position = {action: position for position, action in enumerate(order)}
        self.made: dict[int, int] = {}
        self.readers: dict[int, list[int]] = {}
        self.gone: dict[int, int] = {}
        for position, index in enumerate(order):
            action = problem.actions[index]
            self.made.update(dict.fromkeys(action.writes, position))
            for value in action.reads:
                self.readers.setdefault(value, []).append(index)
            homes = [problem.values[value].home for value in action.writes if problem.values[value].home >= 0]
            self.gone.update(dict.fromkeys([*_taken(action), *homes], position))


def _taken(action: Action) -> list[int]:
    """The values that an action reads and must take the bytes of."""
    return [action.reads[pair.read] for pair in action.overwrites if pair.required]


class _Segment:
    """One segment in an order.

    Attributes:
        run: its actions, in order.
        maker: by value that it computes, the action that does.
        inner: values that go when the forward pass has left the segment; others are outputs, or cannot be had again.
        first: actions that run in the forward pass: what outputs, effects and early readers need.
        left: the position at which the forward pass leaves it.
        again: actions that run in the recomputation, in order: what the backward pass needs.
    """

    def __init__(self, steps: _Order, actions: frozenset[int], outside: frozenset[int]) -> None:
        """A segment of some actions; `outside` are those of the rest of the forward pass and of other segments."""
        self.steps, self.actions, self.outside = steps, actions, outside
        self.run = [action for action in steps.order if action in actions]
        self.maker = {value: index for index in self.run for value in steps.problem.actions[index].writes}
        outputs = {value for value in self.maker if self._is_output(value)}
        self.inner = self.maker.keys() - outputs
        self.first = self._needed({self.maker[value] for value in outputs}, self.maker.keys())
        self.left = -1
        self.again = self._recomputable()
        effects = {index for index in self.run if steps.problem.actions[index].effect}
        self.first |= self._needed(effects, self.maker.keys())

    def _is_output(self, value: int) -> bool:
        found = self.steps.problem.values[value]
        read = self.steps.readers.get(value, ())
        return found.role is Role.OUTPUT or found.home >= 0 or not self.outside.isdisjoint(read)

    def _reads(self, value: int) -> list[int]:
        """Positions at which actions that are not the segment's read a value."""
        return [self.steps.position[index] for index in self.steps.readers.get(value, ()) if index not in self.actions]

    def _needed(self, actions: set[int], values: Collection[int]) -> set[int]:
        """Actions, and those of the segment that make what they read of some values."""
        found, stack = set(actions), list(actions)
        while stack:
            for value in self.steps.problem.actions[stack.pop()].reads:
                if value in values and (maker := self.maker[value]) not in found:
                    found.add(maker)
                    stack.append(maker)
        return found

    def _recomputable(self) -> list[int]:
        """What the backward pass needs and can have again; the rest is kept from the forward pass."""
        steps = self.steps
        while True:
            self.left = max((steps.position[action] for action in self.first), default=-1)
            early = {self.maker[value] for value in self.inner if any(p < self.left for p in self._reads(value))}
            self.first |= self._needed(early, self.maker.keys())
            late = {self.maker[value] for value in self.inner if any(p > self.left for p in self._reads(value))}
            again = self._needed(late, self.inner)
            stuck = {index for index in again if not self._may_run_again(index)}
            if not stuck:
                return [index for index in self.run if index in again]
            self.first |= self._needed(stuck, self.maker.keys())
            self.inner -= {value for index in stuck for value in steps.problem.actions[index].writes}

    def _may_run_again(self, index: int) -> bool:
        """Whether an action leaves all else as it is, and finds what it reads when the segment has been left.

        It may take the bytes of what the segment computes again as well (a sum that is added to in place).
        """
        action, values = self.steps.problem.actions[index], self.steps.problem.values
        if action.effect or not self.inner.issuperset(_taken(action)):
            return False
        if any(values[value].home >= 0 for value in action.writes) or self._limit(index) <= self.left:
            return False
        return all(value in self.inner or self.steps.made.get(value, -1) <= self.left for value in action.reads)

    def _limit(self, index: int) -> int:
        """The position before which an action must run, so that what it reads is there: what is gone before the forward
        pass leaves the segment can be had again if it is the segment's own.
        """
        end = len(self.steps.order)
        gone = [(value, self.steps.gone.get(value, end)) for value in self.steps.problem.actions[index].reads]
        return min((at for value, at in gone if at > self.left or value not in self.inner), default=end)

    def _wanted(self) -> dict[int, int]:
        """By action to run again, the position before which it must run."""
        wanted: dict[int, int] = {}
        taken: dict[int, int] = {}  # by value, the position before which its bytes are taken again
        readers: dict[int, list[int]] = {}
        for index in reversed(self.again):
            action = self.steps.problem.actions[index]
            places = [self._limit(index)]
            if index not in self.first and self.steps.position[index] > self.left:
                # It does not run twice: the order has it where what it reads may die early.
                places.append(self.steps.position[index])
            places += [place for value, place in taken.items() if value in action.reads]
            for value in self.inner.intersection(action.writes):
                places += [position for position in self._reads(value) if position > self.left]
                places += [wanted[reader] for reader in readers.get(value, ())]
            wanted[index] = min(places)
            taken.update(dict.fromkeys(_taken(action), wanted[index]))
            for value in action.reads:
                readers.setdefault(value, []).append(index)
        return wanted

    def places(self, *, late: bool) -> dict[int, list[int]]:
        """By position in the order, the actions that run again before the action there."""
        if not self.again:
            return {}
        wanted = self._wanted()
        if not late:
            return {min(wanted.values()): self.again}
        found: dict[int, list[int]] = {}
        for index in self.again:
            found.setdefault(wanted[index], []).append(index)
        return found

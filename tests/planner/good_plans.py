"""Good plans of tiny problems, to be damaged, with what damage asks about them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from foreplan.planner import Plan, Problem, plan, plan_curve, without_reuse
from foreplan.planner.memory.liveness import LiveRanges, live_ranges
from tests.planner.executor import contents
from tests.planner.problems import joined_problem, priced, random_problem, with_round_trips
from tests.planner.training_graphs import random_training


@dataclass(frozen=True)
class Base:
    """A good plan, and when every instance of a value lives in it."""

    problem: Problem
    plan: Plan
    right: list[bytes]
    ranges: LiveRanges
    others: list[int]  # every offset there is

    @classmethod
    def of(cls, problem: Problem, good: Plan) -> Base:
        ranges = live_ranges(problem, [step.action for step in good.steps])
        others = [o for step in good.steps for o in (*step.reads, *step.writes)] + [o for _, o in good.starts] + [0]
        return cls(problem, good, contents(problem), ranges, others)

    def offset(self, instance: int) -> int:
        """Where an instance lies."""
        starts = dict(self.plan.starts)
        if instance < len(starts):
            return starts[self.ranges.values[instance]]
        step = self.ranges.lower[instance]
        return self.plan.steps[step].writes[self.ranges.writes[step].index(instance)]

    def relocated(self, moves: Mapping[int, int]) -> Plan:
        """With instances elsewhere, wherever the plan names them."""
        steps = [
            replace(
                step,
                reads=tuple(moves.get(i, o) for i, o in zip(reads, step.reads)),
                writes=tuple(moves.get(i, o) for i, o in zip(writes, step.writes)),
            )
            for step, reads, writes in zip(self.plan.steps, self.ranges.reads, self.ranges.writes)
        ]
        last = {v: instance for instance, v in enumerate(self.ranges.values)}
        first = {v: instance for instance, v in reversed([*enumerate(self.ranges.values)])}
        starts = tuple((v, moves.get(first[v], o)) for v, o in self.plan.starts)
        ends = tuple((v, moves.get(last[v], o)) for v, o in self.plan.ends)
        return replace(self.plan, steps=tuple(steps), starts=starts, ends=ends)


def bases(seeds: Iterable[int]) -> Iterator[Base]:
    """Good plans: several regions, in place and apart; with recomputation, cheap and deep; with copies
    to the host and back; with joins."""
    for seed in seeds:
        problem = random_problem(seed, 3 + seed % 12)
        good = plan(problem)
        if good.steps:
            yield Base.of(problem, good)
            yield Base.of(problem, without_reuse(good, problem))
        if seed % 2 == 0:
            problem = random_training(seed, 3 + seed % 5)
            curve = plan_curve(problem, thorough=False)
            for index in sorted({0, *range(1, len(curve), 1 + len(curve) // 6)}):
                yield Base.of(problem, curve.plan(index))
            problem = priced(random_problem(seed, 12), seed)
            curve = plan_curve(problem, thorough=False)
            if len(curve) > 1:
                yield Base.of(problem, curve.plan(len(curve) - 1))
        else:
            problem = with_round_trips(random_training(seed, 3 + seed % 5), seed)
            curve = plan_curve(problem, thorough=False)
            for index in range(1, len(curve), 1 + len(curve) // 6):
                yield Base.of(problem, curve.plan(index))
        if seed % 4 == 1:
            problem = joined_problem(seed)
            yield Base.of(problem, plan(problem))

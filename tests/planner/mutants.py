"""Damage to good plans of tiny problems: the kinds, and how each is done; `campaign` tells what it does."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from foreplan.planner import Plan, Problem, Step, plan, plan_curve, separate
from foreplan.planner.liveness import LiveRanges, live_ranges
from tests.planner.executor import contents
from tests.planner.problems import joined_problem, priced, random_problem
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


# Where the plans come from.


def bases(seeds: Iterable[int]) -> Iterator[Base]:
    """Good plans: several regions, in place and apart; with recomputation, cheap and deep; with joins."""
    for seed in seeds:
        problem = random_problem(seed, 3 + seed % 12)
        good = plan(problem)
        if good.steps:
            yield Base.of(problem, good)
            yield Base.of(problem, separate(good, problem))
        if seed % 2 == 0:
            problem = random_training(seed, 3 + seed % 5)
            curve = plan_curve(problem)
            for index in sorted({0, *range(1, len(curve), 1 + len(curve) // 6)}):
                yield Base.of(problem, curve.plan(index))
            problem = priced(random_problem(seed, 12), seed)
            curve = plan_curve(problem)
            if len(curve) > 1:
                yield Base.of(problem, curve.plan(len(curve) - 1))
        if seed % 4 == 1:
            problem = joined_problem(seed)
            yield Base.of(problem, plan(problem))


# Kinds of damage; None where a plan offers no place for it.

Damage = Callable[[random.Random, Base], Plan | None]


def moved(rng: random.Random, offset: int, others: list[int]) -> int:
    """Another offset: a neighbour, or where something else lies."""
    choice = [offset + 64, offset - 64, offset + 4, offset + 256, 0, rng.choice(others), rng.choice(others)]
    return rng.choice(choice)


def _changed(rng: random.Random, base: Base, offsets: tuple[int, ...]) -> tuple[int, ...]:
    i = rng.randrange(len(offsets))
    return (*offsets[:i], moved(rng, offsets[i], base.others), *offsets[i + 1 :])


def _with(base: Base, number: int, **changes: object) -> Plan:
    steps = list(base.plan.steps)
    steps[number] = replace(steps[number], **changes)  # type: ignore[arg-type]
    return replace(base.plan, steps=tuple(steps))


def _resequenced(base: Base, steps: list[Step]) -> Plan:
    return replace(base.plan, steps=tuple(steps))


def _put(rng: random.Random, base: Base, moves: list[tuple[int, int]]) -> Plan | None:
    """One of these moves of a step to the place of another."""
    if not moves:
        return None
    number, place = rng.choice(moves)
    steps = list(base.plan.steps)
    steps.insert(place, steps.pop(number))
    return _resequenced(base, steps)


def _pick(rng: random.Random, base: Base, wanted: Callable[[int], object]) -> int | None:
    """A step for which something holds."""
    found = [number for number in range(len(base.plan.steps)) if wanted(number)]
    return rng.choice(found) if found else None


def _action(base: Base, number: int):  # type: ignore[no-untyped-def]
    return base.problem.actions[base.plan.steps[number].action]


def read_moved(rng: random.Random, base: Base) -> Plan | None:
    """One action looks for what it reads elsewhere."""
    number = _pick(rng, base, lambda n: base.plan.steps[n].reads)
    return None if number is None else _with(base, number, reads=_changed(rng, base, base.plan.steps[number].reads))


def write_moved(rng: random.Random, base: Base) -> Plan | None:
    """One action writes elsewhere than its readers look."""
    number = _pick(rng, base, lambda n: base.plan.steps[n].writes)
    return None if number is None else _with(base, number, writes=_changed(rng, base, base.plan.steps[number].writes))


def buffer_moved(rng: random.Random, base: Base) -> Plan | None:
    """A value lies elsewhere all its life, perhaps on another."""
    instance = rng.randrange(len(base.ranges.values))
    return base.relocated({instance: moved(rng, base.offset(instance), base.others)})


def workspace_moved(rng: random.Random, base: Base) -> Plan | None:
    """An action's scratch memory lies elsewhere, perhaps on a value."""
    number = _pick(rng, base, lambda n: _action(base, n).workspace)
    if number is None:
        return None
    return _with(base, number, workspace=moved(rng, base.plan.steps[number].workspace, base.others))


def start_moved(rng: random.Random, base: Base) -> Plan | None:
    """An input or stored value is put elsewhere when the step begins."""
    at = rng.randrange(len(base.plan.starts))
    v, offset = base.plan.starts[at]
    starts = (*base.plan.starts[:at], (v, moved(rng, offset, base.others)), *base.plan.starts[at + 1 :])
    return replace(base.plan, starts=starts)


def end_moved(rng: random.Random, base: Base) -> Plan | None:
    """An output or stored value is looked for elsewhere when the step ends."""
    if not base.plan.ends:
        return None
    at = rng.randrange(len(base.plan.ends))
    v, offset = base.plan.ends[at]
    return replace(
        base.plan, ends=(*base.plan.ends[:at], (v, moved(rng, offset, base.others)), *base.plan.ends[at + 1 :])
    )


def height_cut(rng: random.Random, base: Base) -> Plan | None:
    """A region is lower than what lies in it."""
    at = rng.randrange(len(base.plan.heights))
    lower = max(base.plan.heights[at] - rng.choice([64, 256]), 0)
    heights = (*base.plan.heights[:at], lower, *base.plan.heights[at + 1 :])
    arena = sum(h for h, region in zip(heights, base.problem.regions) if region.on_device)
    return replace(base.plan, heights=heights, arena_bytes=arena)


def swapped(rng: random.Random, base: Base) -> Plan | None:
    """Two steps run in each other's place."""
    steps = list(base.plan.steps)
    i, j = rng.randrange(len(steps)), rng.randrange(len(steps))
    steps[i], steps[j] = steps[j], steps[i]
    return _resequenced(base, steps)


def dropped(rng: random.Random, base: Base) -> Plan | None:
    """A step does not run."""
    steps = list(base.plan.steps)
    del steps[rng.randrange(len(steps))]
    return _resequenced(base, steps)


def doubled(rng: random.Random, base: Base) -> Plan | None:
    """A step runs once more, at once or later, as it stands."""
    steps = list(base.plan.steps)
    i = rng.randrange(len(steps))
    steps.insert(i + 1 if rng.random() < 0.3 else rng.randint(i + 1, len(steps)), steps[i])
    return _resequenced(base, steps)


def lifespan_cut(rng: random.Random, base: Base) -> Plan | None:
    """The bytes of a value are given to another before it is read for the last time."""
    ranges, values = base.ranges, base.problem.values
    pairs = [
        (old, new)
        for old, v in enumerate(ranges.values)
        for new, w in enumerate(ranges.values)
        if ranges.lower[old] < ranges.lower[new] < ranges.upper[old] - 1
        and values[v].region == values[w].region
        and values[w].home < 0
        and values[v].nbytes
        and values[w].nbytes
    ]
    if not pairs:
        return None
    old, new = rng.choice(pairs)
    unit = values[ranges.values[new]].alignment
    return base.relocated({new: base.offset(old) // unit * unit})


def overwrite_added(rng: random.Random, base: Base) -> Plan | None:
    """A result takes the bytes of what its action reads, which it may not or which is needed later."""
    number = _pick(rng, base, lambda n: base.plan.steps[n].reads and base.plan.steps[n].writes)
    if number is None:
        return None
    step = base.plan.steps[number]
    lawful = {(p.write, p.read) for p in _action(base, number).overwrites if step.reads[p.read] == step.writes[p.write]}
    pairs = [(w, r) for w in range(len(step.writes)) for r in range(len(step.reads)) if (w, r) not in lawful]
    if not pairs:
        return None
    write, read = rng.choice(pairs)
    return base.relocated({base.ranges.writes[number][write]: step.reads[read]})


def wrong_value_read(rng: random.Random, base: Base) -> Plan | None:
    """An action reads a value that is there, but not the one it should."""
    number = _pick(rng, base, lambda n: base.plan.steps[n].reads)
    if number is None:
        return None
    step = base.plan.steps[number]
    at = rng.randrange(len(step.reads))
    there = [
        base.offset(i)
        for i, (low, high) in enumerate(zip(base.ranges.lower, base.ranges.upper))
        if low < number < high and i not in base.ranges.reads[number]
    ]
    if not there:
        return None
    return _with(base, number, reads=(*step.reads[:at], rng.choice(there), *step.reads[at + 1 :]))


def _alike(rng: random.Random, base: Base, number: int) -> int | None:
    """Another action with as many reads and writes."""
    own = base.plan.steps[number].action
    action = base.problem.actions[own]
    shape = len(action.reads), len(action.writes)
    alike = [i for i, a in enumerate(base.problem.actions) if (len(a.reads), len(a.writes)) == shape and i != own]
    return rng.choice(alike) if alike else None


def other_action(rng: random.Random, base: Base) -> Plan | None:
    """A step runs another action over the same bytes."""
    number = rng.randrange(len(base.plan.steps))
    other = _alike(rng, base, number)
    return None if other is None else _with(base, number, action=other)


def _again(base: Base) -> list[int]:
    """Steps that recompute."""
    seen: set[int] = set()
    found = []
    for number, step in enumerate(base.plan.steps):
        if step.action in seen:
            found.append(number)
        seen.add(step.action)
    return found


def wrong_value_recomputed(rng: random.Random, base: Base) -> Plan | None:
    """Where a value is recomputed, another is, or the same from something else."""
    again = _again(base)
    if not again:
        return None
    number = rng.choice(again)
    step = base.plan.steps[number]
    other = _alike(rng, base, number)
    if other is not None and rng.random() < 0.5:
        return _with(base, number, action=other)
    if not step.reads:
        return None
    at = rng.randrange(len(step.reads))
    wrong = rng.choice([o for o in base.others if o != step.reads[at]] or [0])
    return _with(base, number, reads=(*step.reads[:at], wrong, *step.reads[at + 1 :]))


def recomputed_late(rng: random.Random, base: Base) -> Plan | None:
    """A value is recomputed only after an action that reads it."""
    steps, ranges = base.plan.steps, base.ranges
    moves = [
        (number, reader)
        for number in _again(base)
        for reader in range(number + 1, len(steps))
        if set(ranges.writes[number]) & set(ranges.reads[reader])
    ]
    return _put(rng, base, moves)


def update_before_reader(rng: random.Random, base: Base) -> Plan | None:
    """What takes the bytes of a value runs before an action that still reads it."""
    steps, ranges = base.plan.steps, base.ranges
    moves = []
    for number in range(len(steps)):
        action = _action(base, number)
        taken = [base.offset(i) for i in ranges.writes[number]]
        pairs = {action.reads[p.read] for p in action.overwrites if steps[number].reads[p.read] in taken}
        gone = pairs | {base.problem.values[v].home for v in action.writes} - {-1}
        moves += [(number, reader) for reader in range(number) if gone & set(_action(base, reader).reads)]
    return _put(rng, base, moves)


def parts_exchanged(rng: random.Random, base: Base) -> Plan | None:
    """A part is written where another part of the same table belongs, or next to where it belongs."""
    number = _pick(rng, base, lambda n: _action(base, n).parts)
    if number is None:
        return None
    first, second = rng.sample(base.ranges.reads[number], 2)
    if rng.random() < 0.5:
        return base.relocated({first: base.offset(second), second: base.offset(first)})
    return base.relocated({first: base.offset(first) + rng.choice([32, -32, 64, 128])})


KINDS: dict[str, Damage] = {
    kind.__name__.replace("_", " "): kind
    for kind in (
        read_moved, write_moved, buffer_moved, workspace_moved, start_moved, end_moved, height_cut, swapped, dropped,
        doubled, lifespan_cut, overwrite_added, wrong_value_read, other_action, wrong_value_recomputed,
        recomputed_late, update_before_reader, parts_exchanged,
    )
}  # fmt: skip


# Kinds that few plans have a place for get so many times as many tries.
RARE = {"wrong value recomputed": 6, "recomputed late": 6, "parts exchanged": 6}

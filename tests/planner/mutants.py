"""Damage to good plans of tiny problems: the kinds, and how each is done; `campaign` tells what it does."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from foreplan.planner import Plan, Step
from tests.planner.good_plans import Base

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


def _behind_readers(base: Base, numbers: list[int]) -> list[tuple[int, int]]:
    """Moves of these steps to behind one that reads what they write."""
    ranges = base.ranges
    return [
        (number, reader)
        for number in numbers
        for reader in range(number + 1, len(base.plan.steps))
        if set(ranges.writes[number]) & set(ranges.reads[reader])
    ]


def recomputed_late(rng: random.Random, base: Base) -> Plan | None:
    """A value is recomputed only after an action that reads it."""
    return _put(rng, base, _behind_readers(base, _again(base)))


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


def _trips(base: Base) -> list[tuple[int, int]]:
    """Steps that copy a value off the device, each with one that copies it back."""
    ranges = base.ranges
    copies = [n for n in range(len(base.plan.steps)) if base.plan.steps[n].action in base.problem.copies]
    return [(out, back) for out in copies for back in copies if set(ranges.writes[out]) & set(ranges.reads[back])]


def copied_late(rng: random.Random, base: Base) -> Plan | None:
    """A value is copied off the device later, when its bytes may have been given away."""
    return _put(rng, base, [(out, place) for out, back in _trips(base) for place in range(out + 1, back)])


def fetched_early(rng: random.Random, base: Base) -> Plan | None:
    """A value is copied back before it has been copied off the device."""
    return _put(rng, base, [(back, place) for out, back in _trips(base) for place in range(out + 1)])


def fetched_late(rng: random.Random, base: Base) -> Plan | None:
    """A value is copied back only after an action that reads it."""
    return _put(rng, base, _behind_readers(base, [back for _, back in _trips(base)]))


def wrong_copy_fetched(rng: random.Random, base: Base) -> Plan | None:
    """Another copy is fetched, or what lies next to the right one."""
    trips = _trips(base)
    if not trips:
        return None
    _, number = rng.choice(trips)
    (right,) = base.plan.steps[number].reads
    return _with(base, number, reads=(moved(rng, right, [base.plan.steps[out].writes[0] for out, _ in trips]),))


def copies_collide(rng: random.Random, base: Base) -> Plan | None:
    """A copy lies wholly or in part where another does that is needed at the same time."""
    ranges = base.ranges
    copies = sorted({instance for out, _ in _trips(base) for instance in ranges.writes[out]})
    pairs = [
        (one, other)
        for one in copies
        for other in copies
        if one != other and ranges.lower[one] < ranges.upper[other] and ranges.lower[other] < ranges.upper[one]
    ]
    if not pairs:
        return None
    one, other = rng.choice(pairs)
    unit = base.problem.values[ranges.values[one]].alignment
    return base.relocated({one: (base.offset(other) + rng.choice([0, 0, 64, -64, 4])) // unit * unit})


KINDS: dict[str, Damage] = {
    kind.__name__.replace("_", " "): kind
    for kind in (
        read_moved, write_moved, buffer_moved, workspace_moved, start_moved, end_moved, height_cut, swapped, dropped,
        doubled, lifespan_cut, overwrite_added, wrong_value_read, other_action, wrong_value_recomputed,
        recomputed_late, update_before_reader, parts_exchanged, copied_late, fetched_early, fetched_late,
        wrong_copy_fetched, copies_collide,
    )
}  # fmt: skip


# How many times as many tries kinds get that few plans have a place for.
RARE = dict.fromkeys(
    (
        "wrong value recomputed", "recomputed late", "parts exchanged", "copied late", "fetched early", "fetched late",
        "wrong copy fetched", "copies collide",
    ),
    6,
)  # fmt: skip

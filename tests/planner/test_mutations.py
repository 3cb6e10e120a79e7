"""Corrupt good plans, run them on real bytes under poison, and see that the verifier refuses every harmful one."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from foreplan.errors import VerificationError
from foreplan.planner import Plan, Problem, Step, plan, separate, verify
from tests.planner.executor import Harm, Machine, contents
from tests.planner.problems import random_problem


def _moved(rng: random.Random, offset: int, others: list[int]) -> int:
    """Another offset: a neighbour, or where something else lies."""
    return rng.choice([offset + 64, offset - 64, offset + 4, offset + 256, 0, rng.choice(others), rng.choice(others)])


def _change(rng: random.Random, offsets: tuple[int, ...], others: list[int]) -> tuple[int, ...]:
    i = rng.randrange(len(offsets))
    return (*offsets[:i], _moved(rng, offsets[i], others), *offsets[i + 1 :])


def mutate(rng: random.Random, good: Plan, problem: Problem) -> tuple[str, Plan]:
    """A kind of damage, and a plan with it."""
    steps = list(good.steps)
    others = [o for step in steps for o in (*step.reads, *step.writes)] + [o for _, o in good.starts] + [0]
    i, j = rng.randrange(len(steps)), rng.randrange(len(steps))
    step, action = steps[i], problem.actions[steps[i].action]
    kind = rng.choice(["write moved", "read moved", "both moved", "workspace moved", "swapped", "dropped", "doubled",
                       "run again", "overwrite added", "wrong value", "other action", "start moved", "end moved",
                       "height cut"])  # fmt: skip
    if kind == "write moved" and step.writes:
        steps[i] = replace(step, writes=_change(rng, step.writes, others))
    elif kind == "read moved" and step.reads:
        steps[i] = replace(step, reads=_change(rng, step.reads, others))
    elif kind == "both moved" and step.writes:
        old, new = rng.choice(list(zip(action.writes, step.writes))), 0
        new = _moved(rng, old[1], others)
        steps = [_relocate(s, problem, old[0], old[1], new) for s in steps]
        ends = tuple((v, new if (v, o) == old else o) for v, o in good.ends)
        return kind, replace(good, steps=tuple(steps), ends=ends)
    elif kind == "workspace moved":
        steps[i] = replace(step, workspace=_moved(rng, step.workspace, others))
    elif kind == "swapped":
        steps[i], steps[j] = steps[j], steps[i]
    elif kind == "dropped":
        del steps[i]
    elif kind == "doubled":
        steps.insert(i, step)
    elif kind == "run again":
        steps.insert(j, step)
    elif kind == "overwrite added" and step.reads and step.writes:
        at = rng.randrange(len(step.writes))
        writes = (*step.writes[:at], rng.choice(step.reads), *step.writes[at + 1 :])
        new = writes[at]
        steps = [_relocate(s, problem, action.writes[at], step.writes[at], new) for s in steps]
    elif kind == "wrong value" and step.reads:
        donor = steps[j]
        pool = donor.reads + donor.writes
        reads = (rng.choice(pool), *step.reads[1:]) if pool else step.reads
        steps[i] = replace(step, reads=reads)
    elif kind == "other action":
        same = [k for k, a in enumerate(problem.actions) if len(a.reads) == len(action.reads)]
        same = [k for k in same if len(problem.actions[k].writes) == len(action.writes)]
        steps[i] = replace(step, action=rng.choice(same))
    elif kind == "start moved" and good.starts:
        at = rng.randrange(len(good.starts))
        v, offset = good.starts[at]
        new = _moved(rng, offset, others)
        starts = (*good.starts[:at], (v, new), *good.starts[at + 1 :])
        if rng.random() < 0.7:
            steps = [_relocate(s, problem, v, offset, new) for s in steps]
        return kind, replace(good, starts=starts, steps=tuple(steps))
    elif kind == "end moved" and good.ends:
        at = rng.randrange(len(good.ends))
        v, offset = good.ends[at]
        return kind, replace(good, ends=(*good.ends[:at], (v, _moved(rng, offset, others)), *good.ends[at + 1 :]))
    elif kind == "height cut":
        at = rng.randrange(len(good.heights))
        lower = max(good.heights[at] - rng.choice([64, 256]), 0)
        heights = (*good.heights[:at], lower, *good.heights[at + 1 :])
        arena = sum(h for h, region in zip(heights, problem.regions) if region.on_device)
        return kind, replace(good, heights=heights, arena_bytes=arena)
    return kind, replace(good, steps=tuple(steps))


def _relocate(step: Step, problem: Problem, value: int, old: int, new: int) -> Step:
    action = problem.actions[step.action]
    reads = tuple(new if (v, o) == (value, old) else o for v, o in zip(action.reads, step.reads))
    writes = tuple(new if (v, o) == (value, old) else o for v, o in zip(action.writes, step.writes))
    return replace(step, reads=reads, writes=writes)


def _accepts(mutant: Plan, problem: Problem) -> bool:
    """Whether the verifier passes it; figures that the damage made stale are no ground for refusing it here."""
    try:
        verify(mutant, problem)
    except VerificationError as error:
        stale = ("lower_bound_bytes is", "peak_step is")
        return str(error).startswith(stale)
    return True


def test_every_harmful_mutant_is_refused() -> None:
    rng = random.Random(20240)
    counts: Counter[tuple[str, str, str]] = Counter()
    for seed in range(250):
        problem = random_problem(seed, 3 + seed % 12)
        good = plan(problem)
        if not good.steps:
            continue
        right = contents(problem)
        for base in (good, separate(good, problem)):
            for _ in range(12):
                kind, mutant = mutate(rng, base, problem)
                try:
                    Machine(mutant, problem, right).run()
                    result = "harmless"
                except Harm:
                    result = "harmful"
                accepted = _accepts(mutant, problem)
                counts[kind, result, "accepted" if accepted else "refused"] += 1
                assert not (accepted and result == "harmful"), (seed, kind, mutant.as_text(problem))
    for kind in sorted({kind for kind, _, _ in counts}):
        row = {(r, a): counts[kind, r, a] for r in ("harmful", "harmless") for a in ("refused", "accepted")}
        print(f"{kind:16s} " + "  ".join(f"{r} {a} {n}" for (r, a), n in row.items()))
    harmful = sum(n for (_, result, _), n in counts.items() if result == "harmful")
    assert harmful > 2000
    assert all(counts[kind, "harmful", "refused"] for kind in {kind for kind, _, _ in counts})


@pytest.mark.parametrize("field", ["arena_bytes", "lower_bound_bytes", "order_lower_bound_bytes"])
def test_wrong_figures_are_refused(field: str) -> None:
    problem = random_problem(7)
    good = plan(problem)
    with pytest.raises(VerificationError, match=field):
        verify(replace(good, **{field: good.arena_bytes + 64}), problem)

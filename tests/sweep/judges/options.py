"""A drawn step under drawn options: targets, optimizers, budgets, recomputation, offload, micro-batches, precisions.

However it was planned, it gives bit for bit what its calls give in memory apart, also as a plan file and from a
checkpoint on; and its parameters are those of a loop written out here, whose gradients come from a step in float64
without any option. What its session keeps is in the list of its buffers.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import numpy as np

import foreplan as fp
from foreplan.base.errors import DoesNotFitError
from foreplan.graph import Graph
from foreplan.passes import differentiate
from foreplan.planner import Role
from foreplan.runtime.session import Session
from tests.fuzz.plan_files import apart
from tests.passes.test_optimizer import CASES, Rule
from tests.sweep.steps import batch, drawn_step

STEPS = 3
NEAR = 1e-3  # of the largest change of a parameter
SMALL = 0.05  # of a parameter's largest gradient: below, Adam and its like turn what rounds into whole steps
TARGETS = ("numpy", "cpu:threads=1", "cpu:threads=2")
Arrays = dict[str, np.ndarray]
Batches = list[Arrays]


@dataclass(frozen=True)
class Drawn:
    """What a step is compiled with, and the rule that its optimizer follows."""

    optimizer: fp.optim.Optimizer
    rule: Rule
    options: dict[str, object]

    def __str__(self) -> str:
        return f"{self.optimizer} {self.options}"


def options(rng: Random) -> Drawn:
    """Some options; half of all steps have none of a kind."""
    optimizer, rule = rng.choice(CASES)
    drawn: dict[str, object] = {"target": rng.choice(TARGETS)}
    if rng.random() < 0.3:
        optimizer = replace(optimizer, clip_norm=rng.choice([0.01, 1.0, 1e6]))  # type: ignore[type-var]
    if rng.random() < 0.2:
        optimizer = replace(optimizer, ema=0.9)  # type: ignore[type-var]
    if rng.random() < 0.5:
        drawn["budget"] = rng.uniform(0.3, 0.99)
    if rng.random() < 0.5:
        drawn["remat"] = rng.choice(["off", "auto"])
    if rng.random() < 0.4:
        drawn["accumulate"] = rng.choice([2, 3])
    for name, share in (("offload", 0.2), ("prefetch", 0.2)):
        if rng.random() < share:
            drawn[name] = True
    if rng.random() < 0.3:
        drawn["workspace"] = rng.choice([0, "1KiB", "unlimited"])
    if rng.random() < 0.2:
        drawn["precision"] = rng.choice(["bf16", "fp16"])
    if rng.random() < 0.3:
        drawn["outputs"] = ["last"]
    return Drawn(optimizer, rule, drawn)


def judge(seed: str) -> int:
    """Raise AssertionError where options change what a step means; give on how many engines it was judged."""
    graph, drawn = drawn_step(seed), options(Random(f"{seed} options"))
    step = _compiled(graph, drawn)
    given = [_micro_batches(graph, step.accumulate, 10 * i) for i in range(STEPS)]
    session = step.bind(seed=1)
    _held(step, session, str(drawn))
    begun = {name: session.parameters[name] for name in session.parameters}
    left = _steps(session, given)
    assert _bytes(left) == _bytes(_steps(apart(step), given)), f"{drawn}: the plan gives other bits than memory apart"
    _kept(step, given, left, str(drawn))
    if "precision" not in drawn.options:
        _by_hand(drawn_step(seed, "float64"), drawn, [begun, *left], given)
    return 1


def _compiled(graph: Graph, drawn: Drawn) -> fp.Compiled:
    """Within the budget, or within what is said to be the least that can be."""
    try:
        return fp.compile(graph, optimizer=drawn.optimizer, **drawn.options)  # type: ignore[arg-type]
    except DoesNotFitError as error:
        least = error.needed
    options = {**drawn.options, "budget": least}
    step = fp.compile(graph, optimizer=drawn.optimizer, **options)  # type: ignore[arg-type]
    assert step.arena_bytes <= least, f"{drawn}: {step.arena_bytes} bytes, and a budget of {least}"
    return step


def _micro_batches(graph: Graph, count: int, seed: int) -> dict[str, np.ndarray]:
    """One batch, or several along a further axis."""
    each = [batch(graph, seed + i) for i in range(count)]
    return each[0] if count == 1 else {name: np.stack([one[name] for one in each]) for name in each[0]}


def _held(step: fp.Compiled, session: Session, about: str) -> None:
    """The values that a session keeps are in the list of buffers, each once and throughout."""
    values, steps = step.memory.problem.values, len(step.memory.plan.steps)
    listed = [b for b in step.memory.buffers if b.value >= 0 and values[b.value].role is Role.STORED]
    kept = {(name, session.stored[name].nbytes, 0, steps) for name in session.stored}
    assert kept <= {(b.name, b.nbytes, b.lower, b.upper) for b in listed}, about
    assert sum(b.nbytes for b in listed) == step.memory.persistent, about  # constants and slots for inputs besides


def _steps(session: Session, given: Batches) -> list[Arrays]:
    """What each step returns and leaves."""
    left = []
    for one in given:
        result = session.step(one)
        returned = {f"returned {name}": array for name, array in result.outputs.items()}
        stored = {name: session.stored[name] for name in session.stored}
        left.append({"the loss": np.float64(result.loss), **returned, **stored})
    return left


def _bytes(left: list[Arrays]) -> list[dict[str, bytes]]:
    return [{name: np.asarray(array).tobytes() for name, array in each.items()} for each in left]


def _kept(step: fp.Compiled, given: Batches, left: list[Arrays], about: str) -> None:
    """The last steps by the plan's file, from a checkpoint of the first."""
    with tempfile.TemporaryDirectory() as folder:
        plan, checkpoint = Path(folder, "a.plan"), Path(folder, "a.safetensors")
        step.save(plan)
        session = step.bind(seed=1)
        session.step(given[0])
        session.save(checkpoint)
        again = fp.load_plan(plan).bind(seed=2)
        again.load(checkpoint)
        assert _bytes(_steps(again, given[1:])) == _bytes(left[1:]), f"{about}: the file of the plan goes on otherwise"


def _by_hand(exact: Graph, drawn: Drawn, left: list[Arrays], given: Batches) -> None:
    """Hold what each step made of the parameters against the optimizer's rule, written out with NumPy; those that the
    loss does not read stay as they are.

    Args:
        left: the parameters before the first step, and what each has left.
    """
    gradients = fp.compile(differentiate(exact)).bind(seed=1)
    names, scaled = (
        [value.name for value in exact.parameters],
        not isinstance(drawn.optimizer, fp.optim.SGD | fp.optim.Momentum),
    )
    states: dict[str, Arrays] = {name: {} for name in names}
    large = dict.fromkeys(names, np.True_)
    for t, (several, old, new) in enumerate(zip(given, left, left[1:]), 1):
        for name in gradients.parameters:
            gradients.parameters[name] = old[name].astype(np.float64)
        found = [gradients.step(one).gradients for one in _apart(several, drawn)]
        means = {name: np.mean([each[name] for each in found], axis=0) for name in found[0]}
        sizes = {name: max(np.abs(each[name]).max(initial=0.0) for each in found) for name in means}
        limit, norm = drawn.optimizer.clip_norm, np.sqrt(sum((g**2).sum() for g in means.values()))
        for name in names:
            wanted = before = old[name].astype(np.float64)
            if name in means:
                g = means[name] if limit is None or norm == 0 else means[name] * min(1.0, limit / norm)
                wanted = drawn.rule(before, g, states[name], t)
                least = SMALL * max(sizes[name], 1e-3 * max(sizes.values()))
                large[name] = large[name] & (np.abs(means[name]) >= least)
            at = large[name] if scaled and name in means else ...
            scale = max(1e-3, float(np.abs(wanted - before).max(initial=0.0)))
            got, about = new[name].astype(np.float64)[at], f"{drawn}: {name} after step {t}"
            np.testing.assert_allclose(got, wanted[at], rtol=1e-6, atol=NEAR * scale, err_msg=about)


def _apart(several: Arrays, drawn: Drawn) -> Batches:
    """Micro-batches one by one, in float64."""
    exact = {name: x.astype(np.float64) for name, x in several.items()}
    if "accumulate" not in drawn.options:
        return [exact]
    return [{name: x[i] for name, x in exact.items()} for i in range(len(next(iter(exact.values()))))]

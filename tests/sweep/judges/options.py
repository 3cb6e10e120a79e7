"""A drawn step under drawn options: targets, optimizers, budgets, recomputation, offload, micro-batches, precisions.

However it was planned, it gives bit for bit what its calls give in memory apart, also as a plan file and from a
checkpoint on; and its parameters are those of a loop written out here, whose gradients come from a step in float64
without any option.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import numpy as np

import foreplan as fp
from foreplan.errors import DoesNotFitError
from foreplan.graph import Graph
from foreplan.passes import differentiate
from foreplan.runtime.session import Session
from tests.fuzz.plan_files import apart
from tests.passes.test_optimizer import CASES, Rule
from tests.sweep.steps import batch, drawn_step

STEPS = 3
NEAR = 1e-3  # of the largest change of a parameter
SMALL = 1e-3  # of a parameter's largest gradient: below, Adam turns what rounds into whole steps
TARGETS = ("numpy", "cpu:threads=1", "cpu:threads=2")
Batches = list[dict[str, np.ndarray]]


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
    if rng.random() < 0.5:
        drawn["budget"] = rng.uniform(0.3, 0.99)
    if rng.random() < 0.5:
        drawn["remat"] = rng.choice(["off", "free", "auto"])
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
    begun = {name: session.parameters[name].astype(np.float64) for name in session.parameters}
    found = _steps(session, given)
    assert found == _steps(apart(step), given), f"{drawn}: the plan gives other bits than memory apart"
    _kept(step, given, found, str(drawn))
    if "precision" not in drawn.options:
        _by_hand(drawn_step(seed, "float64"), drawn, begun, session, given)
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


def _steps(session: Session, given: Batches) -> list[list[bytes]]:
    """What each step returns and leaves."""
    made = []
    for one in given:
        result = session.step(one)
        arrays = [*result.outputs.values(), *(session.stored[name] for name in session.stored)]
        made.append([np.float64(result.loss).tobytes(), *(array.tobytes() for array in arrays)])
    return made


def _kept(step: fp.Compiled, given: Batches, wanted: list[list[bytes]], about: str) -> None:
    """The last steps by the plan's file, from a checkpoint of the first."""
    with tempfile.TemporaryDirectory() as folder:
        plan, checkpoint = Path(folder, "a.plan"), Path(folder, "a.safetensors")
        step.save(plan)
        session = step.bind(seed=1)
        session.step(given[0])
        session.save(checkpoint)
        again = fp.load_plan(plan).bind(seed=2)
        again.load(checkpoint)
        assert _steps(again, given[1:]) == wanted[1:], f"{about}: the file of the plan goes on otherwise"


def _by_hand(exact: Graph, drawn: Drawn, parameters: dict[str, np.ndarray], session: Session, given: Batches) -> None:
    """Hold what steps have made of the parameters against the optimizer's rule, written out with NumPy; those that the
    loss does not read stay as they are.
    """
    gradients = fp.compile(differentiate(exact)).bind(seed=1)
    begun, large = dict(parameters), {name: np.ones(p.shape, bool) for name, p in parameters.items()}
    states: dict[str, dict[str, np.ndarray]] = {name: {} for name in parameters}
    limit = drawn.optimizer.clip_norm
    for t, several in enumerate(given, 1):
        for name, p in parameters.items():
            if name in gradients.parameters:
                gradients.parameters[name] = p
        count = int(drawn.options.get("accumulate", 1))  # type: ignore[call-overload]
        parts = [several] if count == 1 else [{name: x[i] for name, x in several.items()} for i in range(count)]
        results = [gradients.step({name: x.astype(np.float64) for name, x in part.items()}).gradients for part in parts]
        means = {name: np.mean([each[name] for each in results], axis=0) for name in results[0]}
        norm = np.sqrt(sum((g**2).sum() for g in means.values()))
        for name, g in means.items():
            large[name] &= np.abs(g) >= SMALL * np.abs(g).max(initial=0.0)
            clipped = g if limit is None or norm == 0 else g * min(1.0, limit / norm)
            parameters = {**parameters, name: drawn.rule(parameters[name], clipped, states[name], t)}
    for name, wanted in parameters.items():
        change, at = wanted - begun[name], large[name] if "Adam" in type(drawn.optimizer).__name__ else ...
        scale = max(1e-3, float(np.abs(change).max(initial=0.0)))
        got = session.parameters[name].astype(np.float64)
        np.testing.assert_allclose(got[at], wanted[at], rtol=NEAR, atol=NEAR * scale, err_msg=f"{drawn}: {name}")

"""A whole training step: planned against apart, bit for bit; engines and float64 beside each other; gradients."""

from __future__ import annotations

import numpy as np

import foreplan as fp
from foreplan.graph import Graph
from foreplan.passes import differentiate
from foreplan.planner import without_reuse
from foreplan.runtime.session import Session
from tests.sweep.steps import batch, drawn_step

RATE = 0.1
NEAR = 2e-4  # of the largest element of a parameter's change, and of the loss
STEP = 1e-6  # of differences
SAMPLES = 3  # elements of each parameter whose difference is taken


def judge(seed: str, targets: tuple[str, ...] = ("numpy", "cpu:threads=1", "cpu:threads=2")) -> int:
    """Raise AssertionError where a step is wrong on an engine; give on how many it was judged."""
    exact = _changes(drawn_step(seed, "float64"), "numpy")
    graph = drawn_step(seed)
    for target in targets:
        found = _changes(graph, target)
        for name, wanted in exact.items():
            scale = max(1e-3, float(np.abs(wanted).max(initial=0.0)))
            np.testing.assert_allclose(
                found[name].astype(np.float64), wanted, atol=NEAR * scale, rtol=NEAR, err_msg=f"{name} on {target}"
            )
    _differences(seed, exact)
    return len(targets)


def _changes(graph: Graph, target: str) -> dict[str, np.ndarray]:
    """The loss of a step and what it takes from each parameter, after holding the plan against memory apart."""
    step = fp.compile(graph, optimizer=fp.optim.SGD(RATE), target=target)
    planned, apart = step.bind(seed=1), Session(step.program, without_reuse(step.plan, step.program), seed=1)
    names = [value.name for value in graph.parameters]
    before = {name: planned.parameters[name] for name in names}
    given = batch(graph)
    results = [session.step(given) for session in (planned, apart)]
    assert np.asarray(results[0].loss).tobytes() == np.asarray(results[1].loss).tobytes(), f"the loss on {target}"
    for name in names:
        one, other = planned.parameters[name], apart.parameters[name]
        assert one.tobytes() == other.tobytes(), f"{name} on {target}: the plan gives other bits than memory apart"
    found = {name: before[name] - planned.parameters[name] for name in names}
    return {"loss": np.asarray(results[0].loss), **found}


def _differences(seed: str, exact: dict[str, np.ndarray]) -> None:
    """Some elements of every gradient against differences of the loss, in float64."""
    graph = drawn_step(seed, "float64")
    session = fp.compile(differentiate(graph)).bind(seed=1)
    given, rng = batch(graph), np.random.default_rng(0)
    for value in graph.parameters:
        name, old = value.name, session.parameters[value.name]
        scale = max(1e-2, float(np.abs(exact[name]).max(initial=0.0)) / RATE)
        for flat in rng.choice(old.size, min(SAMPLES, old.size), replace=False) if old.size else ():
            losses = []
            for sign in (1, -1):
                moved = old.copy()
                moved.reshape(-1)[flat] += sign * STEP
                session.parameters[name] = moved
                losses.append(float(session.step(given).loss))
            session.parameters[name] = old
            difference = (losses[0] - losses[1]) / (2 * STEP)
            got = float(exact[name].reshape(-1)[flat]) / RATE
            assert abs(difference - got) <= 1e-4 * scale, f"{name} at {flat}: gradient {got}, differences {difference}"

"""Optimizers that need more of a tensor than one element, against their papers' formulas in float64, on the engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import foreplan as fp
from foreplan.graph import Kind
from foreplan.passes.optimizer import LAMB, Adafactor, Muon, Optimizer
from tests.passes.quartic import SHAPES, batches, quartic, weights

State = dict[str, np.ndarray]
Rule = Callable[[np.ndarray, np.ndarray, State, int], np.ndarray]
RATE, DECAY, STEPS = 0.02, 0.1, 3
TINY = float(np.finfo(np.float32).eps)


def norm(x: np.ndarray) -> float:
    return float(np.sqrt((x * x).sum()))


def rms(x: np.ndarray) -> float:
    return norm(x) / np.sqrt(x.size)


def adam(g: np.ndarray, s: State, t: int, epsilon: float) -> np.ndarray:
    s["m"] = 0.9 * s.get("m", 0) + 0.1 * g
    s["v"] = 0.999 * s.get("v", 0) + 0.001 * g**2
    return (s["m"] / (1 - 0.9**t)) / (np.sqrt(s["v"] / (1 - 0.999**t)) + epsilon)


def lamb(p: np.ndarray, g: np.ndarray, s: State, t: int) -> np.ndarray:
    r = adam(g, s, t, 1e-6) + DECAY * p
    return p - RATE * (norm(p) / norm(r) if norm(p) and norm(r) else 1.0) * r


def adafactor(p: np.ndarray, g: np.ndarray, s: State, t: int) -> np.ndarray:
    share = t**-0.8
    alpha = max(1e-3, rms(p)) * min(RATE, 1 / np.sqrt(t))
    p = p - RATE * DECAY * p
    if g.ndim < 2:
        s["v"] = (1 - share) * s.get("v", 0) + share * g**2
        v = s["v"]
    else:
        s["r"] = (1 - share) * s.get("r", 0) + share * (g**2).mean(-1)
        s["c"] = (1 - share) * s.get("c", 0) + share * (g**2).mean(-2)
        v = s["r"][..., :, None] * s["c"][..., None, :] / np.maximum(s["r"].mean(-1), TINY)[..., None, None]
    u = g / np.sqrt(np.maximum(v, TINY**2))
    return p - alpha * u / max(1.0, rms(u))


def muon(p: np.ndarray, g: np.ndarray, s: State, t: int) -> np.ndarray:
    if g.ndim != 2:
        return p - RATE * (adam(g, s, t, 1e-8) + DECAY * p)
    s["m"] = 0.95 * s.get("m", 0) + 0.05 * g
    x = 0.95 * s["m"] + 0.05 * g
    x = x / norm(x)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return p - RATE * DECAY * p - RATE * np.sqrt(max(1, p.shape[0] / p.shape[1])) * x


CASES: list[tuple[Optimizer, Rule]] = [
    (LAMB(RATE, weight_decay=DECAY), lamb),
    (Adafactor(RATE, weight_decay=DECAY), adafactor),
    (Muon(RATE, weight_decay=DECAY), muon),
]
NAMES = [type(optimizer).__name__ for optimizer, _ in CASES]


@pytest.mark.parametrize(("target", "clip"), [("numpy", None), ("numpy", 0.5), ("cpu:threads=1", 0.5)])
@pytest.mark.parametrize(("optimizer", "rule"), CASES, ids=NAMES)
def test_steps_follow_the_formula(optimizer: Optimizer, rule: Rule, target: str, clip: float | None) -> None:
    rng = np.random.default_rng(len(target))
    clipping = replace(optimizer, clip_norm=clip)  # type: ignore[type-var]
    session = fp.compile(quartic(), optimizer=clipping, target=target).bind()
    expected, given = weights(rng), batches(rng, STEPS)
    expected["vector"][:] = 0
    states: dict[str, State] = {name: {} for name in SHAPES}
    for name, array in expected.items():
        session.parameters[name] = array.astype(np.float32)
    for t, batch in enumerate(given, 1):
        before = dict(expected)
        session.step({name: x.astype(np.float32) for name, x in batch.items()})
        gradients = {name: 4 * (p - batch[f"x_{name}"]) ** 3 for name, p in expected.items()}
        factor = 1.0 if clip is None else min(1.0, clip / np.sqrt(sum((g**2).sum() for g in gradients.values())))
        for name, g in gradients.items():
            expected[name] = rule(expected[name], factor * g, states[name], t)
            far = 2e-4 * np.abs(expected[name] - before[name]).max()
            np.testing.assert_allclose(session.parameters[name], expected[name], rtol=1e-6, atol=far, err_msg=name)


@pytest.mark.parametrize(("optimizer", "rule"), CASES, ids=NAMES)
def test_a_step_of_micro_batches_in_float16_takes_the_mean_gradient(optimizer: Optimizer, rule: Rule) -> None:
    """Its gradients are scaled, and summed; all that is checked of them is exact in float16."""
    rng = np.random.default_rng(3)
    step = fp.compile(quartic(), optimizer=optimizer, accumulate=2, precision="fp16")
    session, given = step.bind(), batches(rng, 2)
    expected = weights(rng)
    for name, array in expected.items():
        session.parameters[name] = array.astype(np.float32)
    session.step(
        {name: np.stack([x.astype(np.float32), given[1][name].astype(np.float32)]) for name, x in given[0].items()}
    )
    for name, p in expected.items():
        g = sum(4 * (p - batch[f"x_{name}"]) ** 3 for batch in given) / 2
        wanted = rule(p, np.asarray(g), {}, 1)
        far = 2e-4 * np.abs(wanted - p).max()
        np.testing.assert_allclose(session.parameters[name], wanted, rtol=1e-6, atol=far, err_msg=name)
    before = {name: session.stored[name] for name in session.stored if not name.startswith("loss_scale")}
    session.step({name: np.full((2, *SHAPES[name[2:]]), np.inf, np.float32) for name in given[0]})
    for name, array in before.items():
        np.testing.assert_array_equal(session.stored[name], array, err_msg=f"{name} after gradients that overflow")


@pytest.mark.parametrize(("optimizer", "rule"), CASES, ids=NAMES)
def test_a_plan_file_goes_on_from_a_checkpoint(optimizer: Optimizer, rule: Rule, tmp_path: Path) -> None:
    step = fp.compile(quartic(), optimizer=replace(optimizer, ema=0.9))  # type: ignore[type-var]
    step.save(tmp_path / "a.plan")
    session, again = step.bind(seed=1), fp.load_plan(tmp_path / "a.plan").bind(seed=2)
    given = [
        {name: x.astype(np.float32) for name, x in each.items()} for each in batches(np.random.default_rng(2), STEPS)
    ]
    session.step(given[0])
    session.save(tmp_path / "w")
    again.load(tmp_path / "w")
    for batch in given[1:]:
        assert session.step(batch).loss == again.step(batch).loss
    for name, array in session.stored.items():
        np.testing.assert_array_equal(again.stored[name], array, err_msg=name)


def test_the_state_of_adafactor_is_a_row_and_a_column_and_counted_so() -> None:
    shapes = {"table": (1000, 300), "bias": (300,), "filters": (8, 4, 3, 5)}
    step = fp.compile(quartic(shapes=shapes), optimizer=Adafactor())
    state = {slot.name: slot.operand.type.shape for slot in step.program.stored if slot.kind is Kind.STATE}
    assert state.pop("step") == ()
    assert state == {
        "table/row_moment": (1000,),
        "table/column_moment": (300,),
        "bias/second_moment": (300,),
        "filters/row_moment": (8, 4, 3),
        "filters/column_moment": (8, 4, 5),
    }
    numbers = 1000 + 300 + 300 + 8 * 4 * 3 + 8 * 4 * 5
    category = step.estimate()["categories"]["optimizer_state"]
    assert 4 * numbers + 8 <= category <= 4 * numbers + 8 + 64 * len(state)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Muon(adamw=["hed"]), "'hed' means no weight"),
        (lambda: Muon(adjust="none"), "original, match_rms_adamw"),
        (lambda: Muon(iterations=-1), "from 0 to 99"),
        (lambda: Muon(nesterov=1), "True or False"),
        (lambda: Adafactor(clip_update=0.5), "must be in"),
        (lambda: Adafactor(beta2_decay=0.1), "must be in"),
        (lambda: LAMB(epsilon=-1.0), "must be in"),
        (lambda: fp.optim.RMSprop(centered=1), "True or False"),
        (lambda: fp.optim.SGD(0.1, clip_norm=1.0, clip_value=1.0), "give one"),
        (lambda: fp.optim.SGD(0.1, clip_value=0), "must be in"),
        (lambda: fp.optim.SGD(0.1, ema=1.0), "must be in"),
    ],
)
def test_what_cannot_be_meant_is_told(make: Callable[[], Optimizer], message: str) -> None:
    with pytest.raises(fp.UsageError, match=message):
        fp.compile(quartic(), optimizer=make())


def test_matrices_that_are_named_go_to_adamw() -> None:
    step = fp.compile(quartic(), optimizer=Muon(adamw=["high"]))
    state = {slot.name for slot in step.program.stored if slot.kind is Kind.STATE}
    assert "wide/momentum" in state and {"high/first_moment", "stack/first_moment", "vector/first_moment"} <= state
    assert "high/momentum" not in state

"""Optimizers against their papers' formulas, written out here with NumPy in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

import foreplan as fp
from foreplan.errors import UsageError
from foreplan.graph import Builder, Fill, Kind, TensorType
from foreplan.graph.types import FLOAT64
from foreplan.ops.map import elementwise
from foreplan.ops.reduce import reduce
from foreplan.passes import differentiate, updating
from foreplan.passes.optimizer import SGD, Adam, AdamW, Momentum, Nesterov, Optimizer
from tests.ops.check import evaluate
from tests.passes.steps import training_step

Rule = Callable[[np.ndarray, np.ndarray, dict[str, np.ndarray], int], np.ndarray]
RATE, DECAY = 0.05, 0.1


def sgd(p: np.ndarray, g: np.ndarray, s: dict[str, np.ndarray], t: int) -> np.ndarray:
    return p - RATE * (g + DECAY * p)


def momentum(p: np.ndarray, g: np.ndarray, s: dict[str, np.ndarray], t: int) -> np.ndarray:
    s["v"] = 0.9 * s.get("v", 0) + g + DECAY * p
    return p - RATE * s["v"]


def nesterov(p: np.ndarray, g: np.ndarray, s: dict[str, np.ndarray], t: int) -> np.ndarray:
    d = g + DECAY * p
    s["v"] = 0.9 * s.get("v", 0) + d
    return p - RATE * (d + 0.9 * s["v"])


def adam(p: np.ndarray, g: np.ndarray, s: dict[str, np.ndarray], t: int) -> np.ndarray:
    g = g + DECAY * p
    s["m"] = 0.9 * s.get("m", 0) + 0.1 * g
    s["v"] = 0.999 * s.get("v", 0) + 0.001 * g**2
    m_hat, v_hat = s["m"] / (1 - 0.9**t), s["v"] / (1 - 0.999**t)
    return p - RATE * m_hat / (np.sqrt(v_hat) + 1e-8)


def adamw(p: np.ndarray, g: np.ndarray, s: dict[str, np.ndarray], t: int) -> np.ndarray:
    s["m"] = 0.9 * s.get("m", 0) + 0.1 * g
    s["v"] = 0.999 * s.get("v", 0) + 0.001 * g**2
    m_hat, v_hat = s["m"] / (1 - 0.9**t), s["v"] / (1 - 0.999**t)
    return p - RATE * (m_hat / (np.sqrt(v_hat) + 1e-8) + DECAY * p)


CASES: list[tuple[Optimizer, Rule]] = [
    (SGD(RATE, DECAY), sgd),
    (Momentum(RATE, 0.9, DECAY), momentum),
    (Nesterov(RATE, 0.9, DECAY), nesterov),
    (Adam(RATE, weight_decay=DECAY), adam),
    (AdamW(RATE, weight_decay=DECAY), adamw),
]


@pytest.mark.parametrize("limit", [0.5, 1e6])
@pytest.mark.parametrize(("optimizer", "rule"), CASES, ids=[type(case[0]).__name__ for case in CASES])
def test_gradients_are_clipped_by_their_common_norm(optimizer: Optimizer, rule: Rule, limit: float) -> None:
    shapes = {"u": (), "v": (3, 70_000), "w": (2, 3, 4)}
    b = Builder("sum of squares")
    terms = []
    for name, shape in shapes.items():
        p = b.store(name, TensorType(FLOAT64, shape), Kind.PARAMETER, Fill(0.0))
        terms.append(reduce(b, "sum", elementwise(b, lambda p: p * p, p)))
    loss = elementwise(b, lambda x, y, z: x + y + z, *terms)
    clipping = dataclasses.replace(optimizer, clip_norm=limit)  # type: ignore[type-var]
    training = training_step(b.finish({}, loss=loss), clipping)
    assert any("are alive until their norm is known" in note for note in training.notes)
    rng = np.random.default_rng(0)
    stored = {v.name: np.zeros(v.shape, v.dtype.numpy) for v in training.stored if v.kind is not Kind.CONSTANT}
    expected = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    stored |= expected
    states: dict[str, dict[str, np.ndarray]] = {name: {} for name in shapes}
    for t in range(1, 3):
        rate = np.array(np.float32(RATE))
        values = evaluate(training, {"learning_rate": rate}, stored, hard=False)
        gradients = {name: 2 * p for name, p in expected.items()}
        norm = np.sqrt(sum((g**2).sum() for g in gradients.values()))
        for name, g in gradients.items():
            expected[name] = rule(expected[name], g * min(1.0, limit / norm), states[name], t)
        stored = {old.name: values[new] for old, new in training.updates.items()}
        for name in shapes:
            np.testing.assert_allclose(stored[name], expected[name], rtol=1e-5, atol=1e-7)


def test_clipping_keeps_gradients_that_else_die_at_once() -> None:
    graph = fp.models.build("mlp:batch=2,width=64,layers=4")
    plain, clipped = (
        fp.compile(graph, loss=fp.losses.cross_entropy, optimizer=SGD(0.1, clip_norm=limit), remat="off")
        for limit in (None, 1.0)
    )
    gradients = sum(value.type.nbytes for value in graph.parameters)
    largest = max(value.type.nbytes for value in graph.parameters)
    assert clipped.plan.arena_bytes - plain.plan.arena_bytes >= gradients - 3 * largest
    session = clipped.bind()
    data = {"target": np.zeros(2, np.int64)} | {
        slot.name: np.ones(slot.operand.type.shape, np.float32)
        for slot in clipped.program.inputs
        if slot.init is None and slot.operand.type.dtype.is_float
    }
    before = {name: session.parameters[name].copy() for name in session.parameters}
    session.step(data)
    moved = np.sqrt(sum(((session.parameters[name] - old) ** 2).sum() for name, old in before.items()))
    assert moved <= 0.1 * (1 + 1e-4)


@pytest.mark.parametrize(("optimizer", "rule"), CASES, ids=[type(case[0]).__name__ for case in CASES])
def test_three_steps_follow_the_formula(optimizer: Optimizer, rule: Rule) -> None:
    b = Builder("quartic")
    x = b.input("x", TensorType(FLOAT64, (6,)))
    w = b.store("w", TensorType(FLOAT64, (6,)), Kind.PARAMETER, Fill(0.0))
    loss = reduce(b, "sum", elementwise(b, lambda w, x: (w - x) ** 4, w, x))
    training = training_step(b.finish({}, loss=loss), optimizer)
    rng = np.random.default_rng(0)
    stored = {v.name: np.zeros(v.shape, v.dtype.numpy) for v in training.stored if v.kind is not Kind.CONSTANT}
    stored["w"] = expected = rng.normal(size=6)
    state: dict[str, np.ndarray] = {}
    for t in range(1, 4):
        given = rng.normal(size=6)
        rate = np.float32(RATE)
        values = evaluate(training, {"x": given, "learning_rate": np.array(rate)}, stored)
        expected = rule(expected, 4 * (expected - given) ** 3, state, t)
        stored = {old.name: values[new] for old, new in training.updates.items()}
        # The learning rate and Adam's corrections are float32 scalars.
        np.testing.assert_allclose(stored["w"], expected, rtol=1e-6)
    assert int(stored["step"]) == 3


def test_the_learning_rate_is_an_input_with_a_default() -> None:
    b = Builder("w")
    w = b.store("w", TensorType(FLOAT64, (2,)), Kind.PARAMETER, Fill(0.0))
    training = differentiate(b.finish({}, loss=reduce(b, "sum", w)), updating(SGD(0.25)))
    (rate,) = training.inputs
    assert (rate.name, str(rate.type), str(rate.init)) == ("learning_rate", "float32[]", "fill(0.25)")


@pytest.mark.parametrize(
    "make",
    [
        lambda: SGD(0.1, clip_norm=0.0),
        lambda: AdamW(clip_norm=-1.0),
        lambda: SGD(-1.0),
        lambda: Momentum(0.1, 1.0),
        lambda: Adam(beta1=-0.1),
        lambda: AdamW(weight_decay=float("nan")),
    ],
)
def test_a_setting_out_of_range_is_refused(make: Callable[[], Optimizer]) -> None:
    with pytest.raises(UsageError, match="must be in"):
        make()

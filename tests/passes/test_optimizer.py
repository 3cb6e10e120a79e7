"""Optimizers against their papers' formulas, written out here with NumPy in float64."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import foreplan as fp
from foreplan.base.errors import UsageError
from foreplan.graph import Fill, GraphBuilder, Kind, TensorType
from foreplan.graph.types import FLOAT64
from foreplan.ops.map import elementwise
from foreplan.ops.reduce import reduce
from foreplan.passes import Differentiate, updating
from foreplan.passes.optimizer import SGD, Adam, AdamW, Group, Momentum, Nesterov, Optimizer
from foreplan.passes.optimizer.rule import Common
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


def rmsprop(p: np.ndarray, g: np.ndarray, s: dict[str, np.ndarray], t: int) -> np.ndarray:
    g = g + DECAY * p
    s["s"] = 0.9 * s.get("s", 0) + 0.1 * g**2
    s["v"] = 0.5 * s.get("v", 0) + g / (np.sqrt(s["s"]) + 1e-3)
    return p - RATE * s["v"]


def adagrad(p: np.ndarray, g: np.ndarray, s: dict[str, np.ndarray], t: int) -> np.ndarray:
    g = g + DECAY * p
    s["s"] = s.get("s", 0.1) + g**2
    return p - RATE * g / (np.sqrt(s["s"]) + 1e-10)


def nadam(p: np.ndarray, g: np.ndarray, s: dict[str, np.ndarray], t: int) -> np.ndarray:
    now, after = (0.9 * (1 - 0.5 * 0.96 ** (i * 4e-3)) for i in (t, t + 1))
    g = g + DECAY * p
    s["M"] = s.get("M", 1) * now
    s["m"] = 0.9 * s.get("m", 0) + 0.1 * g
    s["v"] = 0.999 * s.get("v", 0) + 0.001 * g**2
    step = (1 - now) * g / (1 - s["M"]) + after * s["m"] / (1 - s["M"] * after)
    return p - RATE * step / (np.sqrt(s["v"] / (1 - 0.999**t)) + 1e-8)


def lion(p: np.ndarray, g: np.ndarray, s: dict[str, np.ndarray], t: int) -> np.ndarray:
    m = s.get("m", 0)
    s["m"] = 0.99 * m + 0.01 * g
    return p - RATE * (np.sign(0.9 * m + 0.1 * g) + DECAY * p)


CASES: list[tuple[Optimizer, Rule]] = [
    (SGD(RATE, DECAY), sgd),
    (Momentum(RATE, 0.9, DECAY), momentum),
    (Nesterov(RATE, 0.9, DECAY), nesterov),
    (Adam(RATE, weight_decay=DECAY), adam),
    (AdamW(RATE, weight_decay=DECAY), adamw),
    (fp.optim.RMSprop(RATE, 0.9, 1e-3, DECAY, 0.5), rmsprop),
    (fp.optim.Adagrad(RATE, 0.1, weight_decay=DECAY), adagrad),
    (fp.optim.NAdam(RATE, weight_decay=DECAY), nadam),
    (fp.optim.Lion(RATE, weight_decay=DECAY), lion),
]


@pytest.mark.parametrize("limit", [0.5, 1e6])
@pytest.mark.parametrize(("optimizer", "rule"), CASES, ids=[type(case[0]).__name__ for case in CASES])
def test_gradients_are_clipped_by_their_common_norm(optimizer: Optimizer, rule: Rule, limit: float) -> None:
    shapes = {"u": (), "v": (3, 70_000), "w": (2, 3, 4)}
    b = GraphBuilder("sum of squares")
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
    stored |= {v.name: np.full(v.shape, v.init.value, v.dtype.numpy) for v in training.stored if v.kind is Kind.STATE}
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
    b = GraphBuilder("quartic")
    x = b.input("x", TensorType(FLOAT64, (6,)))
    w = b.store("w", TensorType(FLOAT64, (6,)), Kind.PARAMETER, Fill(0.0))
    loss = reduce(b, "sum", elementwise(b, lambda w, x: (w - x) ** 4, w, x))
    training = training_step(b.finish({}, loss=loss), optimizer)
    rng = np.random.default_rng(0)
    stored = {v.name: np.zeros(v.shape, v.dtype.numpy) for v in training.stored if v.kind is not Kind.CONSTANT}
    stored |= {v.name: np.full(v.shape, v.init.value, v.dtype.numpy) for v in training.stored if v.kind is Kind.STATE}
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
    b = GraphBuilder("w")
    w = b.store("w", TensorType(FLOAT64, (2,)), Kind.PARAMETER, Fill(0.0))
    training = Differentiate(updating(SGD(0.25)))(b.finish({}, loss=reduce(b, "sum", w)))
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
        lambda: Group("head", rate=1e39),
        lambda: fp.optim.cosine(1e39, steps=5),
    ],
)
def test_a_setting_out_of_range_is_refused(make: Callable[[], Optimizer]) -> None:
    with pytest.raises(UsageError, match="must be in"):
        make()


KINDS = [each for each in vars(fp.optim).values() if isinstance(each, type) and issubclass(each, Common)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, -1.0, 1e39, 10**400, True, np.True_, "0.1", [0.1]])
def test_no_number_of_an_optimizer_is_one_that_float32_has_not(kind: type[Common], wrong: object) -> None:
    numbers = [
        each.name for each in dataclasses.fields(kind) if each.type in ("float", "float | None", "float | Schedule")
    ]
    assert "learning_rate" in numbers
    for name in numbers:
        given: dict[str, Any] = {name: wrong} if name == "learning_rate" else {"learning_rate": 0.1, name: wrong}
        if (name, wrong) == ("beta2_decay", -1.0):
            continue
        with pytest.raises(UsageError, match=f"{name} must be in"):
            kind(**given)


SHAPES = {"body.weight": (4, 3), "body.bias": (3,), "head.weight": (3, 2), "head.norm": (3,)}


def weights_after(optimizer: Optimizer, steps: int = 2) -> dict[str, np.ndarray]:
    """Of a sum of squares, from ones."""
    b = GraphBuilder("sum of squares")
    terms = []
    for name, shape in SHAPES.items():
        p = b.store(name, TensorType(FLOAT64, shape), Kind.PARAMETER, Fill(0.0))
        terms.append(reduce(b, "sum", elementwise(b, lambda p: p * p, p)))
    loss = elementwise(b, lambda x, y, z, w: x + y + z + w, *terms)
    training = training_step(b.finish({}, loss=loss), optimizer)
    stored = {v.name: np.zeros(v.shape, v.dtype.numpy) for v in training.stored if v.kind is not Kind.CONSTANT}
    stored |= {name: np.ones(shape) for name, shape in SHAPES.items()}
    for _ in range(steps):
        values = evaluate(training, {"learning_rate": np.array(np.float32(RATE))}, stored, hard=False)
        stored = {old.name: values[new] for old, new in training.updates.items()}
    return {name: stored[name] for name in SHAPES}


GROUPS = (Group("body", rate=0.5), Group(["*.norm", "body.bias"], rate=3.0, weight_decay=0.25))
# Of each weight, the factor of its learning rate and its weight decay, with `groups` and each `decay`.
EXPECTED = {
    "all": {
        "body.weight": (0.5, DECAY),
        "body.bias": (3.0, 0.25),
        "head.weight": (1.0, DECAY),
        "head.norm": (3.0, 0.25),
    },
    "matrices": {
        "body.weight": (0.5, DECAY),
        "body.bias": (3.0, 0.25),
        "head.weight": (1.0, DECAY),
        "head.norm": (3.0, 0.25),
    },
    ("head",): {
        "body.weight": (0.5, 0.0),
        "body.bias": (3.0, 0.25),
        "head.weight": (1.0, DECAY),
        "head.norm": (3.0, 0.25),
    },
}


@pytest.mark.parametrize("clip", [None, 1e6])
@pytest.mark.parametrize("decay", EXPECTED, ids=str)
@pytest.mark.parametrize("kind", [SGD, AdamW])
def test_groups_have_a_rate_and_a_decay_of_their_own(
    kind: type[SGD] | type[AdamW], decay: str | tuple[str, ...], clip: float | None
) -> None:
    found = weights_after(kind(RATE, weight_decay=DECAY, groups=GROUPS, decay=decay, clip_norm=clip))
    for name, (rate, own) in EXPECTED[decay].items():
        p, s = np.ones(SHAPES[name]), {"m": 0.0, "v": 0.0}
        for t in (1, 2):
            g = 2 * p
            if kind is SGD:
                p = p - rate * RATE * (g + own * p)
            else:
                s = {"m": 0.9 * s["m"] + 0.1 * g, "v": 0.999 * s["v"] + 0.001 * g**2}
                step = s["m"] / (1 - 0.9**t) / (np.sqrt(s["v"] / (1 - 0.999**t)) + 1e-8)
                p = p - rate * RATE * (step + own * p)
        np.testing.assert_allclose(found[name], p, rtol=1e-6, err_msg=name)


def test_weight_decay_of_matrices_alone_leaves_vectors_out() -> None:
    shrunk, plain = (weights_after(SGD(RATE, decay, decay="matrices")) for decay in (DECAY, 0.0))
    assert {name for name in SHAPES if (shrunk[name] != plain[name]).any()} == {"body.weight", "head.weight"}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: weights_after(SGD(0.1, groups=[Group("hed")])),
            "'hed' means no weight that is trained; there are 'head'",
        ),
        (lambda: weights_after(SGD(0.1, decay=["tail"])), "'tail' means no weight"),
        (lambda: SGD(0.1, decay="vectors"), "all, matrices"),
        (lambda: SGD(0.1, groups=["head"]), "a group must be a Group"),
        (lambda: Group("head", rate=-1.0), "rate must be in"),
        (lambda: Group(3), "list of names"),
    ],
)
def test_groups_that_cannot_be_meant_are_told(make: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


def test_groups_hold_where_gradients_are_accumulated() -> None:
    graph = fp.models.build("mlp:batch=2,width=8,layers=1,inputs=4,classes=3")
    rng = np.random.default_rng(1)
    x, target = rng.normal(size=(3, 2, 4)).astype(np.float32), rng.integers(0, 3, (3, 2))
    optimizer = SGD(0.5, 0.1, groups=[Group("out", rate=0.0, weight_decay=0.0)])
    session = fp.compile(graph, fp.losses.cross_entropy, optimizer, accumulate=3).bind()
    before = dict(session.parameters)
    session.step({"x": x, "target": target})
    moved = {name for name, array in session.parameters.items() if (array != before[name]).any()}
    assert moved == {name for name in before if not name.startswith("out")}

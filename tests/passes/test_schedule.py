"""Learning rates that the step computes from its count of updates."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import foreplan as fp
from foreplan.passes import optimizer as optim
from tests.passes.quartic import batches, quartic

SHAPES = {"w": (3,)}


def cosine(t: int, rate: float, steps: int, warmup: int, end: float) -> float:
    if t < warmup:
        return rate * t / warmup
    part = min(1.0, (t - warmup) / (steps - warmup))
    return end + (rate - end) * (1 + math.cos(math.pi * part)) / 2


def one_cycle(t: int, rate: float, steps: int, rise: float) -> float:
    """With PyTorch's own factors."""
    peak, end, low, last = rise * steps - 1, steps - 1, rate / 25, rate / 25e4
    first, second, part = (low, rate, t / peak) if t <= peak else (rate, last, min(1.0, (t - peak) / (end - peak)))
    return second + (first - second) * (1 + math.cos(math.pi * part)) / 2


def parabola(t: int, rate: float) -> float:
    return rate * t / 2 if t < 2 else rate * (1 - min(1.0, (t - 2) / 8)) ** 2


FORMULAS: list[tuple[optim.Schedule, Callable[[int], float]]] = [
    (optim.constant(0.3, warmup=4), lambda t: 0.3 * min(1.0, t / 4)),
    (optim.constant(0.3), lambda t: 0.3),
    (optim.cosine(0.2, steps=12, warmup=3, end=0.01), lambda t: cosine(t, 0.2, 12, 3, 0.01)),
    (optim.cosine(0.2, steps=1), lambda t: cosine(t, 0.2, 1, 0, 0.0)),
    (optim.linear(0.2, steps=10, end=0.1), lambda t: 0.2 - 0.1 * min(1.0, t / 10)),
    (
        optim.polynomial(0.2, steps=10, warmup=2, power=2.0),
        lambda t: 0.1 * t if t < 2 else 0.2 * (1 - min(1, (t - 2) / 8)) ** 2,
    ),
    (optim.staircase(0.2, every=3, factor=0.5, warmup=2), lambda t: 0.1 * t if t < 2 else 0.2 * 0.5 ** ((t - 2) // 3)),
    (optim.inverse_sqrt(0.2, warmup=5), lambda t: 0.04 * t if t < 5 else 0.2 * math.sqrt(5 / t)),
    (optim.one_cycle(0.2, steps=10), lambda t: one_cycle(t, 0.2, 10, 0.3)),
    (optim.one_cycle(0.2, steps=8, rise=0.1), lambda t: one_cycle(t, 0.2, 8, 0.1)),
    (
        optim.joined([optim.linear(0.2, steps=4), optim.staircase(0.1, every=2)], [5]),
        lambda t: 0.2 - 0.05 * min(4, t) if t < 5 else 0.1 * 0.1 ** ((t - 5) // 2),
    ),
]


@pytest.mark.parametrize(("schedule", "formula"), FORMULAS, ids=[str(each) for each, _ in FORMULAS])
def test_a_schedule_is_its_formula(schedule: optim.Schedule, formula: Callable[[int], float]) -> None:
    found = [schedule(t) for t in range(20)]
    np.testing.assert_allclose(found, [formula(t) for t in range(20)], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("target", ["numpy", "cpu:threads=1"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_takes_the_rate_of_its_count_also_from_a_checkpoint_on(
    target: str, accumulate: int, tmp_path: Path
) -> None:
    """Σ w has the gradient 1: a step of SGD is the rate itself."""
    schedule = optim.joined([optim.one_cycle(0.2, steps=3), optim.cosine(0.3, steps=5, warmup=2)], [3])

    def model(x):  # type: ignore[no-untyped-def]
        return (fp.nn.parameter("w", (3,)) * x).mean()

    graph = fp.trace(model, fp.spec((3,)))
    step = fp.compile(graph, fp.losses.mean, optim.SGD(schedule), target=target, accumulate=accumulate)
    assert [slot.name for slot in step.program.inputs] == ["x"]
    session = step.bind()
    ones = np.full((3,) if accumulate == 1 else (accumulate, 3), 3.0, np.float32)
    for t in range(9):
        if t == 4:
            session.save(tmp_path / "w")
            session = step.bind(seed=7)
            session.load(tmp_path / "w")
        session.parameters["w"] = np.zeros(3, np.float32)
        session.step({"x": ones})
        np.testing.assert_array_equal(session.parameters["w"], np.full(3, -np.float32(schedule(t))))
    with pytest.raises(fp.InputError, match="learning_rate"):
        session.step({"x": ones, "learning_rate": 0.1})


def test_a_step_that_the_loss_scale_leaves_out_does_not_count() -> None:
    schedule = optim.linear(0.1, steps=4)
    session = fp.compile(quartic(shapes=SHAPES), optimizer=optim.NAdam(schedule), precision="fp16").bind()
    given = [
        {name: x.astype(np.float32) for name, x in each.items()}
        for each in batches(np.random.default_rng(0), 3, SHAPES)
    ]
    again = fp.compile(quartic(shapes=SHAPES), optimizer=optim.NAdam(schedule), precision="fp16").bind()
    for i, batch in enumerate(given):
        session.step(batch)
        if i == 1:
            again.step({"x_w": np.full(3, np.inf, np.float32)})
        again.step(batch)
    assert session.steps_done == again.steps_done == 3
    for name in ("w", "w/first_moment", "momentum_product"):
        np.testing.assert_array_equal(session.stored[name], again.stored[name])


def test_groups_have_a_factor_of_the_rate() -> None:
    shapes = {"body.w": (2,), "head.w": (2,)}
    schedule = optim.constant(0.1, warmup=4)
    groups = [optim.Group("head", rate=3.0)]
    session = fp.compile(quartic(shapes=shapes), optimizer=optim.SGD(schedule, groups=groups)).bind()
    given = {f"x_{name}": np.full(2, 0.5, np.float32) for name in shapes}
    session.step(given)
    assert not session.parameters["head.w"].any()  # the first rate is 0
    session.step(given)
    np.testing.assert_allclose(session.parameters["head.w"], 3 * session.parameters["body.w"], rtol=1e-6)
    np.testing.assert_allclose(session.parameters["body.w"], 0.025 * 4 * 0.5**3, rtol=1e-6)


def test_a_schedule_says_what_it_is() -> None:
    assert str(optim.cosine(1e-3, steps=9, warmup=2)) == "cosine(0.001, steps=9, warmup=2, end=0.0)"
    for schedule, _ in FORMULAS:
        assert eval(str(schedule), vars(optim)) == schedule


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optim.cosine(-1.0, steps=3), "a learning rate must be in"),
        (lambda: optim.cosine(1.0, steps=0), "steps must be a whole number"),
        (lambda: optim.cosine(1.0, steps=3, warmup=3), "end before a warm-up"),
        (lambda: optim.cosine(1.0, steps=3, end=-0.1), "end must be in"),
        (lambda: optim.polynomial(1.0, steps=3, power=0), "power must be in"),
        (lambda: optim.staircase(1.0, every=0), "every must be"),
        (lambda: optim.inverse_sqrt(1.0, warmup=0), "warmup must be"),
        (lambda: optim.one_cycle(1.0, steps=1), "steps must be"),
        (lambda: optim.one_cycle(1.0, steps=9, rise=1.0), "rise must be in"),
        (lambda: optim.joined([optim.constant(1.0)], []), "1 schedules have 0"),
        (lambda: optim.joined([optim.constant(1.0)] * 3, [5, 5]), "ascending"),
        (lambda: optim.joined([optim.constant(1.0), 0.1], [5]), "must be a Schedule"),
        (lambda: optim.constant(1.0)(-1), "a number of updates"),
    ],
)
def test_what_cannot_be_meant_is_told(make: Callable[[], object], message: str) -> None:
    with pytest.raises(fp.UsageError, match=message):
        make()

"""Learning rates beside those of PyTorch, optax and Hugging Face, update by update."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make setup-torch")

from foreplan.passes import optimizer as optim  # noqa: E402
from tests.profile import pick  # noqa: E402

SEEDS = range(pick(1, 3, 20))


def in_torch(make: Any, count: int, rate: float) -> list[float]:
    """The rates that a scheduler of PyTorch's gives to the first updates."""
    optimizer = torch.optim.SGD([torch.zeros((), requires_grad=True)], lr=rate)
    scheduler = make(optimizer)
    found = []
    for _ in range(count):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def check(ours: optim.Schedule, theirs: list[float]) -> None:
    np.testing.assert_allclose([ours(t) for t in range(len(theirs))], theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_those_of_pytorch(seed: int) -> None:
    from torch.optim import lr_scheduler as torch_

    rng = np.random.default_rng(seed)
    rate, end, steps = float(rng.uniform(0.01, 1)), float(rng.uniform(0, 0.01)), int(rng.integers(5, 40))
    every, factor, power = int(rng.integers(1, 7)), float(rng.uniform(0.1, 0.9)), float(rng.uniform(0.5, 3))
    rise, start, final = float(rng.uniform(0.2, 0.8)), float(rng.uniform(2, 30)), float(rng.uniform(2, 1e4))
    check(
        optim.cosine(rate, steps=steps, end=end),
        in_torch(lambda o: torch_.CosineAnnealingLR(o, steps, end), steps + 1, rate),
    )
    check(
        optim.staircase(rate, every=every, factor=factor), in_torch(lambda o: torch_.StepLR(o, every, factor), 30, rate)
    )
    check(
        optim.polynomial(rate, steps=steps, power=power),
        in_torch(lambda o: torch_.PolynomialLR(o, steps, power), steps + 5, rate),
    )
    check(
        optim.one_cycle(rate, steps=steps, rise=rise, start=start, final=final),
        in_torch(
            lambda o: torch_.OneCycleLR(
                o, rate, total_steps=steps, pct_start=rise, div_factor=start, final_div_factor=final
            ),
            steps - 1,
            rate,
        ),
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_those_of_optax(seed: int) -> None:
    optax = pytest.importorskip("optax", reason="Optax is not installed: make setup-torch")
    import jax

    rng = np.random.default_rng(seed)
    rate, end, warmup = float(rng.uniform(0.01, 1)), float(rng.uniform(0, 0.01)), int(rng.integers(1, 9))
    steps, power, hold = warmup + int(rng.integers(2, 40)), float(rng.uniform(0.5, 3)), int(rng.integers(1, 9))
    every, factor = int(rng.integers(1, 7)), float(rng.uniform(0.1, 0.9))
    with jax.enable_x64(True):
        rising = optax.linear_schedule(0.0, rate, warmup)
        falling = optax.polynomial_schedule(rate, end, power, steps - warmup)
        stairs = optax.exponential_decay(rate, every, factor, staircase=True)
        cosine = optax.warmup_cosine_decay_schedule(0.0, rate, warmup, steps, end)
        pairs = [
            (optim.constant(rate, warmup=warmup), rising),
            (optim.cosine(rate, steps=steps, warmup=warmup, end=end), cosine),
            (
                optim.polynomial(rate, steps=steps, power=power, warmup=warmup, end=end),
                optax.join_schedules([rising, falling], [warmup]),
            ),
            (
                optim.linear(rate, steps=steps, warmup=warmup, end=end),
                optax.join_schedules([rising, optax.linear_schedule(rate, end, steps - warmup)], [warmup]),
            ),
            (
                optim.staircase(rate, every=every, factor=factor, warmup=warmup),
                optax.join_schedules([rising, stairs], [warmup]),
            ),
            (
                optim.joined(
                    [
                        optim.constant(rate, warmup=warmup),
                        optim.constant(end),
                        optim.cosine(rate, steps=steps, warmup=warmup, end=end),
                    ],
                    [warmup + 1, warmup + 1 + hold],
                ),
                optax.join_schedules([rising, optax.constant_schedule(end), cosine], [warmup + 1, warmup + 1 + hold]),
            ),
        ]
        for ours, theirs in pairs:
            check(ours, [float(theirs(t)) for t in range(steps + 12)])


def test_that_of_hugging_face() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: make setup-torch")
    theirs = in_torch(lambda o: transformers.get_inverse_sqrt_schedule(o, 7), 50, 0.3)
    check(optim.inverse_sqrt(0.3, warmup=7), theirs)

"""Kernels measured on this machine: what is measured is kept, and decides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import foreplan as fp
from foreplan.base import disk_cache
from foreplan.frontend import nn
from foreplan.graph import Graph, Op
from foreplan.runtime.cpu import tune
from foreplan.runtime.cpu.kernel import CpuKernel
from foreplan.runtime.cpu.kernels import winograd
from foreplan.runtime.cpu.target import CpuTarget
from tests.cpu.check import needs_onednn

pytestmark = needs_onednn()


@pytest.fixture(autouse=True)
def nothing_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(disk_cache, "_folder", lambda: tmp_path)
    monkeypatch.setattr(tune, "measured", lambda threads: (100 * 10**9, 10 * 10**9))
    tune.prices.cache_clear()
    yield
    tune.prices.cache_clear()


def model(batch: int = 2) -> Graph:
    """Two convolutions of 3 × 3 taps, each of which may be run in several ways."""

    def two(x: Any) -> Any:
        return nn.conv(nn.relu(nn.conv(x, 32, 3, padding=1, name="first")), 32, 3, padding=1, name="second")

    return fp.trace(two, fp.spec((batch, 16, 20, 20)))


def step(graph: fp.Graph) -> fp.Compiled:
    return fp.compile(graph, fp.losses.mean, fp.optim.SGD(0.1), target="cpu:threads=1", tune=True)


def ways(step: fp.Compiled) -> Counter[str]:
    calls = [step.program.calls[s.action] for s in step.plan.steps]
    return Counter(call.kernel for call in calls if call.op.name.startswith("conv"))


@pytest.mark.parametrize("fast", ["winograd", "onednn"])
def test_the_fastest_kernels_run(fast: str, monkeypatch: pytest.MonkeyPatch) -> None:

    def seconds(op: Op, kernel: CpuKernel, *others: object) -> float:
        way = "winograd" if isinstance(kernel, winograd.Convolution | winograd.WeightGradient) else "onednn"
        return 1e-4 if way == fast else 1e-3

    monkeypatch.setattr(tune, "_seconds", seconds)
    first = step(model())
    assert set(ways(first)) == {fast}
    assert step(model()).plan == first.plan
    times = [first.program.actions[s.action].nanoseconds for s in first.plan.steps]
    assert set(times) <= {100_000, 1_000_000}


def test_each_kernel_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = step(model())
    monkeypatch.setattr(tune, "_seconds", None)
    tune.prices.cache_clear()
    again = step(model())
    assert again.program.digest == measured.program.digest and again.plan == measured.plan
    with pytest.raises(TypeError):
        step(model(batch=3))


def test_damaged_prices_are_measured_again(tmp_path: Path) -> None:
    measured = step(model())
    (file,) = tmp_path.glob("prices-*.json")
    file.write_bytes(file.read_bytes()[:-40])
    tune.prices.cache_clear()
    again = step(model())
    assert [a.name for a in again.program.actions if a.nanoseconds > 0]
    assert len(again.program.values) == len(measured.program.values)


def test_a_measured_step_gives_what_a_predicted_one_gives() -> None:
    x = np.random.default_rng(0).standard_normal((2, 16, 20, 20)).astype(np.float32)
    tuned, plain = (
        fp.compile(model(), fp.losses.mean, fp.optim.SGD(0.1), target=CpuTarget(1, tune=on)).bind(seed=1)
        for on in (True, False)
    )
    for _ in range(3):
        a, b = tuned.step({"x": x}).loss, plain.step({"x": x}).loss
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_a_target_that_measures_nothing_says_so() -> None:
    with pytest.raises(fp.UsageError, match="only cpu has"):
        fp.compile(model(), target="numpy", tune=True)


def test_nothing_is_measured_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> None:
        raise AssertionError("prices that were measured")

    with monkeypatch.context() as patched:
        patched.setattr(tune, "prices", refused)
        assert fp.lower(model(), CpuTarget(1)).actions
        with pytest.raises(AssertionError, match="were measured"):
            fp.lower(model(), CpuTarget(1, tune=True))

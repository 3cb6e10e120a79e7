"""`--accumulate` in every command that takes it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import foreplan as fp
from tests.cli.shell import answer, foreplan
from tests.profile import pick

MODEL = "mlp:width=8,layers=2,inputs=6,classes=3"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    target = rng.integers(0, 3, 50)
    x = rng.normal(size=(50, 6)).astype(np.float32)
    x[np.arange(50), target] += 3
    np.savez(tmp_path / "data.npz", x=x, target=target)
    return tmp_path / "data.npz"


def test_training_equals_training_with_one_large_batch(tmp_path: Path, data: Path) -> None:
    from safetensors.numpy import load_file

    options = ("--data", data, "--epochs", 3, "--lr", 0.1, "--clip-norm", 0.5)
    parts = answer("train", MODEL, "--batch", 3, "--accumulate", 4, *options, "-o", tmp_path / "parts")
    whole = answer("train", MODEL, "--batch", 12, *options, "-o", tmp_path / "whole")
    assert parts["steps"] == whole["steps"] == 12
    np.testing.assert_allclose(parts["losses"], whole["losses"], rtol=1e-5)
    ours, expected = load_file(tmp_path / "parts"), load_file(tmp_path / "whole")
    assert set(ours) == set(expected)
    for name, array in expected.items():
        np.testing.assert_allclose(ours[name], array, rtol=1e-4, atol=1e-6)


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, data: Path) -> None:
    options = ("train", MODEL, "--batch", 4, "--accumulate", 3, "--data", data, "--optimizer", "adamw")
    whole = answer(*options, "--steps", 9, "-o", tmp_path / "whole")
    half = answer(*options, "--steps", 5, "-o", tmp_path / "part")
    rest = answer(*options, "--steps", 9, "--resume", tmp_path / "part", "-o", tmp_path / "part")
    assert half["losses"] + rest["losses"] == whole["losses"]
    assert (tmp_path / "part").read_bytes() == (tmp_path / "whole").read_bytes()


def test_the_estimate_counts_the_kept_gradients() -> None:
    plain, parts = (answer("estimate", MODEL, "--batch", 64, *more) for more in ((), ("--accumulate", 5)))
    assert (plain["accumulate"], parts["accumulate"]) == (1, 5)
    gradients = sum(4 * value.type.size for value in fp.models.build(MODEL).parameters)
    assert parts["persistent_bytes"] - plain["persistent_bytes"] == gradients + 8  # and the loss and the count
    assert parts["categories"]["gradients"] >= gradients
    assert 4 * plain["flops"] < parts["flops"] < 5.5 * plain["flops"]
    assert "on numpy, 5 micro-batches" in foreplan("estimate", MODEL, "--accumulate", 5).stdout


def test_a_plan_of_both_halves(tmp_path: Path, data: Path) -> None:
    path = tmp_path / "step.plan"
    made = answer("plan", MODEL, "--batch", 4, "--accumulate", 3, "-o", path)
    checked = answer("verify", path)
    assert checked["verified"] is True
    assert checked["accumulate"] == 3 and checked["arena_bytes"] == made["arena_bytes"]
    assert answer("view", path)["persistent_bytes"] == made["persistent_bytes"]
    assert answer("train", path, "--data", data)["steps"] == 4
    assert "has decided on --accumulate" in foreplan("estimate", path, "--accumulate", 3, code=2).stderr
    foreplan("view", path, "-o", tmp_path / "map.csv")
    assert ",hidden0.weight/gradient," in (tmp_path / "map.csv").read_text()
    assert answer("diff", path, path)["bytes"]["arena_bytes"]["after"] == made["arena_bytes"]


def test_bench_runs_all_micro_batches() -> None:
    figures = answer("bench", MODEL, "--batch", 4, "--accumulate", 3, "--steps", 2)
    assert figures["accumulate"] == 3
    assert figures["planned_bytes"] == figures["arena_bytes"]


def test_what_fits_leaves_room_for_the_gradients() -> None:
    memory, once = 200_000, ("--max-extra-time", 0)
    plain, parts = (answer("fit", MODEL, "--memory", memory, *once, *more) for more in ((), ("--accumulate", 2)))
    assert parts["batch"] < plain["batch"]
    assert parts["arena_bytes"] <= memory
    over = answer("estimate", MODEL, "--batch", parts["batch"] + 1, "--accumulate", 2, "--remat", "off")
    assert over["arena_bytes"] > memory
    foreplan("fit", MODEL, "--memory", 2000, "--accumulate", 2, *once, code=3)


def test_no_point_of_the_curve_is_below_what_the_update_needs() -> None:
    options = (f"gpt2_small:batch=2,seq=32,layers={pick(1, 1, 2)},width=16,heads=2,vocabulary=30", "--accumulate", 2)
    update = fp.compile(
        fp.models.build(options[0]), fp.losses.cross_entropy, fp.optim.Nesterov(0.1), accumulate=2
    ).update
    assert update is not None
    points = answer("pareto", *options)["points"]
    assert min(point["arena_bytes"] for point in points) >= update.plan.arena_bytes
    assert (
        max(point["arena_bytes"] for point in points) == answer("estimate", *options, "--remat", "off")["arena_bytes"]
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("estimate", MODEL, "--accumulate", 0), "'--accumulate'"),
        (("estimate", MODEL, "--accumulate", "x"), "'--accumulate'"),
        (("estimate", MODEL, "--accumulate", 2, "--infer"), "leave one of them out"),
        (("train", MODEL, "--batch", 8, "--accumulate", 8, "--data", "data.npz"), "a step takes 64"),
    ],
)
def test_wrong_use(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[object, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in foreplan(*arguments, code=2).stderr

"""`accumulate="auto"`: the given batch in as few micro-batches as fit."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest

import foreplan as fp
from tests.cli.shell import answer, foreplan
from tests.fit.card import FIXED, MIB, small_card

SIZES = "width=64,layers=6,inputs=16,classes=5"
OPTIMIZER = fp.optim.Nesterov(0.01)


def make(batch: int = 96) -> fp.Graph:
    return fp.models.build(f"mlp:{SIZES}", batch=batch)


def step(graph: object, **options: object) -> fp.Compiled:
    return fp.compile(graph, fp.losses.cross_entropy, OPTIMIZER, **options)  # type: ignore[arg-type]


@cache
def arena(count: int) -> int:
    return step(make(96 // count), accumulate=count).arena_bytes


@pytest.mark.parametrize("parts", [1, 2, 3, 8, 32, 96])
def test_the_fewest_parts_that_fit(parts: int) -> None:
    found = step(make, accumulate="auto", budget=arena(parts))
    assert found.arena_bytes <= arena(parts) == found.plan.budget
    assert 96 % found.accumulate == 0 and found.accumulate <= parts
    fewer = max((k for k in range(1, found.accumulate) if 96 % k == 0), default=None)
    assert fewer is None or arena(fewer) > arena(parts)
    assert found.options.accumulate == found.accumulate and found.options.budget == arena(parts)
    assert found.program.inputs[0].operand.type.shape[0] == 96 // found.accumulate


def test_parts_of_one_sample_recompute_where_they_must() -> None:
    def tokens(batch: int = 4) -> fp.Graph:
        return fp.models.gpt2_small(batch, seq=64, layers=2, width=32, heads=2, vocabulary=50)

    budget = step(tokens(1), accumulate=4).arena_bytes - 64
    found = step(tokens, accumulate="auto", budget=budget)
    assert found.accumulate == 4 and found.arena_bytes <= budget
    with pytest.raises(fp.DoesNotFitError) as caught:
        step(make, accumulate="auto", budget="2KiB")
    assert caught.value.capacity == 2048
    with pytest.raises(fp.DoesNotFitError, match="96 micro-batches of one sample"):
        step(make, accumulate="auto", budget="2KiB", checkpoint=["hidden0..hidden3"])


def test_the_parts_train_as_the_whole_batch_does(tmp_path: Path) -> None:
    whole, parts = step(make(), accumulate=1), step(make, accumulate="auto", budget=arena(4))
    count = parts.accumulate
    assert count > 1
    rng = np.random.default_rng(0)
    x, target = rng.normal(size=(96, 16)).astype(np.float32), rng.integers(0, 5, 96)
    one, many = whole.bind(), parts.bind()
    for _ in range(3):
        expected = one.step({"x": x, "target": target}).loss
        found = many.step({"x": x.reshape(count, -1, 16), "target": target.reshape(count, -1)}).loss
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    parts.save(tmp_path / "step.plan")
    assert fp.load_plan(tmp_path / "step.plan").accumulate == count


def test_a_card_gives_its_memory(tmp_path: Path) -> None:
    target = small_card(tmp_path, FIXED + 10 * MIB)
    found = step(partial(make, batch=8192), target=target, accumulate="auto")
    assert found.accumulate > 1 and found.verdict.fits
    fewer = max(k for k in range(1, found.accumulate) if 8192 % k == 0)
    assert step(make(8192 // fewer), target=target, accumulate=fewer).counted_bytes > FIXED + 10 * MIB


@pytest.mark.parametrize(
    ("graph", "options", "message"),
    [
        (make(), {"budget": "1MiB"}, "give a function with a parameter `batch`.*<Graph mlp"),
        (lambda size: make(size), {"budget": "1MiB"}, "give a function with a parameter `batch`"),
        (lambda batch: make(batch), {"budget": "1MiB"}, "whose default is the whole batch"),
        (partial(make, batch=0), {"budget": "1MiB"}, "the default of batch"),
        (make, {}, "names no machine: give a budget"),
        (make, {"budget": 0.5}, "0.5 is a share"),
    ],
)
def test_wrong_use(graph: object, options: dict[str, object], message: str) -> None:
    with pytest.raises(fp.UsageError, match=message):
        step(graph, accumulate="auto", **options)


def test_only_training_has_gradients_to_accumulate() -> None:
    with pytest.raises(fp.UsageError, match="pass an optimizer"):
        fp.compile(make, accumulate="auto", budget="1MiB")
    with pytest.raises(fp.UsageError, match="accumulate must be a whole number"):
        step(make, accumulate="most")
    with pytest.raises(fp.UsageError, match="a model must be a Graph"):
        step(make, accumulate=2)


def test_the_command_line_splits_the_batch_that_it_is_given(tmp_path: Path) -> None:
    model = f"mlp:{SIZES}"
    options = (model, "--batch", 96, "--accumulate", "auto", "--budget", arena(8))
    found = answer("estimate", *options)
    assert found["accumulate"] > 1 and found["arena_bytes"] <= arena(8)
    assert f"{found['accumulate']} micro-batches" in foreplan("estimate", *options).stdout
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "data.npz", x=rng.normal(size=(200, 16)).astype(np.float32), target=rng.integers(0, 5, 200))
    trained = answer("train", *options, "--data", tmp_path / "data.npz", "--epochs", 1)
    whole = answer("train", model, "--batch", 96, "--data", tmp_path / "data.npz", "--epochs", 1)
    np.testing.assert_allclose(trained["losses"], whole["losses"], rtol=1e-5)
    for command, code in (("fit", 2), ("graph", 2)):
        budget = () if command == "fit" else ("--budget", "1MiB")
        foreplan(command, model, "--accumulate", "auto", *budget, code=code)
    foreplan("estimate", model, "--infer", "--accumulate", "auto", code=2)

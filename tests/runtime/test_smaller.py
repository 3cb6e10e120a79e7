"""Training steps with fewer samples than the step was compiled for, as the last of an epoch has them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import foreplan as fp
from foreplan import nn, spec, trace
from foreplan.graph import Graph
from foreplan.runtime.session import Session

TARGETS = ["numpy", "cpu:threads=1"]
LOSS = fp.losses.cross_entropy


def classifier(batch: int) -> Graph:
    """With batch norm and dropout."""

    def model(x: Any) -> Any:
        h = nn.relu(nn.batch_norm(nn.linear(x, 16, name="a"), name="norm"))
        return nn.linear(nn.dropout(h, 0.5), 3, name="head")

    return trace(model, spec((batch, 5)))


def data(count: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {"x": rng.standard_normal((count, 5)).astype(np.float32), "target": rng.integers(0, 3, count)}


def bound(batch: int, target: str = "numpy", **options: Any) -> Session:
    optimizer = fp.optim.AdamW(0.05, clip_norm=1.0, ema=0.9)
    return fp.compile(classifier(batch), LOSS, optimizer, target=target, **options).bind(seed=1)


BATCHES = [8, 8, 3, 8, 3, 5]


@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}, {"outputs": ["output"], "gradients": ["x"]}])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("by_steps", [False, True])
def test_it_is_the_step_of_that_batch(target: str, options: dict[str, Any], by_steps: bool) -> None:
    session = bound(8, target, **options)
    apart = {count: bound(count, target, **options) for count in set(BATCHES)}
    batches = [data(count, seed) for seed, count in enumerate(BATCHES)]
    given = session.allocated_bytes
    results = session.steps(batches) if by_steps else map(session.step, batches)
    held = dict(apart[8].stored)
    for batch, result in zip(batches, results):
        own = apart[len(batch["x"])]
        own.stored.update(held)
        expected = own.step(batch)
        held = dict(own.stored)
        assert result.loss == expected.loss
        for found, wanted in ((result.outputs, expected.outputs), (result.gradients, expected.gradients)):
            assert found.keys() == wanted.keys()
            assert all((found[name] == wanted[name]).all() for name in found)
    assert session.steps_done == len(BATCHES)
    assert session.allocated_bytes == given
    for name, array in held.items():
        np.testing.assert_array_equal(session.stored[name], array)


def test_the_random_state_goes_on() -> None:
    """Two smaller batches in a row are not dropped alike."""
    session = bound(8)
    weights = {name: array.copy() for name, array in session.parameters.items()}
    batch, losses = data(3), []
    for _ in range(4):
        session.parameters.update(weights)
        losses.append(session.step(batch).loss)
    assert len(set(losses)) == len(losses)


def test_a_loss_of_ones_own_with_its_shapes() -> None:
    labels = spec((8,), "int64")

    def loss(out: Any, target: Any = labels) -> Any:
        return nn.cross_entropy(out, target).mean()

    session, apart = (
        fp.compile(classifier(8), each, fp.optim.SGD(0.1), target="numpy").bind() for each in (loss, LOSS)
    )
    batch = data(3)
    assert session.step(batch).loss == pytest.approx(apart.step(batch).loss, rel=1e-6)


def test_checkpoints_and_averages_are_those_of_the_session(tmp_path: Any) -> None:
    session = bound(8)
    session.step(data(8))
    session.step(data(3))
    session.save(tmp_path / "c.safetensors")
    with session.averaged(), pytest.raises(fp.SessionError, match="leave the block"):
        session.step(data(3))
    loss = session.step(data(3, 1)).loss
    session.load(tmp_path / "c.safetensors")
    assert session.step(data(3, 1)).loss == loss


def test_what_interrupts_it_interrupts_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    session = bound(8)
    session.step(data(3))
    assert session._beside is not None
    small: Any = next(iter(session._beside.steps.values()))

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(small._body, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        session.step(data(3))
    for call in (lambda: session.step(data(8)), lambda: session.evaluate(data(8))):
        with pytest.raises(fp.SessionError, match="was interrupted"):
            call()


def mixes(x: Any) -> Any:
    h = nn.linear(x, 3, name="a")
    return h - h.mean(0)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"accumulate": 2}, "must have the shape .* leave a smaller batch out, or fill it up"),
        (
            {"prefetch": True},
            r"must have the shape \[8, 5\], and has \[3, 5\]. A smaller batch has no step.*leave that batch",
        ),
        ({"graph": trace(mixes, spec((8, 5)))}, "must have the shape .* cannot take 3 instead: .*leave that batch out"),
    ],
)
def test_what_has_no_step_for_it_is_told(options: dict[str, Any], told: str) -> None:
    graph = options.pop("graph", None) or classifier(8)
    session, batch = fp.compile(graph, LOSS, fp.optim.SGD(0.1), target="numpy", **options).bind(), data(3)
    if "accumulate" in options:
        batch = {name: np.stack([array, array]) for name, array in batch.items()}
    before = dict(session.stored)
    with pytest.raises(fp.InputError, match=told):
        session.step(batch)
    with pytest.raises(fp.InputError, match=told):
        next(session.steps([batch]))
    assert all((session.stored[name] == array).all() for name, array in before.items())


@pytest.mark.parametrize(
    ("batch", "told"),
    [
        ({**data(3), "target": data(4)["target"]}, "must have the shape"),
        ({"x": data(3)["x"]}, "'target' .* is missing"),
        (data(9), r"'x' must have the shape \[8, 5\], and has \[9, 5\]"),
        (data(0), "must have the shape"),
        ({**data(3), "x": data(3)["x"][:, :4]}, "must have the shape"),
        ({**data(8), "x": data(8)["x"][:, :4]}, "must have the shape .* A smaller batch has no step of its own"),
        ({**data(3), "y": 1}, "no input 'y'"),
    ],
)
def test_what_is_no_smaller_batch_is_refused_as_before(batch: dict[str, Any], told: str) -> None:
    with pytest.raises(fp.InputError, match=told):
        bound(8).step(batch)


def test_inference_takes_its_batch_alone() -> None:
    with pytest.raises(fp.InputError, match=r"must have the shape .*; `evaluate` takes any number of samples"):
        fp.compile(classifier(8), target="numpy").bind().step({"x": data(3)["x"]})

"""`Session.evaluate`: what the model gives for any number of samples, and nothing that is kept changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import foreplan as fp
from foreplan import nn, spec, trace
from foreplan.graph import Graph
from foreplan.lower.program import ARENA, STATE
from foreplan.runtime import beside
from foreplan.runtime.session import Session

TARGETS = ["numpy", "cpu:threads=1"]
LOSS = fp.losses.cross_entropy
_numpy: Any = np
LABELS, WEIGHTS = spec((8,), "int64"), spec((8,))


def classifier(batch: int = 8) -> Graph:
    """With batch norm and dropout, whose forms in inference are others."""

    def model(x: Any) -> Any:
        h = nn.relu(nn.batch_norm(nn.linear(x, 32, name="a"), name="norm"))
        return nn.linear(nn.dropout(h, 0.5), 3, name="head")

    return trace(model, spec((batch, 5)))


def data(count: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    target = rng.integers(0, 3, count)
    target[:1] = -100  # which does not count: the loss of all is no mean of means
    return {"x": rng.standard_normal((count, 5)).astype(np.float32), "target": target}


def bound(target: str = "numpy", optimizer: Any = None, graph: Graph | None = None, **options: Any) -> Session:
    graph = classifier() if graph is None else graph
    return fp.compile(graph, LOSS, optimizer or fp.optim.AdamW(0.05), target=target, **options).bind(seed=1)


def by_hand(session: Session, make: Callable[[int], Graph], count: int, batch: dict[str, np.ndarray]) -> Any:
    """What a model that was made for that batch gives, with its own session."""
    graph = fp.evaluation(make(count), LOSS, ["accuracy"])
    model = make(count)
    (inputs,) = ({value.name: batch[value.name] for value in model.inputs},)
    measured = fp.compile(graph, target=session.program.target).bind(share=session).step(batch).outputs
    outputs = fp.compile(model, target=session.program.target).bind(share=session).step(inputs).outputs
    return measured, outputs


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("count", [8, 3, 1, 11])
def test_it_is_what_a_model_of_that_batch_gives(target: str, count: int) -> None:
    session, batch = bound(target, accumulate=1), data(count, 7)
    batch["target"][-1] = 2
    session.step(data(8))
    result = session.evaluate(batch, metrics=["accuracy"])
    measured, outputs = by_hand(session, classifier, count, batch)
    assert result.loss == pytest.approx(float(measured["loss"]), rel=1e-6)
    assert result.metrics == {"accuracy": pytest.approx(float(measured["accuracy"]))}
    np.testing.assert_allclose(result.outputs["output"], outputs["output"], rtol=1e-6, atol=1e-7)
    assert session.evaluate({"x": batch["x"]}).loss is None
    assert session.evaluate({"x": batch["x"], "learning_rate": 0.5}, outputs=[]).outputs == {}


@pytest.mark.parametrize("target", TARGETS)
def test_training_goes_on_bit_for_bit(target: str) -> None:
    session, alone = (bound(target, fp.optim.AdamW(0.05, ema=0.9)) for _ in range(2))
    for step in range(4):
        assert session.step(data(8, step)).loss == alone.step(data(8, step)).loss
        for count in (8, 3):
            session.evaluate(data(count, 50), metrics=["accuracy"], ema=step % 2 == 1)
    for result in session.steps(data(8, step) for step in range(4, 6)):
        session.evaluate(data(5, 50))
        assert result.loss == alone.step(data(8, 4 if alone.steps_done == 4 else 5)).loss
    for name in alone.stored:
        np.testing.assert_array_equal(session.stored[name], alone.stored[name])


def test_it_runs_in_the_arena_of_the_step() -> None:
    step = fp.compile(classifier(), LOSS, fp.optim.AdamW(0.05), target="numpy")
    session = step.bind()
    before = session.allocated_bytes
    session.evaluate(data(8))
    session.evaluate(data(3))
    own = [step.evaluation(count).plan.heights for count in (8, 3)]
    assert all(heights[ARENA] <= step.plan.heights[ARENA] for heights in own)
    assert session.allocated_bytes == before + sum(heights[STATE] for heights in own)
    assert not any(heights[STATE] for heights in own)  # no constants


def test_what_does_not_fit_is_refused_with_figures() -> None:
    step = fp.compile(classifier(), LOSS, fp.optim.AdamW(0.05), target="numpy")
    session = step.bind()
    with pytest.raises(fp.DoesNotFitError, match=r"evaluate fewer samples at a time.*share=this session") as error:
        session.evaluate(data(1000))
    assert error.value.capacity == step.plan.heights[ARENA] < error.value.needed
    with pytest.raises(fp.DoesNotFitError):
        step.evaluation(1000)
    session.step(data(8))  # it goes on
    assert session.evaluate(data(8)).loss is not None


@pytest.mark.parametrize("target", TARGETS)
def test_a_larger_batch_is_planned_within_the_arena(target: str) -> None:
    """Where it does not fit as it is, the forward pass runs in parts."""

    def make(batch: int) -> Graph:
        def model(x: Any) -> Any:
            for i in range(4):
                x = nn.relu(nn.conv(x, 16, 3, padding=1, name=f"conv{i}"))
            return nn.linear(x.mean((2, 3)), 3, name="head")

        return trace(model, spec((batch, 3, 16, 16)))

    step, plain = fp.compile(make(4), LOSS, fp.optim.SGD(0.05), target=target), fp.compile(make(20), target=target)
    assert plain.plan.heights[ARENA] > step.plan.heights[ARENA] >= step.evaluation(20).plan.heights[ARENA]
    session, x = step.bind(), np.random.default_rng(0).standard_normal((20, 3, 16, 16)).astype(np.float32)
    (expected,) = plain.bind(share=session).step({"x": x}).outputs.values()
    np.testing.assert_allclose(session.evaluate({"x": x}).outputs["output"], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("options", [{"accumulate": 2}, {"precision": "bf16"}, {"budget": 0.98}, {"freeze": ["a"]}])
@pytest.mark.parametrize("target", TARGETS)
def test_options_of_the_step(target: str, options: dict[str, Any]) -> None:
    session, batch = bound(target, **options), data(3, 5)
    first = data(8)
    session.step({name: np.stack([each, each]) for name, each in first.items()} if "accumulate" in options else first)
    measured, outputs = by_hand(session, classifier, 3, batch)
    result = session.evaluate(batch)
    near = 0.05 if "precision" in options else 1e-5
    assert result.loss == pytest.approx(float(measured["loss"]), rel=near)
    np.testing.assert_allclose(result.outputs["output"], outputs["output"], rtol=near, atol=near)


def test_averages() -> None:
    session, batch = bound(optimizer=fp.optim.SGD(0.5, ema=0.5)), data(3)
    for step in range(3):
        session.step(data(8, step))
    apart = bound()
    state = session.state_dict(ema=True)
    for name in apart.parameters:
        apart.parameters[name] = state[name]
    for name in set(state) - set(apart.parameters):
        apart.stored[name] = state[name]
    with session.averaged():
        within = session.evaluate(batch).loss
    assert session.evaluate(batch, ema=True).loss == within == apart.evaluate(batch).loss
    assert session.evaluate(batch).loss != within
    with pytest.raises(fp.SessionError, match="keeps no averages"):
        apart.evaluate(batch, ema=True)


def test_adapters() -> None:
    def make(batch: int) -> Graph:
        return fp.lora(
            fp.models.build(f"gpt2_small:seq=6,layers=1,width=16,heads=2,vocabulary=20,batch={batch}"), rank=2
        )

    rng = np.random.default_rng(0)
    batch = {"tokens": rng.integers(0, 20, (4, 6)), "target": rng.integers(0, 20, (4, 6))}
    session, few = bound(graph=make(4)), {name: array[:3] for name, array in batch.items()}
    session.step(batch)
    measured, _ = by_hand(session, make, 3, few)
    assert session.evaluate(few).loss == pytest.approx(float(measured["loss"]), rel=1e-6)


def test_a_loss_of_ones_own_with_its_shapes() -> None:
    def loss(out: Any, target: Any = LABELS, weight: Any = WEIGHTS) -> Any:
        return (nn.cross_entropy(out, target) * weight).sum() / weight.sum()

    def hits(out: Any, target: Any = LABELS) -> Any:
        return (_numpy.argmax(out, 1) == target).astype(np.float32).mean()

    session = fp.compile(classifier(), loss, fp.optim.SGD(0.1), target="numpy").bind()
    rng = np.random.default_rng(1)
    batch = {"x": data(5)["x"], "target": rng.integers(0, 3, 5), "weight": rng.random(5).astype(np.float32)}
    result = session.evaluate(batch, metrics={"hits": hits})
    scores = result.outputs["output"].astype(np.float64)
    each = np.log(np.exp(scores).sum(1)) - scores[np.arange(5), batch["target"]]
    assert result.loss == pytest.approx((each * batch["weight"]).sum() / batch["weight"].sum(), rel=1e-5)
    assert result.metrics["hits"] == pytest.approx((scores.argmax(1) == batch["target"]).mean())


def test_a_session_without_a_loss() -> None:
    session = fp.compile(classifier(), target="numpy").bind()
    x = data(8)["x"]
    np.testing.assert_array_equal(
        session.evaluate({"x": x[:3]}).outputs["output"], session.step({"x": x}).outputs["output"][:3]
    )


@pytest.mark.parametrize(
    ("inputs", "options", "error", "told"),
    [
        ([1], {}, fp.InputError, "evaluate takes arrays by name"),
        ({}, {}, fp.InputError, "'x' .* is missing"),
        ({"x": data(3)["x"], "targets": data(3)["target"]}, {}, fp.InputError, "no input 'targets'"),
        ({"target": data(3)["target"]}, {}, fp.InputError, "'x' .* is missing"),
        ({**data(3), "target": data(4)["target"]}, {}, fp.InputError, r"'target' must have the shape \[3\]"),
        ({"x": np.zeros((3, 6), np.float32)}, {}, fp.UnsupportedError, "in more than the number of samples"),
        ({"x": np.zeros((2, 8, 5), np.float32)}, {}, fp.UnsupportedError, "in more than the number of samples"),
        ({"x": np.zeros((0, 5), np.float32)}, {}, fp.UnsupportedError, "samples"),
        ({"x": data(3)["x"]}, {"metrics": ["accuracy"]}, fp.UsageError, "metrics compare outputs with targets"),
        (data(3), {"metrics": ["accuracies"]}, fp.UsageError, "accuracy"),
        (data(3), {"outputs": ["scores"]}, fp.UsageError, "no output 'scores'"),
        (data(3), {"metrics": {"output": "accuracy"}}, fp.UsageError, "'output' is an output of the model"),
        (data(3), {"ema": 1}, fp.UsageError, "ema"),
    ],
)
def test_what_is_wrong_is_told(inputs: Any, options: dict[str, Any], error: type[Exception], told: str) -> None:
    session = bound()
    with pytest.raises(error, match=told):
        session.evaluate(inputs, **options)
    session.step(data(8))


def test_what_has_no_evaluation_says_so(tmp_path: Path) -> None:
    def mixes(x: Any) -> Any:
        h = nn.linear(x, 3, name="a")
        return h - h.mean(0)

    session = bound(graph=trace(mixes, spec((8, 5))))
    assert session.evaluate(data(8)).loss is not None
    with pytest.raises(fp.UnsupportedError, match=r"cannot take 3 instead: .*share=this session"):
        session.evaluate(data(3))
    step = fp.compile(classifier(), LOSS, fp.optim.SGD(0.1), target="numpy")
    step.save(tmp_path / "step.plan")
    with pytest.raises(fp.UsageError, match="a plan file does not hold the model"):
        fp.load_plan(tmp_path / "step.plan").bind().evaluate(data(8))
    with pytest.raises(fp.UsageError, match="a step of 2 ranks has no evaluation"):
        fp.compile(classifier(), LOSS, fp.optim.SGD(0.1), target="numpy", ranks=2).evaluation()
    with pytest.raises(fp.SessionError, match=r"compile\(…\)\.bind\(\)"):
        Session(step.program, step.plan).evaluate(data(8))


def test_an_interrupted_step_is_not_evaluated() -> None:
    session = bound()
    session._broken = "KeyboardInterrupt"
    with pytest.raises(fp.SessionError, match="was interrupted"):
        session.evaluate(data(8))


def test_functions_made_anew_for_each_call_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "MOST_EVALUATIONS", 3)
    session, batch, held = bound(), data(8), []
    table = np.arange(3, dtype=np.float32)  # a constant of the evaluation
    for i in range(6):
        metric = lambda y, target=LABELS, i=i: (y @ (table + np.float32(i))).sum() + 0 * target.sum()  # noqa: E731
        found = session.evaluate(batch, metrics={"m": metric})
        (y,) = found.outputs.values()
        assert found.metrics["m"] == pytest.approx(float((y @ (table + i)).sum()), rel=1e-5)
        held.append(session.allocated_bytes)
    assert held[2] == held[5] > held[0]

"""Steps that accumulate the gradients of micro-batches: equal to one large batch, in less memory."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

import foreplan as fp
from foreplan import passes
from foreplan.frontend.losses import attach_loss
from foreplan.graph import Graph, Kind, parse_graph
from tests.oracle.jax_graph import loss_and_gradients
from tests.runtime.micro_batches import Arrays, compiled, data_for, perceptron, same
from tests.runtime.test_session import classifier

COUNT, EACH = 4, 2  # micro-batches a step, and samples in each


def convolutions(batch: int) -> Graph:
    def model(x: fp.frontend.Tensor) -> fp.frontend.Tensor:
        x = fp.nn.relu(fp.nn.conv(x, 4, 3, padding=1, name="first"))
        x = fp.nn.max_pool(fp.nn.relu(fp.nn.conv(x, 6, 3, padding=1, name="second")), 2)
        return fp.nn.linear(fp.nn.flatten(x), 5, name="head")

    return fp.trace(model, fp.spec((batch, 2, 6, 6)), name="convolutions")


def gpt(batch: int) -> Graph:
    return fp.models.build(f"gpt2_small:batch={batch},seq=6,layers=1,width=16,heads=2,vocabulary=40")


def tall(batch: int) -> Graph:
    """A loss over so many classes that it is computed in chunks."""
    return fp.models.build(f"gpt2_small:batch={batch},seq=512,layers=1,width=4,heads=2,vocabulary=3000")


def in_float64(graph: Graph) -> Graph:
    return parse_graph(graph.as_text().replace("float32", "float64"))


def joined(data: Arrays) -> Arrays:
    """Micro-batches as one batch."""
    return {name: array.reshape(-1, *array.shape[2:]) for name, array in data.items()}


EQUAL = {
    "mlp, sgd": (perceptron, fp.optim.SGD(0.3, weight_decay=0.01)),
    "mlp, momentum, clipped": (perceptron, fp.optim.Momentum(0.3, clip_norm=0.1)),
    "mlp, adam": (perceptron, fp.optim.Adam(1e-2)),
    "mlp, adamw, clipped": (perceptron, fp.optim.AdamW(1e-2, clip_norm=0.1)),
    "mlp, limit not reached": (perceptron, fp.optim.SGD(0.3, clip_norm=1e6)),
    "convolutions, nesterov": (convolutions, fp.optim.Nesterov(0.1)),
    "convolutions, adam, clipped": (convolutions, fp.optim.Adam(1e-2, clip_norm=0.05)),
    "gpt, sgd": (gpt, fp.optim.SGD(0.5)),
    "gpt, adamw, clipped": (gpt, fp.optim.AdamW(1e-2, clip_norm=0.05)),
    "chunked loss, sgd": (tall, fp.optim.SGD(0.5)),
}


@pytest.mark.parametrize("case", EQUAL)
def test_micro_batches_equal_one_batch_of_all_their_samples(case: str) -> None:
    build, optimizer = EQUAL[case]
    parts, whole = (
        compiled(in_float64(build(batch)), optimizer, accumulate=count)
        for batch, count in ((EACH, COUNT), (EACH * COUNT, 1))
    )
    assert any(call.op.name == "linear_cross_entropy" for call in parts.program.calls) is case.startswith("chunked")
    ours, expected = parts.bind(seed=1), whole.bind(seed=1)
    assert set(ours.stored) == set(expected.stored)
    for seed in range(3):
        data = data_for(parts, seed, (COUNT,))
        loss = expected.step(joined(data)).loss
        assert ours.step(data).loss == pytest.approx(loss, rel=1e-12)
    largest = max(np.abs(expected.stored[name]).max() for name in expected.stored)
    for name in expected.stored:
        # A gradient that is zero but for rounding, such as that of a key's bias, is judged beside the others.
        scale = max(np.abs(expected.stored[name]).max(), 1e-6 * largest)
        assert np.abs(ours.stored[name] - expected.stored[name]).max() <= 1e-10 * scale, name
    assert ours.steps_done == expected.steps_done == 3


def test_a_step_equals_jax() -> None:
    """Mean gradients of the micro-batches by jax.grad, clipped by their norm and applied in NumPy."""
    graph, rate, limit = in_float64(perceptron(EACH)), 0.5, 0.1
    step = compiled(graph, fp.optim.SGD(rate, clip_norm=limit), accumulate=3)
    session = step.bind(seed=2)
    forward = passes.training_form(passes.SelectOutputs([])(attach_loss(graph, fp.losses.cross_entropy)))
    constants = {}
    for value in forward.stored:
        constants[value.name] = np.empty(value.shape, value.dtype.numpy)
        if value.kind is Kind.CONSTANT:
            assert value.init is not None
            value.init.fill(constants[value.name], np.random.default_rng(0))
    for seed in range(2):
        before = dict(session.parameters)
        data = data_for(step, seed, (3,))
        found = [loss_and_gradients(forward, {n: x[i] for n, x in data.items()}, constants | before) for i in range(3)]
        result = session.step(data)
        assert result.loss == pytest.approx(np.mean([loss for loss, _ in found]), rel=1e-12)
        mean = {name: np.mean([gradients[name] for _, gradients in found], axis=0) for name in before}
        norm = np.sqrt(sum((gradient**2).sum() for gradient in mean.values()))
        assert norm > limit
        for name, gradient in mean.items():
            expected = before[name] - np.float32(rate) * gradient * (limit / norm)
            np.testing.assert_allclose(session.parameters[name], expected, rtol=1e-10, atol=1e-13)


def test_running_statistics_follow_every_micro_batch() -> None:
    def model(x: fp.frontend.Tensor) -> fp.frontend.Tensor:
        return fp.nn.linear(fp.nn.flatten(fp.nn.batch_norm(x, name="norm")), 3, name="head")

    step = compiled(in_float64(fp.trace(model, fp.spec((5, 2, 3, 3)))), accumulate=3)
    session = step.bind()
    mean, variance = session.stored["norm.running_mean"], session.stored["norm.running_var"]
    for seed in range(2):
        data = data_for(step, seed, (3,))
        session.step(data)
        for x in data["x"]:
            mean = 0.9 * mean + 0.1 * x.mean((0, 2, 3))
            variance = 0.9 * variance + 0.1 * x.var((0, 2, 3))
    np.testing.assert_allclose(session.stored["norm.running_mean"], mean, rtol=1e-12)
    np.testing.assert_allclose(session.stored["norm.running_var"], variance, rtol=1e-12)


def dropping(batch: int = 8) -> Graph:
    def model(x: fp.frontend.Tensor) -> dict[str, fp.frontend.Tensor]:
        x = fp.nn.dropout(x, 0.5)
        return {"kept": x, "logits": fp.nn.linear(x, 3, name="head")}

    graph = fp.trace(model, fp.spec((batch, 20)))
    return attach_loss(graph, fp.losses.cross_entropy, ["logits"])


def test_every_micro_batch_draws_another_mask_and_returns_its_outputs() -> None:
    step = fp.compile(dropping(), optimizer=fp.optim.SGD(0.1), accumulate=4, outputs=["kept"])
    session = step.bind(seed=3)
    data = data_for(step, 0, (4,)) | {"x": np.ones((4, 8, 20), np.float32)}
    kept = [session.step(data).outputs["kept"] for _ in range(2)]
    assert kept[0].shape == (4, 8, 20) and kept[0].base is None
    masks = {x.tobytes() for both in kept for x in both}
    assert len(masks) == 8
    assert all(set(np.unique(x)) == {0.0, 2.0} for both in kept for x in both)
    assert (step.bind(seed=3).step(data).outputs["kept"] == kept[0]).all()


def test_the_arena_is_that_of_one_micro_batch_and_the_gradients() -> None:
    size = "size=128,classes=10"
    parts = compiled(fp.models.build(f"resnet18:batch=8,{size}"), accumulate=4, remat="off")
    small, large = (compiled(fp.models.build(f"resnet18:batch={batch},{size}"), remat="off") for batch in (8, 32))
    gradients = sum(slot.operand.type.nbytes for slot in parts.program.stored if slot.kind is Kind.PARAMETER)
    assert parts.memory.persistent - small.memory.persistent == gradients + 8  # and the loss and the count
    assert parts.memory.categories[fp.planner.Category.GRADIENTS] >= gradients
    # Every stored value begins at a multiple of 64 bytes.
    padding = 64 * len(parts.program.stored)
    assert parts.memory.persistent < parts.arena_bytes <= small.arena_bytes + gradients + padding
    moving = large.arena_bytes - large.memory.persistent
    assert parts.arena_bytes - parts.memory.persistent < 0.35 * moving
    assert parts.arena_bytes < 0.85 * large.arena_bytes
    assert str(parts.memory).startswith("the body, run for each of 4 micro-batches (the update after them needs ")
    data = parts.estimate()
    assert data["accumulate"] == 4 and data["mode"] == "training"
    assert data["flops"] > 3.9 * small.estimate()["flops"]


@pytest.mark.thorough
def test_a_budget_counts_the_kept_gradients() -> None:
    graph = fp.models.build("gpt2_small:batch=8,seq=64,layers=3,width=32,heads=4,vocabulary=100")
    free = compiled(graph, accumulate=2, remat="off")
    budget = free.arena_bytes - (free.arena_bytes - free.memory.persistent) // 4
    tight = compiled(graph, accumulate=2, budget=budget)
    assert tight.arena_bytes <= budget < free.arena_bytes
    assert tight.memory.persistent == free.memory.persistent
    assert tight.estimate()["extra_flops_ratio"] > 0
    by_hand = compiled(graph, accumulate=2, checkpoint=["h.*"])
    sessions = [free.bind(), tight.bind(poison=True), by_hand.bind(poison=True)]
    data = data_for(free, 0, (2,))
    assert len({session.step(data).loss for session in sessions}) == 1
    for step, session in ((tight, sessions[1]), (by_hand, sessions[2])):
        assert len(step.plan.steps) > len(free.plan.steps) and same(sessions[0], session)
    with pytest.raises(fp.DoesNotFitError):
        compiled(graph, accumulate=2, budget=free.memory.persistent)


def test_a_gradient_that_is_no_number_is_gone_with_its_step() -> None:
    step = compiled(perceptron(2), fp.optim.SGD(0.0), accumulate=2)
    session = step.bind()
    data = data_for(step, 0, (2,))
    expected = session.step(data).loss
    stored = dict(session.parameters)
    session.step({**data, "x": np.full_like(data["x"], np.inf)})
    session.parameters.update(stored)
    assert session.step(data).loss == expected
    assert all(np.isfinite(session.parameters[name]).all() for name in stored)


def test_the_learning_rate_is_given_once() -> None:
    step = compiled(perceptron(2), fp.optim.SGD(0.1), accumulate=2)
    session, data = step.bind(), data_for(step, 0, (2,))
    before = dict(session.parameters)
    session.step({**data, "learning_rate": 0.0})
    assert all((session.parameters[name] == before[name]).all() for name in before)
    session.step({**data, "learning_rate": 1.0})
    assert any((session.parameters[name] != before[name]).any() for name in before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"x": np.zeros((8, 12), np.float32)},
            r"'x' must have the shape \[4, 2, 12\], 4 micro-batches.*reshape\(4, 2, 12",
        ),
        ({"x": np.zeros((3, 2, 12), np.float32)}, r"must have the shape \[4, 2, 12\], 4 micro-batches, and has \[3, 2"),
        ({"target": np.zeros(2, np.int64)}, r"'target' must have the shape \[4, 2\]"),
        ({"target": np.full((4, 2), 5)}, r"holds 5 at \[0, 0\]"),
        ({"learning_rate": np.zeros(4, np.float32)}, r"'learning_rate' must have the shape \[\], and has \[4\]"),
        ({"x": None}, "'x'.* is missing"),
        ({"learning_rates": 1.0}, "did you mean 'learning_rate'"),
    ],
)
def test_wrong_inputs_are_refused_before_anything_changes(change: dict[str, object], message: str) -> None:
    step = compiled(perceptron(EACH), accumulate=COUNT)
    session = step.bind()
    before = dict(session.stored)
    data = {**data_for(step, 0, (COUNT,)), **change}
    with pytest.raises(fp.InputError, match=message):
        session.step({name: value for name, value in data.items() if value is not None})
    assert all((before[name] == session.stored[name]).all() for name in before)
    session.step(data_for(step, 0, (COUNT,)))


@pytest.mark.parametrize("count", [0, -2, 2.0, "4", None])
def test_a_wrong_number_of_micro_batches_is_refused(count: object) -> None:
    with pytest.raises(fp.UsageError, match="accumulate must be a whole number"):
        compiled(perceptron(2), accumulate=count)


def test_without_an_update_there_is_nothing_to_accumulate_for() -> None:
    for options in ({"loss": fp.losses.cross_entropy}, {"optimizer": fp.optim.SGD(0.1)}, {}):
        with pytest.raises(fp.UsageError, match="pass a loss and an optimizer"):
            fp.compile(perceptron(2), accumulate=2, **options)  # type: ignore[arg-type]


def test_a_step_allocates_nothing_that_grows_with_the_model() -> None:
    for size in (64, 4096):
        step = compiled(classifier(batch=size, width=128), accumulate=2)
        session, data = step.bind(), data_for(step, 0, (2,))
        session.step(data)
        tracemalloc.start()
        session.step(data)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 192 * 1024
    assert step.arena_bytes > 40 * peak

"""Losses against JAX, and how they are attached to models."""

import numpy as np
import pytest

from foreplan.base.errors import ShapeError, TraceError, UsageError
from foreplan.frontend import losses, nn, spec, trace
from foreplan.frontend.losses import attach_loss
from tests.ops.check import evaluate
from tests.oracle.peers import jax, jnp

RNG = np.random.default_rng(5)
ITEMS = spec(3)


def identity(shape, dtype="float32"):
    return trace(lambda x: {"y": x * 1.5}, spec(shape, dtype), name="model")


def value_of(graph, **inputs):
    return evaluate(graph, inputs)[graph.loss]


def log_probability(logits, target, axis):
    logs = np.asarray(jax.nn.log_softmax(jnp.asarray(logits), axis))
    return np.take_along_axis(logs, np.expand_dims(target, axis), axis).squeeze(axis)


@pytest.mark.parametrize(
    ("shape", "axis"), [((6, 5), 1), ((2, 3, 7), 2), ((2, 5, 3, 4), 1), ((2, 4, 2, 3, 2), 1)], ids=str
)
def test_cross_entropy(shape, axis):
    graph = attach_loss(identity(shape), losses.cross_entropy)
    x = RNG.standard_normal(shape).astype(np.float32)
    rest = shape[:axis] + shape[axis + 1 :]
    assert str(graph.inputs[1].type) == f"int64[{','.join(map(str, rest))}]"
    assert graph.inputs[1].name == "target"
    target = RNG.integers(0, shape[axis], rest)
    logs = log_probability(1.5 * x, target, axis)
    assert value_of(graph, x=x, target=target) == pytest.approx(-logs.mean(), rel=1e-5)
    target.flat[0] = target.flat[-1] = -100
    expected = -logs[target >= 0].mean()
    assert value_of(graph, x=x, target=target) == pytest.approx(expected, rel=1e-5)
    assert value_of(graph, x=x, target=np.full_like(target, -100)) == 0


def test_cross_entropy_with_options():
    graph = attach_loss(identity((2, 5, 3)), losses.CrossEntropy(ignore_index=0, axis=1))
    x, target = RNG.standard_normal((2, 5, 3)).astype(np.float32), np.array([[0, 1, 2], [4, 0, 3]])
    expected = -log_probability(1.5 * x, target, 1)[target > 0].mean()
    assert value_of(graph, x=x, target=target) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("last", [nn.softmax, nn.log_softmax])
def test_a_closing_softmax_is_taken_into_cross_entropy(last):
    model = trace(lambda x: {"p": last(x)}, spec((4, 3)))
    graph = attach_loss(model, "cross_entropy")
    assert any("softmax" in note and "cross_entropy" in note for note in graph.notes)
    x = 40 * RNG.standard_normal((4, 3)).astype(np.float32)
    target = np.array([0, 2, 1, 1])
    expected = -log_probability(x, target, 1).mean()
    assert value_of(graph, x=x, target=target) == pytest.approx(expected, rel=1e-5)
    assert graph.outputs["p"] is model.outputs["p"]


@pytest.mark.parametrize(("flat", "shape"), [((4, 3), (4, 3, 1, 1)), ((2, 2, 3), (4, 3))])
def test_a_softmax_is_seen_through_a_reshape_that_keeps_the_classes(flat, shape):
    model = trace(lambda x: nn.softmax(x.reshape(flat)).reshape(shape), spec(shape))
    graph = attach_loss(model, "cross_entropy")
    assert any("softmax" in note and "cross_entropy" in note for note in graph.notes)
    x = 40 * RNG.standard_normal(shape).astype(np.float32)
    target = RNG.integers(0, 3, (4, *shape[2:]))
    expected = -log_probability(x, target, 1).mean()
    assert value_of(graph, x=x, target=target) == pytest.approx(expected, rel=1e-5)


def test_a_softmax_along_another_axis_stays():
    for model in (
        trace(lambda x: nn.softmax(x, axis=0), spec((4, 3))),
        trace(lambda x: nn.softmax(x).reshape(4, 3), spec((2, 6))),
        trace(lambda x: nn.softmax(x).reshape(4, 3), spec((3, 4))),
    ):
        assert not attach_loss(model, losses.cross_entropy).notes


def test_binary_cross_entropy():
    x, target = RNG.standard_normal((3, 2)).astype(np.float32) * 9, RNG.random((3, 2)).astype(np.float32)
    p = 1 / (1 + np.exp(-1.5 * x.astype(np.float64)))
    expected = -(target * np.log(p) + (1 - target) * np.log1p(-p)).mean()
    graph = attach_loss(identity((3, 2)), losses.binary_cross_entropy)
    assert value_of(graph, x=x, target=target) == pytest.approx(expected, rel=1e-5)
    model = trace(lambda x: nn.sigmoid(1.5 * x), spec((3, 2)))
    graph = attach_loss(model, losses.binary_cross_entropy)
    assert "sigmoid" in graph.notes[0]
    assert value_of(graph, x=x, target=target) == pytest.approx(expected, rel=1e-5)


def test_differences_mean_and_sum():
    x, t = (RNG.standard_normal((3, 4)).astype(np.float32) for _ in range(2))
    d = 1.5 * x - t
    size = np.abs(d)
    expected = {
        "mse": np.square(d).mean(),
        "l1": size.mean(),
        "huber": np.where(size <= 1, d * d / 2, size - 0.5).mean(),
    }
    for name, value in expected.items():
        graph = attach_loss(identity((3, 4)), name)
        assert value_of(graph, x=x, target=t) == pytest.approx(value, rel=1e-5)
    graph = attach_loss(identity((3, 4)), losses.mean)
    assert len(graph.inputs) == 1
    assert value_of(graph, x=x) == pytest.approx(1.5 * x.mean(), rel=1e-5)
    assert value_of(attach_loss(identity((3, 4)), losses.sum), x=x) == pytest.approx(1.5 * x.sum(), rel=1e-5)


def test_users_own_loss():
    def loss(a, b, weight=ITEMS, target=spec(3, "int64")):  # noqa: B008
        return losses.cross_entropy(a, target) + 0.5 * (weight * b).sum()

    model = trace(lambda x: {"a": x * 2, "b": x.sum(1)}, spec((3, 4)))
    graph = attach_loss(model, loss)
    assert [value.name for value in graph.inputs] == ["x", "weight", "target"]
    x, weight, target = RNG.standard_normal((3, 4)).astype(np.float32), np.float32([1, 2, 3]), np.array([0, 3, 1])
    expected = -log_probability(2 * x, target, 1).mean() + 0.5 * (weight * x.sum(1)).sum()
    assert value_of(graph, x=x, weight=weight, target=target) == pytest.approx(expected, rel=1e-5)
    assert list(graph.outputs) == ["a", "b"]
    assert graph.nodes[-1].source.startswith("test_losses.py:")


def test_a_loss_may_read_some_outputs_and_the_models_inputs():
    model = trace(lambda x: {"a": x * 2, "b": x.sum(1)}, spec((3, 4)))
    graph = attach_loss(model, losses.cross_entropy, outputs=["a"])
    assert str(graph.inputs[1].type) == "int64[3]"

    def reconstruction(y, x=spec((2, 2))):  # noqa: B008
        return np.square(y - x).mean()

    graph = attach_loss(identity((2, 2)), reconstruction)
    assert len(graph.inputs) == 1
    x = RNG.standard_normal((2, 2)).astype(np.float32)
    assert value_of(graph, x=x) == pytest.approx(np.square(0.5 * x).mean(), rel=1e-5)


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("name", ["mse", "cross_entropy", "mean", "cosine_embedding"])
def test_a_loss_of_fewer_outputs_takes_the_first_and_says_so(name, count):
    """As the command line does; with a list of outputs as many must be given as the loss reads."""
    model = trace(lambda x: {f"o{i}": np.tanh(x * (i + 1.0)) for i in range(count)}, spec((3, 4)))
    first, reads = [f"o{i}" for i in range(losses.LOSSES[name].reads)], losses.LOSSES[name].reads
    given = {"x": RNG.standard_normal((3, 4)).astype(np.float32)}
    graphs = [attach_loss(model, name), attach_loss(model, name, first)]
    for value in graphs[0].inputs[1:]:
        given[value.name] = np.ones(value.shape, value.dtype.numpy)
    assert value_of(graphs[0], **given) == value_of(graphs[1], **given)
    told = [note for note in graphs[0].notes if "count for nothing" in note]
    assert not graphs[1].notes and len(told) == (count > reads) and list(graphs[0].outputs) == list(model.outputs)
    assert all(f"'o{i}'" in told[0] for i in range(count) if told)
    if count > reads:
        with pytest.raises(UsageError, match=f"the loss {name} reads"):
            attach_loss(model, name, list(model.outputs))


def test_losses_inside_a_traced_function():
    graph = trace(lambda x, t: losses.mse(x, target=t), spec(3), spec(3))
    x, t = np.float32([1, 2, 3]), np.float32([1, 0, 1])
    values = evaluate(graph, {"x": x, "t": t})
    assert values[graph.outputs["output"]] == pytest.approx(8 / 3)


def test_errors():
    two, one = trace(lambda x: {"a": x, "b": x + 1}, spec((3, 4))), identity((3, 4))
    for error, told, model, loss in (
        (UsageError, r"reads 2 outputs.*1 \(y: float32\[3,4\]", one, losses.cosine_embedding),
        (UsageError, "takes 1 outputs", two, lambda a: a.mean()),
        (UsageError, "choose one of cross_entropy", two, "crossentropy"),
        (UsageError, "is no loss", one, 3),
        (UsageError, "already", attach_loss(identity(3), losses.mean), losses.mean),
        (TraceError, "scalar", one, lambda y: y.mean(0)),
        (TraceError, "scalar", identity((3, 4), "int64"), lambda y: (y > 0).sum()),
        (ShapeError, "two axes", identity(3), losses.cross_entropy),
        (ShapeError, "'x' as", identity(3), lambda y, x=spec(4): x.mean() + y.mean()),  # noqa: B008
    ):
        with pytest.raises(error, match=told):
            attach_loss(model, loss)
    with pytest.raises(UsageError, match="no output 'c'"):
        attach_loss(two, losses.mean, outputs=["c"])


@pytest.mark.parametrize("axis", [2, 5, -3])
def test_an_axis_of_classes_that_is_none(axis: int) -> None:
    """It was taken modulo the rank, so that 2 were the samples."""
    with pytest.raises(ShapeError, match="distinct axes of a tensor with 2 axes"):
        attach_loss(identity((4, 4)), losses.CrossEntropy(axis=axis))

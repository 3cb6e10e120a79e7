"""Values and gradients of losses against JAX and plain formulas: drawn, at extremes, in narrow types, on engines."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import foreplan as fp
from foreplan.frontend import losses, nn
from tests.frontend.loss_values import model_of, of_loss
from tests.oracle.peers import jax, jnp

RNG = np.random.default_rng(11)
ENGINES = ["numpy", "cpu:threads=1"]


def near(loss: Any, formula: Callable[..., Any], outputs: list[np.ndarray], further: Any, **options: Any) -> None:
    """As a JAX formula and its gradients."""
    far = options.pop("far", 1e-5)
    value, gradients = of_loss(loss, outputs, further, **options)
    given = [jnp.asarray(x, jnp.float32) for x in outputs]
    with_gradients = jax.value_and_grad(lambda *xs: formula(*xs, *further.values()), tuple(range(len(given))))
    wanted, theirs = jax.jit(with_gradients)(*given)
    assert value == pytest.approx(float(wanted), rel=10 * far, abs=far)
    for mine, other in zip(gradients, map(np.asarray, theirs), strict=True):
        np.testing.assert_allclose(mine, other, rtol=10 * far, atol=far * max(1e-3, np.abs(other).max()))


def smooth(weight: np.ndarray, smoothing: float, ignored: int) -> Callable[..., Any]:
    """PyTorch's definition, from probabilities of the target."""

    def loss(x: Any, target: Any) -> Any:
        logs = jax.nn.log_softmax(x)
        counts = target != ignored
        spread = np.eye(x.shape[1])[target] * (1 - smoothing) + smoothing / x.shape[1]
        items = -(spread * weight * logs).sum(1)
        return (counts * items).sum() / (counts * weight[target]).sum()

    return loss


@pytest.mark.parametrize("target", ENGINES)
@pytest.mark.parametrize("end", [lambda x: x, nn.softmax], ids=["logits", "softmax"])
def test_cross_entropy_with_weights_and_smoothing(target: str, end: Callable[..., Any]) -> None:
    weight, labels = RNG.uniform(0.1, 2, 5), {"target": np.array([0, 3, 1, 4, 3, 2, 1])}
    loss = losses.CrossEntropy(1, weight=weight, label_smoothing=0.3)
    assert any("softmax" in note for note in losses.attach_loss(model_of([np.zeros((7, 5))], end), loss).notes) == (
        end is nn.softmax
    )
    near(loss, smooth(weight, 0.3, 1), [30 * RNG.standard_normal((7, 5))], labels, end=end, target=target)


def test_what_does_not_count_gives_nothing() -> None:
    x, nobody = RNG.standard_normal((2, 3)), {"target": np.array([2, 2])}
    for more in ({}, {"weight": [1.0, 2.0, 3.0]}, {"label_smoothing": 0.5}, {"weight": [0.0] * 3, "ignore_index": 0}):
        for kind in (losses.CrossEntropy, losses.NegativeLogLikelihood):
            if kind is losses.NegativeLogLikelihood and "label_smoothing" in more:
                continue
            value, (gradient,) = of_loss(kind(**{"ignore_index": 2} | more), [x], nobody)
            assert value == 0 and not gradient.any()


def test_logits_and_probabilities_at_extremes() -> None:
    """Forward and backward are finite, and right."""
    x = np.array([[3e4, -3e4, 0.0], [10.0, 10.0, 10.0]])
    value, (gradient,) = of_loss(losses.cross_entropy, [x], {"target": np.array([1, 0])})
    assert value == pytest.approx((6e4 + np.log(3)) / 2)
    np.testing.assert_allclose(gradient, np.array([[1, -1, 0], [-2 / 3, 1 / 3, 1 / 3]]) / 2, rtol=1e-6)
    value, (gradient,) = of_loss(losses.CrossEntropy(label_smoothing=0.1), [x[:1]], {"target": np.array([0])})
    assert value == pytest.approx(0.1 / 3 * 9e4) and np.isfinite(gradient).all()
    for loss in (losses.binary_cross_entropy, losses.BinaryCrossEntropy(3.0)):
        value, (gradient,) = of_loss(loss, [np.array([2e4, -2e4])], {"target": np.array([0.0, 1.0])})
        weight = 1.0 if loss is losses.binary_cross_entropy else 3.0
        assert value == pytest.approx(1e4 * (1 + weight))
        np.testing.assert_allclose(gradient, [0.5, -weight / 2])
    value, (gradient,) = of_loss(
        losses.KLDivergence("batchmean"), [np.array([[-np.inf, 0.0]])], {"target": np.array([[0.0, 1.0]])}
    )
    assert value == 0 and gradient.tolist() == [[0.0, -1.0]]
    value, (gradient,) = of_loss(losses.nll, [np.array([[-np.inf, -1.0]] * 2)], {"target": np.array([1, -100])})
    assert value == 1 and gradient.tolist() == [[0.0, -1.0], [0.0, 0.0]]


def test_vectors_that_are_equal_or_zero_have_gradients() -> None:
    a, zero = RNG.standard_normal((3, 4)), np.zeros((3, 4))
    for p in (1.0, 2.0, 1.5):
        value, gradients = of_loss(losses.TripletMargin(0.5, p, epsilon=0.0), [a, a, a], {})
        assert value == pytest.approx(0.5) and all(np.isfinite(g).all() for g in gradients)
    value, gradients = of_loss(losses.triplet_margin, [a, a, zero], {})
    assert all(np.isfinite(g).all() for g in gradients)
    for label in (1.0, -1.0):
        for pair in ([zero, zero], [a, zero], [a, a]):
            value, gradients = of_loss(losses.cosine_embedding, pair, {"target": np.full(3, label)})
            cosine = float(pair[1].any())
            assert value == pytest.approx(1 - cosine if label == 1 else cosine, abs=1e-6)
            assert all(np.isfinite(g).all() for g in gradients)


@pytest.mark.parametrize("target", ENGINES)
def test_nll_kl_bce_and_vectors_on_engines(target: str) -> None:
    x, t = -np.abs(RNG.standard_normal((4, 3))), RNG.dirichlet(np.ones(3), 4)
    a, b, c = RNG.standard_normal((3, 4, 6))
    labels, signs = {"target": np.array([2, 0, 1, 1])}, {"target": np.array([1.0, -1.0, 1.0, -1.0])}

    def cosine(a: Any, b: Any, y: Any) -> Any:
        found = (a * b).sum(1) / jnp.sqrt((a * a).sum(1) * (b * b).sum(1))
        return jnp.where(y > 0, 1 - found, jnp.maximum(found - 0.1, 0)).mean()

    def triplet(a: Any, p: Any, n: Any) -> Any:
        return jnp.maximum(jnp.linalg.norm(a - p, axis=1) - jnp.linalg.norm(a - n, axis=1) + 2.0, 0).mean()

    def binary(x: Any, y: Any) -> Any:
        return -(3 * y * jax.nn.log_sigmoid(x) + (1 - y) * jax.nn.log_sigmoid(-x)).mean()

    near(losses.nll, lambda x, t: -x[np.arange(4), t].mean(), [x], labels, target=target)
    near(
        losses.KLDivergence("batchmean"),
        lambda x, t: (t * (jnp.log(t) - x)).sum() / 4,
        [x],
        {"target": t},
        target=target,
    )
    near(losses.BinaryCrossEntropy([3.0] * 3), binary, [x], {"target": t}, end=nn.sigmoid, target=target)
    near(losses.CosineEmbedding(0.1), cosine, [a, b], signs, target=target)
    near(losses.TripletMargin(2.0), triplet, [a, b, c], {}, target=target)


def test_nll_takes_a_log_softmax_in() -> None:
    x, labels = 80 * RNG.standard_normal((5, 4)), {"target": np.array([0, 3, 2, 1, -100])}
    graph = losses.attach_loss(model_of([x], nn.log_softmax), losses.nll)
    assert "log_softmax" in graph.notes[0] and "loss nll" in graph.notes[0]
    assert not losses.attach_loss(model_of([x], nn.softmax), losses.nll).notes
    plain = of_loss(losses.cross_entropy, [x], labels)
    found = of_loss(losses.nll, [x], labels, nn.log_softmax)
    assert found[0] == plain[0] and (found[1][0] == plain[1][0]).all()


def all_ways(logs: np.ndarray, labels: list[int], blank: int) -> float:
    """−log of the summed probability of every way through time that spells the labels."""
    total = -np.inf
    for way in itertools.product(range(logs.shape[1]), repeat=len(logs)):
        if [c for c, _ in itertools.groupby(way) if c != blank] == labels:
            total = np.logaddexp(total, sum(logs[t, c] for t, c in enumerate(way)))
    return float(-total)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("target", ENGINES)
def test_ctc_is_the_sum_over_all_ways(target: str, precision: str) -> None:
    time, classes, blank = 5, 4, 2
    cases = [([0, 1], 5), ([1, 1], 4), ([3], 1), ([], 3), ([0, 3, 0], 5)]
    x = RNG.standard_normal((time, len(cases), classes)) * 2
    logs = x - np.logaddexp.reduce(x, 2, keepdims=True)
    each = [all_ways(logs[:n, i], labels, blank) / max(1, len(labels)) for i, (labels, n) in enumerate(cases)]
    padded = np.array([[*labels, 9, -1, 9][:3] for labels, _ in cases])  # what does not count may hold anything
    given = {
        "target": padded,
        "input_lengths": np.array([n for _, n in cases]),
        "target_lengths": np.array([len(labels) for labels, _ in cases]),
    }
    options = {"target": target, "precision": precision}
    value, (gradient,) = of_loss(losses.CTC(3, blank), [x], given, nn.log_softmax, **options)
    assert value == pytest.approx(np.mean(each), rel=1e-5)
    moved = np.zeros_like(x)
    for place in ((0, 0, 1), (3, 1, 2), (0, 2, 3), (2, 3, 0), (4, 4, 0), (4, 3, 1)):
        moved[:], h = 0, 1e-5
        moved[place] = h
        several = []
        for shifted in (x + moved, x - moved):
            logs = shifted - np.logaddexp.reduce(shifted, 2, keepdims=True)
            i = place[1]
            several.append(all_ways(logs[: cases[i][1], i], cases[i][0], blank) / max(1, len(cases[i][0])))
        wanted = (several[0] - several[1]) / (2 * h) / len(cases)
        assert gradient[place] == pytest.approx(wanted, abs=2e-6)


def test_labels_that_do_not_fit_into_the_time() -> None:
    x = RNG.standard_normal((3, 2, 3))
    given = {
        "target": np.array([[1, 1], [1, 2]]),
        "input_lengths": np.array([2, 3]),
        "target_lengths": np.array([2, 2]),
    }
    assert of_loss(losses.CTC(2), [x], given, nn.log_softmax)[0] == np.inf
    value, (gradient,) = of_loss(losses.CTC(2, zero_infinity=True), [x], given, nn.log_softmax)
    assert np.isfinite(value) and not gradient[:, 0].any() and gradient[:, 1].any()
    never = np.full((3, 2, 3), -np.inf)
    value, (gradient,) = of_loss(losses.CTC(2, zero_infinity=True), [never], given)
    assert value == 0 and not gradient.any()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(
    ("loss", "labels"),
    [
        (losses.CrossEntropy(weight=[1.0, 2.0, 0.5], label_smoothing=0.2), np.array([0, 2, 1, 0])),
        (losses.nll, np.array([0, 2, 1, 0])),
        (losses.BinaryCrossEntropy(2.0), np.eye(4, 3)),
        (losses.KLDivergence("batchmean"), np.full((4, 3), 1 / 3)),
    ],
    ids=lambda each: getattr(each, "name", ""),
)
def test_losses_of_a_narrow_model_are_those_of_float32(loss: losses.Loss, labels: np.ndarray, precision: str) -> None:
    """Its products are rounded; what the loss computes is not."""

    def model(x: Any) -> Any:
        y = nn.linear(x, 3)
        return nn.log_softmax(y) if loss.name in ("nll", "kl_div") else y

    found = []
    for each in ("float32", precision):
        optimizer = fp.optim.SGD(0.5)
        session = fp.compile(fp.trace(model, fp.spec((4, 8))), loss, optimizer, precision=each).bind(seed=1)
        x = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
        target = labels if labels.dtype.kind == "i" else labels.astype(np.float32)
        values = [session.step({"x": x, "target": target}).loss for _ in range(3)]
        found.append((values, next(iter(session.parameters.values()))))
    np.testing.assert_allclose(found[1][0], found[0][0], rtol=1e-2)
    np.testing.assert_allclose(found[1][1], found[0][1], atol=1e-2 * np.abs(found[0][1]).max())


def test_what_the_module_shows_is_losses() -> None:
    for name in dir(losses):
        each = getattr(losses, name)
        assert isinstance(each, losses.attach.Loss) or issubclass(each, losses.attach.Loss)
    assert not [name for name in dir(fp.optim) if name.startswith("_") or name in ("Updater", "annotations")]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: losses.CrossEntropy(label_smoothing=1.0), "label_smoothing must be in"),
        (lambda: losses.CrossEntropy(weight=[-1.0]), "weight of a class must be in"),
        (lambda: losses.CrossEntropy(weight=3), "weight must be a list"),
        (lambda: losses.BinaryCrossEntropy("x"), "pos_weight must be in"),
        (lambda: losses.KLDivergence("sum"), "mean, batchmean"),
        (lambda: losses.CosineEmbedding(1.5), "margin must be in"),
        (lambda: losses.TripletMargin(p=0.5), "p must be in"),
        (lambda: losses.CTC(blank=-1), "blank must be"),
        (lambda: of_loss(losses.CTC(), [np.zeros((3, 2, 2))], {}), r"losses\.CTC\(labels=20\)"),
        (lambda: of_loss(losses.triplet_margin, [np.zeros((3, 2))], {}), "reads 3 outputs"),
    ],
)
def test_what_cannot_be_meant_is_told(make: Callable[[], object], message: str) -> None:
    with pytest.raises(fp.UsageError, match=message):
        make()


@pytest.mark.parametrize(
    ("loss", "shapes", "message"),
    [
        (losses.CrossEntropy(weight=[1.0, 2.0]), [(4, 3)], "2 weights, and there are 3 classes"),
        (losses.BinaryCrossEntropy([1.0, 2.0]), [(4, 3)], "pos_weight has 2 numbers"),
        (losses.cosine_embedding, [(4, 3), (4, 2)], "outputs of one shape"),
        (losses.CTC(2), [(4, 3)], "ctc needs an output"),
        (losses.CTC(2, blank=3), [(4, 2, 3)], "more than 3 classes"),
        (losses.nll, [(3,)], "two axes"),
    ],
)
def test_outputs_that_do_not_fit_are_told(loss: losses.Loss, shapes: list[tuple[int, ...]], message: str) -> None:
    with pytest.raises(fp.ShapeError, match=message):
        losses.attach_loss(model_of([np.zeros(shape) for shape in shapes]), loss)

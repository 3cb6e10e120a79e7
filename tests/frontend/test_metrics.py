"""Metrics and evaluation: against scikit-learn and NumPy, with ties, items that do not count, and maps."""

from __future__ import annotations

import numpy as np
import pytest

import foreplan as fp

ENGINES = ["numpy", "cpu:threads=1"]


def measured(scores: np.ndarray, target: np.ndarray, metric: object, engine: str = "numpy") -> float:
    graph = fp.trace(lambda x: x * 1.0, fp.spec(scores.shape), name="scores")
    evaluation = fp.evaluation(graph, fp.losses.mean, {"metric": metric})
    return float(fp.compile(evaluation, target=engine).bind().step({"x": scores, "target": target}).outputs["metric"])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("seed", range(3))
def test_accuracy_is_that_of_scikit_learn(engine: str, seed: int) -> None:
    from sklearn.metrics import accuracy_score, top_k_accuracy_score

    rng = np.random.default_rng(seed)
    items, classes = int(rng.integers(5, 40)), int(rng.integers(3, 9))
    scores = rng.normal(size=(items, classes)).astype(np.float32)
    target = rng.integers(0, classes, items)
    assert measured(scores, target, fp.metrics.accuracy, engine) == pytest.approx(
        accuracy_score(target, scores.argmax(1))
    )
    for k in range(2, classes):
        expected = top_k_accuracy_score(target, scores, k=k, labels=np.arange(classes))
        assert measured(scores, target, fp.metrics.Accuracy(k=k), engine) == pytest.approx(expected)


def test_of_equal_scores_the_first_is_greatest() -> None:
    scores, target = np.zeros((6, 6), np.float32), np.arange(6)
    for k in range(1, 8):
        assert measured(scores, target, fp.metrics.Accuracy(k=k)) == pytest.approx(min(k, 6) / 6)


@pytest.mark.parametrize("shape, axis", [((4, 3, 5), 2), ((2, 4, 3, 5), 1), ((2, 4, 3, 2, 2), 1)])
@pytest.mark.parametrize("k", [1, 2])
def test_maps_and_items_that_do_not_count(shape: tuple[int, ...], axis: int, k: int) -> None:
    rng = np.random.default_rng(0)
    scores = rng.normal(size=shape).astype(np.float32)
    target = rng.integers(0, shape[axis], shape[:axis] + shape[axis + 1 :])
    target[0] = -100
    best = np.moveaxis(np.argsort(-scores, axis), axis, -1)[..., :k]
    right = (best == target[..., None]).any(-1)
    assert measured(scores, target, fp.metrics.Accuracy(k=k)) == pytest.approx(right[target != -100].mean())
    target[...] = -100
    assert measured(scores, target, fp.metrics.Accuracy(k=k)) == 0


def test_weights_of_classes_weigh_the_items() -> None:
    from sklearn.metrics import accuracy_score

    rng = np.random.default_rng(3)
    scores, target, weight = rng.normal(size=(30, 4)).astype(np.float32), rng.integers(0, 4, 30), rng.random(4) + 0.1
    expected = accuracy_score(target, scores.argmax(1), sample_weight=weight[target])
    assert measured(scores, target, fp.metrics.Accuracy(weight=weight)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("last", [lambda x: x, fp.nn.sigmoid])
def test_binary_accuracy_is_that_of_scikit_learn(engine: str, last: object) -> None:
    from sklearn.metrics import accuracy_score

    rng = np.random.default_rng(0)
    logits, target = rng.normal(size=(9, 5)).astype(np.float32), rng.integers(0, 2, (9, 5))
    graph = fp.trace(lambda x: last(x), fp.spec(logits.shape), name="scores")
    evaluation = fp.evaluation(graph, "binary_cross_entropy", ["binary_accuracy"])
    inputs = {"x": logits, "target": target.astype(np.float32)}
    found = fp.compile(evaluation, target=engine).bind().step(inputs).outputs["binary_accuracy"]
    assert found == pytest.approx(accuracy_score(target.ravel(), (logits > 0).ravel()))


def test_an_evaluation_gives_the_loss_and_metrics_of_the_model_as_it_is_used() -> None:
    def model(x: fp.frontend.Tensor) -> fp.frontend.Tensor:
        x = fp.nn.batch_norm(fp.nn.linear(x, 7, name="hidden"), name="norm")
        return fp.nn.linear(fp.nn.dropout(fp.nn.relu(x), 0.5), 3, name="head")

    graph = fp.trace(model, fp.spec((8, 5)))
    rng = np.random.default_rng(1)
    batch = {"x": rng.normal(size=(8, 5)).astype(np.float32), "target": rng.integers(0, 3, 8)}
    training = fp.compile(graph, fp.losses.cross_entropy, fp.optim.Adam(0.1)).bind()
    for _ in range(5):
        training.step(batch)
    (scores,) = fp.compile(graph).bind(share=training).step({"x": batch["x"]}).outputs.values()
    metrics = {"accuracy": "accuracy", "margin": lambda y: y.max() - y.min()}
    found = fp.compile(fp.evaluation(graph, "cross_entropy", metrics)).bind(share=training).step(batch).outputs
    assert list(found) == ["loss", "accuracy", "margin"]
    shifted = scores - scores.max(1, keepdims=True)
    log = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    assert found["loss"] == pytest.approx(-log[np.arange(8), batch["target"]].mean(), rel=1e-5)
    assert found["accuracy"] == pytest.approx((scores.argmax(1) == batch["target"]).mean())
    assert found["margin"] == pytest.approx(scores.max() - scores.min(), rel=1e-5)


def test_wrong_metrics_are_told() -> None:
    graph = fp.models.build("mlp:width=8,batch=4,inputs=6,classes=3")
    with pytest.raises(fp.UsageError, match="there is no metric 'acuracy'"):
        fp.evaluation(graph, fp.losses.cross_entropy, ["acuracy"])
    with pytest.raises(fp.UsageError, match="has a loss"):
        fp.evaluation(graph, metrics=["accuracy"])
    with pytest.raises(fp.UsageError, match="cannot be called 'loss'"):
        fp.evaluation(graph, fp.losses.cross_entropy, {"loss": "accuracy"})
    with pytest.raises(fp.UsageError, match="takes a list of names"):
        fp.evaluation(graph, fp.losses.cross_entropy, "accuracy")
    with pytest.raises(fp.UsageError, match="k must be a whole number"):
        fp.metrics.Accuracy(k=0)

"""Losses beside PyTorch's: values and gradients of drawn outputs, at extremes too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make setup-torch")

from torch.nn import functional as F  # noqa: E402

from foreplan.frontend import losses  # noqa: E402
from tests.frontend.loss_values import of_loss  # noqa: E402
from tests.profile import pick  # noqa: E402

SEEDS = range(pick(1, 2, 10))
Arrays = dict[str, np.ndarray]


def check(loss: losses.Loss, theirs: Callable[..., Any], outputs: list[np.ndarray], further: Arrays) -> None:
    """Values and gradients, within what float32 rounds."""
    value, gradients = of_loss(loss, outputs, further)
    given = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in outputs]
    wanted = theirs(*given, *(torch.tensor(x) for x in further.values()))
    wanted.backward()
    assert value == pytest.approx(float(wanted.detach()), rel=2e-5, abs=1e-6)
    for mine, x in zip(gradients, given, strict=True):
        other = x.grad.numpy()
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=2e-5 * max(1e-3, np.abs(other).max()))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("size", [1.0, 60.0])
def test_those_of_classes(seed: int, size: float) -> None:
    rng = np.random.default_rng(seed)
    classes = int(rng.integers(2, 7))
    weight, smoothing = rng.uniform(0.1, 2, classes), float(rng.uniform(0, 0.9))
    ignored = int(rng.integers(0, classes))
    weights = torch.tensor(weight)
    for shape, axis in (((5, classes), 1), ((2, classes, 3, 2), 1)):
        x = size * rng.standard_normal(shape)
        target = {"target": rng.integers(0, classes, [n for i, n in enumerate(shape) if i != axis])}
        target["target"].flat[0] = (ignored + 1) % classes  # something counts
        for more in ({}, {"weight": weight}, {"ignore_index": ignored, "weight": weight}):
            named = {**more, **({"weight": weights} if "weight" in more else {})}
            check(
                losses.CrossEntropy(**more, label_smoothing=smoothing),
                lambda x, t, named=named: F.cross_entropy(x, t, label_smoothing=smoothing, **named),
                [x],
                target,
            )
            check(losses.CrossEntropy(**more), lambda x, t, named=named: F.cross_entropy(x, t, **named), [x], target)
            check(
                losses.NegativeLogLikelihood(**more),
                lambda x, t, named=named: F.nll_loss(x, t, **named),
                [-np.abs(x)],
                target,
            )


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("seed", SEEDS)
def test_those_of_elements(seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = rng.choice([1.0, 90.0], (4, 3)) * rng.standard_normal((4, 3))
    y, weight = {"target": rng.random((4, 3))}, rng.uniform(0.1, 4, 3)
    y["target"][0] = [0, 1, 0]
    for given in (weight, float(weight[0])):
        check(
            losses.BinaryCrossEntropy(given),
            lambda x, y, given=given: F.binary_cross_entropy_with_logits(x, y, pos_weight=torch.as_tensor(given)),
            [x],
            y,
        )
    t = rng.dirichlet(np.ones(3), 4)
    t[1] = [0, 1, 0]
    for reduction in ("mean", "batchmean"):
        check(
            losses.KLDivergence(reduction),
            lambda x, t, r=reduction: F.kl_div(x, t, reduction=r),
            [-np.abs(x)],
            {"target": t},
        )
        check(
            losses.KLDivergence(reduction, log_target=True),
            lambda x, t, r=reduction: F.kl_div(x, t, reduction=r, log_target=True),
            [-np.abs(x)],
            {"target": np.log(t + 1e-6)},
        )


@pytest.mark.parametrize("seed", SEEDS)
def test_those_of_vectors(seed: int) -> None:
    rng = np.random.default_rng(seed)
    a, p, n = rng.standard_normal((3, 6, 5))
    p[0] = a[0]
    margin = float(rng.uniform(0.1, 0.9))
    target = {"target": rng.choice([-1.0, 1.0], 6)}
    cosine = losses.CosineEmbedding(margin)
    check(cosine, lambda a, b, t: F.cosine_embedding_loss(a, b, t, margin=margin), [a, p], target)
    for norm in (1.0, 2.0, 3.0):
        for swap in (False, True):
            loss = losses.TripletMargin(margin, norm, swap=swap)
            check(
                loss,
                lambda a, p, n, o=(norm, swap): F.triplet_margin_loss(a, p, n, margin, p=o[0], swap=o[1]),
                [a, p, n],
                {},
            )


@pytest.mark.parametrize("seed", SEEDS)
def test_ctc(seed: int) -> None:
    rng = np.random.default_rng(seed)
    time, batch, classes, labels = 9, 5, 4, 4
    blank = int(rng.integers(0, classes))
    others = [c for c in range(classes) if c != blank]
    x = rng.standard_normal((time, batch, classes)) * 3
    given = {
        "target": rng.choice(others, (batch, labels)),
        "input_lengths": rng.integers(labels * 2, time + 1, batch),
        "target_lengths": np.array([0, labels, *rng.integers(1, labels + 1, batch - 2)]),
    }

    def theirs(x: Any, *further: Any) -> Any:
        return F.ctc_loss(x.log_softmax(2), *further, blank=blank)

    class OfScores(losses.CTC):
        def __call__(self, *tensors: Any, **inputs: Any) -> Any:
            from foreplan.frontend import nn

            return super().__call__(nn.log_softmax(tensors[0]), *tensors[1:], **inputs)

    check(OfScores(labels, blank), theirs, [x], given)
    given["target"][1], given["input_lengths"][1] = others[0], labels  # which needs blanks between
    value, (gradient,) = of_loss(OfScores(labels, blank, zero_infinity=True), [x], given)
    wanted = F.ctc_loss(
        torch.tensor(x).log_softmax(2), *map(torch.tensor, given.values()), blank=blank, zero_infinity=True
    )
    assert value == pytest.approx(float(wanted), rel=1e-5)
    assert not gradient[:, 1].any() and np.isfinite(gradient).all()
    assert of_loss(OfScores(labels, blank), [x], given)[0] == np.inf

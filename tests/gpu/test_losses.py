"""Losses on a card, run on the CPU, beside NumPy's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import foreplan as fp
from foreplan.frontend import losses, nn
from tests.frontend.loss_values import model_of
from tests.gpu.card import OwnTarget
from tests.gpu.compiled import needs_gcc
from tests.gpu.test_training import cards
from tests.gpu.test_training import losses as step_all

pytestmark = needs_gcc
RNG = np.random.default_rng(4)
CASES: list[tuple[losses.Loss, list[tuple[int, ...]], dict[str, np.ndarray], Any]] = [
    (
        losses.CrossEntropy(weight=[1.0, 0.5, 2.0], label_smoothing=0.2, ignore_index=1),
        [(5, 3)],
        {"target": np.array([0, 1, 2, 2, 0])},
        nn.softmax,
    ),
    (losses.nll, [(4, 3)], {"target": np.array([2, -100, 1, 0])}, lambda x: -(x * x)),
    (losses.KLDivergence("batchmean"), [(2, 3)], {"target": np.float32([[0.5, 0.5, 0], [0, 1, 0]])}, nn.log_softmax),
    (losses.TripletMargin(3.0, swap=True), [(3, 4)] * 3, {}, lambda x: x),
    (losses.CosineEmbedding(0.2), [(3, 4)] * 2, {"target": np.float32([1, -1, 1])}, lambda x: x),
    (
        losses.CTC(2, blank=1),
        [(4, 2, 3)],
        {"target": np.array([[0, 2], [2, 0]]), "input_lengths": np.array([4, 3]), "target_lengths": np.array([2, 1])},
        nn.log_softmax,
    ),
]


@pytest.mark.parametrize(("loss", "shapes", "further", "end"), CASES, ids=[case[0].name for case in CASES])
def test_a_step_gives_what_numpy_gives(
    loss: losses.Loss,
    shapes: list[tuple[int, ...]],
    further: dict[str, np.ndarray],
    end: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = model_of([np.zeros(shape) for shape in shapes], end)
    reference, step = (fp.compile(graph, loss, fp.optim.SGD(1.0), target=t) for t in ("numpy", OwnTarget("h100")))
    ours, theirs = cards(monkeypatch, step, 0), reference.bind()
    for name, shape in zip(graph.parameters, shapes):
        start = RNG.standard_normal(shape).astype(np.float32)
        for session in (theirs, *ours):
            session.parameters[name.name] = start
    assert step_all(ours, further) == pytest.approx(theirs.step(further).loss, rel=1e-5)
    for name, array in theirs.parameters.items():
        np.testing.assert_allclose(ours[0].parameters[name], array, rtol=1e-4, atol=1e-5, err_msg=name)

"""Optimizers of whole tensors and of rows, schedules and averages on a card, run on the CPU, beside NumPy's."""

from __future__ import annotations

import numpy as np
import pytest

import foreplan as fp
from foreplan.passes.optimizer import Optimizer
from tests.gpu.card import OwnTarget
from tests.gpu.compiled import needs_gcc
from tests.gpu.test_training import cards, losses
from tests.passes import test_rows
from tests.passes.quartic import batches, quartic, weights

pytestmark = needs_gcc
CASES: list[Optimizer] = [
    fp.optim.LAMB(fp.optim.cosine(0.02, steps=9, warmup=1), clip_norm=1.0),
    fp.optim.Adafactor(fp.optim.staircase(0.02, every=2, factor=0.3, warmup=2), ema=0.7),
    fp.optim.Muon(fp.optim.joined([fp.optim.one_cycle(0.1, steps=4), fp.optim.inverse_sqrt(0.1, warmup=2)], [2])),
    fp.optim.NAdam(0.02, clip_value=0.5, ema=0.5),
]


@pytest.mark.parametrize("optimizer", CASES, ids=lambda each: type(each).__name__)
def test_steps_give_what_numpy_gives(optimizer: Optimizer, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    reference, step = (fp.compile(quartic(), optimizer=optimizer, target=t) for t in ("numpy", OwnTarget("h100")))
    sessions = [reference.bind(), *cards(monkeypatch, step, 0)]
    start = {name: array.astype(np.float32) for name, array in weights(rng).items()}
    for name, array in start.items():
        for session in sessions:
            session.parameters[name] = array
    for batch in batches(rng, 3):
        given = {name: x.astype(np.float32) for name, x in batch.items()}
        wanted = sessions[0].step(given).loss
        assert losses(sessions[1:], given) == pytest.approx(wanted, rel=1e-4)
    for name, array in sessions[0].stored.items():
        scale = np.abs(array - start.get(name, 0)).max()
        np.testing.assert_allclose(sessions[1].stored[name], array, rtol=1e-5, atol=2e-4 * scale, err_msg=name)


@pytest.mark.parametrize("kind", [fp.optim.Adagrad, fp.optim.SparseAdam])
def test_rows_give_what_numpy_gives(kind: type[Optimizer], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one table, two lookups that meet in some rows."""
    rng, lookups, table = np.random.default_rng(0), [(4097,), (3, 5)], (17_000, 6)
    graph, optimizer = test_rows.model(lookups, table, "float32"), kind(0.05, epsilon=0.1)
    reference, step = (fp.compile(graph, optimizer=optimizer, target=t) for t in ("numpy", OwnTarget("h100")))
    sessions = [reference.bind(), *cards(monkeypatch, step, 0)]
    start = {
        name: rng.normal(size=shape).astype(np.float32) for name, shape in (("table", table), ("scale", table[1:]))
    }
    for name, array in start.items():
        for session in sessions:
            session.parameters[name] = array
    for _ in range(2):
        given = test_rows.given(rng, lookups, table, "float32")
        wanted = sessions[0].step(given).loss
        assert losses(sessions[1:], given) == pytest.approx(wanted, rel=1e-4)
    for name, array in sessions[0].stored.items():
        scale = np.abs(array - start.get(name, 0)).max()
        np.testing.assert_allclose(sessions[1].stored[name], array, rtol=1e-5, atol=2e-4 * scale, err_msg=name)

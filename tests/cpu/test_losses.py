"""Losses of the CPU engine: digits, denormal probabilities, threads."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.ops.linear_cross_entropy import LinearCrossEntropy
from foreplan.ops.loss import CrossEntropy, CrossEntropyGrad
from foreplan.runtime.cpu.kernels import linear_cross_entropy
from tests.cpu.check import needs_onednn, run
from tests.kernels import expected

pytestmark = needs_onednn()
RNG = np.random.default_rng(0)


def operands(rows: int, depth: int, classes: int, spread: float = 1.0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    h, w = (RNG.standard_normal(shape).astype(np.float32) for shape in ((rows, depth), (classes, depth)))
    return h, w * np.float32(spread), RNG.integers(0, classes, rows)


def test_large_logits_are_nearly_as_exact_as_numpys() -> None:
    """Beside what float64 gives, over ten draws: logits of some hundreds are rounded by what moves probabilities."""
    op, draws = LinearCrossEntropy(16), []
    for _ in range(10):
        h, w, target = operands(20, 64, 1300, spread=30.0)
        exact = expected(op, [h.astype(np.float64), w.astype(np.float64), target])
        results = zip(run(op, [h, w, target]), expected(op, [h, w, target]), exact, strict=True)
        draws.append([(ours - true, theirs - true) for ours, theirs, true in results])
    for pairs in zip(*draws, strict=True):
        ours, theirs = (np.abs(each) for each in zip(*pairs))
        assert ours.max() <= 2 * theirs.max() + 1e-6
        assert np.linalg.norm(ours) <= 2 * np.linalg.norm(theirs) + 1e-6


def test_probabilities_that_would_be_denormal_are_0() -> None:
    w = np.zeros((3, 1), np.float32)
    w[1] = -75
    w[2] = -95
    _, dh, dw = run(LinearCrossEntropy(1), [np.ones((1, 1), np.float32), w, np.zeros(1, np.int64)])
    assert dw[1] == dw[2] == 0 and abs(dh[0, 0]) < 1e-6
    x, target = np.zeros((1, 40), np.float32), np.array([1])
    x[0, ::2] = -95.0
    _, lse = expected(CrossEntropy(1), [x, target])
    (dx,) = run(CrossEntropyGrad(1), [x, target, lse, np.ones(1, np.float32)])
    assert not dx[0, ::2].any()


def test_parts_of_several_threads_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    op, given = LinearCrossEntropy(16), [*operands(40, 12, 700)]
    alone = run(op, given)
    monkeypatch.setattr(linear_cross_entropy, "GRAIN", 2048)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(alone, run(op, given, threads=3), strict=True))

"""Losses of the CPU engine: digits, denormal probabilities, threads."""

from __future__ import annotations

import numpy as np

from foreplan.ops.linear_cross_entropy import LinearCrossEntropy
from foreplan.ops.loss import CrossEntropy, CrossEntropyGrad
from tests.cpu.check import check_as_exact, needs_onednn, run
from tests.kernels import expected, normal

pytestmark = needs_onednn()


def test_large_logits_are_nearly_as_exact_as_numpys() -> None:
    """Logits of some hundreds are rounded by what moves probabilities."""
    rng, draws = np.random.default_rng(0), []
    for h, w in ((normal(20, 64, seed=i), normal(1300, 64, seed=i)) for i in range(10)):
        draws.append((h, w * np.float32(30), rng.integers(0, 1300, 20)))
    check_as_exact(LinearCrossEntropy(16), draws, 2.0)


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

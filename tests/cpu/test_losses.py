"""Losses of the CPU engine: digits, denormal probabilities, threads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from foreplan.graph import Op
from foreplan.ops.linear_cross_entropy import LinearCrossEntropy
from foreplan.ops.loss import CrossEntropy, CrossEntropyGrad
from tests.cpu.check import check_as_exact, needs_onednn, run
from tests.kernels import expected, normal

pytestmark = needs_onednn()


def by_plain_sums(op: Op, given: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Loss and gradients in float64 of logits whose products are added up in float32, one after the other. (NumPy's
    library adds in another order on each processor, and its errors differ by a factor of three.)
    """
    h, w, target = given
    logits = np.zeros((len(h), len(w)), np.float32)
    for x, y in zip(h.T, w.T):
        logits += np.outer(x, y)
    wide = logits.astype(np.float64)
    lse = np.log(np.exp(wide - wide.max(1, keepdims=True)).sum(1)) + wide.max(1)
    rows = np.arange(len(h))
    slope = np.exp(wide - lse[:, None])
    slope[rows, target] -= 1
    slope /= len(h)
    return [np.mean(lse - wide[rows, target]), slope @ w, slope.T @ h]


def test_large_logits_are_nearly_as_exact_as_plain_sums() -> None:
    """Logits of some hundreds are rounded by what moves probabilities."""
    rng, draws = np.random.default_rng(0), []
    for h, w in ((normal(20, 64, seed=i), normal(1300, 64, seed=i)) for i in range(10)):
        draws.append((h, w * np.float32(30), rng.integers(0, 1300, 20)))
    check_as_exact(LinearCrossEntropy(16), draws, 2.0, by_plain_sums)


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

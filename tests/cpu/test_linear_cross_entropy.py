"""Fused linear cross-entropy on the CPU engine against NumPy's: chunks, blocks of classes, biases, odd values."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.graph import TensorType, Window
from foreplan.graph.types import FLOAT32
from foreplan.ops.linear_cross_entropy import LinearCrossEntropy
from foreplan.runtime.cpu.kernels import linear_cross_entropy
from foreplan.runtime.cpu.kernels.linear_cross_entropy import CLASSES
from tests.cpu.check import check, needs_onednn, run, type_of
from tests.kernels import expected

pytestmark = needs_onednn()
RNG = np.random.default_rng(0)


def operands(rows: int, depth: int, classes: int, spread: float = 1.0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    h, w = (RNG.standard_normal(shape).astype(np.float32) for shape in ((rows, depth), (classes, depth)))
    return h, w * np.float32(spread), RNG.integers(0, classes, rows)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize(
    "sizes", [(1, 1, 1, 4), (5, 7, 3, 2), (37, 16, CLASSES, 37), (33, 20, CLASSES + 1, 16), (9, 65, 3 * CLASSES - 5, 4)]
)
def test_losses_and_gradients(sizes: tuple[int, int, int, int], mean: bool, biased: bool) -> None:
    rows, depth, classes, chunk = sizes
    h, w, target = operands(rows, depth, classes)
    bias = [RNG.standard_normal(classes).astype(np.float32)] * biased
    check(LinearCrossEntropy(chunk, mean=mean), h, w, target, *bias, atol=1e-5 * (1 if mean else 10))


def test_the_gradient_of_the_hidden_states_takes_their_bytes() -> None:
    check(LinearCrossEntropy(8), *operands(21, 12, 700), over=(1, 0))


def test_the_matrix_may_lie_transposed() -> None:
    h, w, target = operands(6, 24, 600)
    windows = [Window.dense(TensorType(FLOAT32, h.shape)), Window(TensorType(FLOAT32, w.shape), (4, 600 * 4))]
    check(LinearCrossEntropy(4), h, w, target, windows=[*windows, Window.dense(type_of(target))])


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8])
def test_targets_that_are_ignored_or_are_no_class(dtype: type) -> None:
    h, w, target = operands(12, 8, 40)
    target = target.astype(dtype)
    target[[2, 5, 6]] = 3
    check(LinearCrossEntropy(5, ignore_index=3), h, w, target)
    check(LinearCrossEntropy(5, ignore_index=3), h, w, np.full(12, 3, dtype))
    target[4] = 77
    check(LinearCrossEntropy(5, ignore_index=3), h, w, target)


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


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_shows(odd: float) -> None:
    h, w, target = operands(4, 8, 1100)
    w[700] = np.abs(w[700])
    h[2] = np.abs(h[2])
    h[2, 3] = odd
    op = LinearCrossEntropy(4)
    loss, dh, dw = run(op, [h, w, target])
    assert np.isnan(loss) and np.isnan(dh[2]).all() and np.isnan(dw).all()
    assert np.isfinite(dh[[0, 1, 3]]).all()


def test_classes_that_are_shut_out() -> None:
    """A bias of -inf: probability 0, also where it is a whole block's."""
    h, w, target = operands(7, 8, 3 * CLASSES)
    target %= CLASSES
    bias = np.zeros(3 * CLASSES, np.float32)
    bias[CLASSES : 2 * CLASSES] = -np.inf
    bias[2 * CLASSES + 3] = -np.inf
    check(LinearCrossEntropy(4), h, w, target, bias)


def test_probabilities_that_would_be_denormal_are_0() -> None:
    w = np.zeros((3, 1), np.float32)
    w[1] = -75
    w[2] = -95
    _, dh, dw = run(LinearCrossEntropy(1), [np.ones((1, 1), np.float32), w, np.zeros(1, np.int64)])
    assert dw[1] == dw[2] == 0 and abs(dh[0, 0]) < 1e-6


def test_parts_of_several_threads_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    op, given = LinearCrossEntropy(16), [*operands(40, 12, 700)]
    alone = run(op, given)
    monkeypatch.setattr(linear_cross_entropy, "GRAIN", 2048)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(alone, run(op, given, threads=3), strict=True))

"""Cross-entropy fused with the matrix that makes the logits: chunks of rows, blocks of classes, biases, odd values."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.graph import Window
from foreplan.ops.linear_cross_entropy import LinearCrossEntropy
from foreplan.runtime.cpu.kernels.linear_cross_entropy import CLASSES
from tests.engines.engine import Engine
from tests.ops.check import type_of

# Of narrow tensors `cpu` has kernels alone whose gradient of the weights is wide: all cases ask for it.
NEAR = {"rtol": 1e-4, "atol": 1e-5}
SIZES = [(1, 1, 1, 4), (5, 7, 3, 2), (37, 16, CLASSES, 37), (33, 20, CLASSES + 1, 16), (5, 65, 3 * CLASSES - 5, 4)]


def operands(rows: int, depth: int, classes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(rows)
    h, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((rows, depth), (classes, depth)))
    return h, w, rng.integers(0, classes, rows)


@pytest.mark.bfloat16
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_losses_and_gradients(engine: Engine, sizes: tuple[int, int, int, int], mean: bool, biased: bool) -> None:
    rows, depth, classes, chunk = sizes
    h, w, target = operands(rows, depth, classes)
    bias = [np.random.default_rng(1).standard_normal(classes).astype(np.float32)] * biased
    atol = 1e-5 * (1 if mean else 10)
    engine.check_over(
        LinearCrossEntropy(chunk, mean=mean, wide=True), [h, w, target, *bias], None, (1, 0), rtol=1e-4, atol=atol
    )


@pytest.mark.bfloat16
def test_views(engine: Engine) -> None:
    h, w, target = operands(9, 24, 600)
    windows = [Window(type_of(h), (4 * 40, 4)), Window(type_of(w), (4, 600 * 4)), Window.dense(type_of(target))]
    engine.check(LinearCrossEntropy(4, wide=True), h, w, target, windows=windows, **NEAR)


@pytest.mark.bfloat16
@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8])
def test_targets_that_are_ignored_or_are_no_class(engine: Engine, dtype: type) -> None:
    h, w, target = operands(12, 8, 40)
    target = target.astype(dtype)
    target[[2, 5, 6]] = 3
    op = LinearCrossEntropy(5, ignore_index=3, wide=True)
    engine.check(op, h, w, target, **NEAR)
    engine.check(op, h, w, np.full(12, 3, dtype), **NEAR)
    target[4] = 77
    engine.check(op, h, w, target, **NEAR)


@pytest.mark.bfloat16
@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_shows(engine: Engine, odd: float) -> None:
    h, w, target = operands(4, 8, 1100)
    w[700], h[2] = np.abs(w[700]), np.abs(h[2])
    h[2, 3] = odd
    loss, dh, dw = engine.run(LinearCrossEntropy(4, wide=True), [h, w, target])
    assert np.isnan(loss) and np.isnan(dh[2]).all() and np.isnan(dw).all()
    assert np.isfinite(dh[[0, 1, 3]]).all()


@pytest.mark.bfloat16
def test_classes_that_are_shut_out(engine: Engine) -> None:
    """A bias of -inf: probability 0, also where it is a whole block's."""
    h, w, target = operands(7, 8, 3 * CLASSES)
    bias = np.zeros(3 * CLASSES, np.float32)
    bias[CLASSES : 2 * CLASSES] = bias[2 * CLASSES + 3] = -np.inf
    engine.check(LinearCrossEntropy(4, wide=True), h, w, target % CLASSES, bias, **NEAR)

"""Softmax, cross-entropy and their gradients, row by row."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.graph import Window
from foreplan.ops.loss import CrossEntropy, CrossEntropyGrad
from foreplan.ops.softmax import LogSoftmax, LogSoftmaxGrad, RowOp, Softmax, SoftmaxGrad
from tests.engines.engine import Engine
from tests.kernels import as_images, dense, differences, expected, layouts, normal
from tests.ops.check import type_of

# Shape and axis: rows of one, odd rows, rows of more than one block, images along their channels and their columns.
CASES = [((1, 1), 1), ((5,), 0), ((7, 3), 1), ((2, 3, 65), 2), ((3, 2501), 1), ((2, 5, 3, 4), 1), ((2, 3, 4, 19), 3)]
CASES += [((3, 1), 1), ((5, 10), 1), ((4, 257), 1), ((1, 1000), 1), ((3, 4101), 1), ((2, 37, 3, 5), 1), ((2, 3, 70), 2)]
NEAR = {"rtol": 1e-5, "atol": 1e-6}


def targets(shape: tuple[int, ...], axis: int, dtype: type = np.int64) -> np.ndarray:
    items = (*shape[:axis], *shape[axis + 1 :])
    return np.random.default_rng(9).integers(0, shape[axis], items).astype(dtype)


def check_softmax(engine: Engine, of: type[RowOp], gradient: type[RowOp], shape: tuple[int, ...], axis: int) -> None:
    """Forward and backward, in both ways that images lie."""
    x, g = 3 * normal(2, *shape)
    (y,) = expected(of(axis), [x])
    for one, both in zip(layouts(x), layouts(y, g)):
        for over in (None, (0, 0)):
            engine.check(of(axis), x, windows=one, over=over, **NEAR)
        for over in (None, (0, 0), (0, 1)):
            engine.check(gradient(axis), y, g, windows=both, over=over, rtol=1e-4, atol=2e-6)
    engine.check(of(axis), 20 * x, rtol=1e-5, atol=1e-5)


def check_cross_entropy(engine: Engine, shape: tuple[int, ...], axis: int) -> None:
    """Losses and their gradients, some items ignored, and with one number as the gradient of all losses."""
    x, target = 3 * normal(*shape), targets(shape, axis)
    for dtype in (np.int64, np.int32, np.uint8):
        given = (x, target.astype(dtype))
        engine.check_lying(CrossEntropy(axis), *given, ways=layouts(*given))
    target.reshape(-1)[::5] = -100
    engine.check_lying(CrossEntropy(axis), x, target, ways=layouts(x, target))
    _, lse = expected(CrossEntropy(axis), [x, target])
    for dtype in (np.int64, np.int32):
        given = (x, target.astype(dtype), lse, normal(*lse.shape))
        engine.check_lying(CrossEntropyGrad(axis), *given, ways=layouts(*given))
        for windows in layouts(*given):
            engine.check(CrossEntropyGrad(axis), *given, windows=windows, over=(0, 0))
    given, repeated = (x, target, lse, np.full(lse.shape, 0.25, np.float32)), Window(type_of(lse), (0,) * lse.ndim)
    engine.check(CrossEntropyGrad(axis), *given, windows=[*as_images(x), *dense(target, lse), repeated])


@pytest.mark.bfloat16
@pytest.mark.parametrize(("shape", "axis"), CASES)
@pytest.mark.parametrize(("of", "gradient"), [(Softmax, SoftmaxGrad), (LogSoftmax, LogSoftmaxGrad)])
def test_softmax_and_its_gradient(
    engine: Engine, of: type[RowOp], gradient: type[RowOp], shape: tuple[int, ...], axis: int
) -> None:
    check_softmax(engine, of, gradient, shape, axis)


@pytest.mark.bfloat16
@pytest.mark.parametrize(("shape", "axis"), CASES)
def test_cross_entropy_and_its_gradient(engine: Engine, shape: tuple[int, ...], axis: int) -> None:
    check_cross_entropy(engine, shape, axis)


@pytest.mark.parametrize("width", [40, 300])
def test_rows_with_numbers_that_are_not_finite(engine: Engine, width: int) -> None:
    x = 3 * normal(7, width)
    x[0, 3], x[1, width - 1], x[2], x[3, 7] = np.nan, np.inf, -np.inf, -np.inf
    x[4], x[5, ::2] = np.finfo(np.float32).min, -np.inf  # as masks write it
    engine.check(Softmax(1), x, **NEAR)
    engine.check(LogSoftmax(1), x, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(engine.run(Softmax(1), [x])[0][4], 1 / width, rtol=1e-6)


@pytest.mark.bfloat16
@pytest.mark.parametrize("step", [716, 717, 718])
def test_rows_with_gaps(engine: Engine, step: int) -> None:
    x = 3 * normal(5, 700)
    for op in (Softmax(1), LogSoftmax(1)):
        engine.check(op, x, windows=[Window(type_of(x), (4 * step, 4))], atol=1e-5)


@pytest.mark.bfloat16
def test_ignored_items_and_targets_that_are_no_class(engine: Engine) -> None:
    x, target = 3 * normal(5, 9), np.array([3, -100, 9, -1, 0])
    engine.check(CrossEntropy(1), x, target)
    loss, lse = engine.run(CrossEntropy(1), [x, target])
    assert np.isnan(loss[2:4]).all() and loss[1] == 0
    # Of such an item the reference gives NaN where it picks an element of another one as well.
    (dx,) = engine.run(CrossEntropyGrad(1), [x, target, lse, np.ones(5, np.float32)])
    assert not dx[1].any() and np.isnan(dx[2:4]).all() and np.isfinite(dx[[0, 4]]).all()
    engine.check(CrossEntropyGrad(1, 3), x, np.array([3, 0, 1, 2, 8]), lse, np.ones(5, np.float32))


def test_logits_far_from_zero_cost_a_loss_no_digits(engine: Engine) -> None:
    x = np.round(3 * normal(3, 50)) + np.float32(1e6)
    loss, _ = engine.run(CrossEntropy(1), [x, x.argmax(1)])
    exact = x.astype(np.float64) - x.max(1, keepdims=True)
    np.testing.assert_allclose(loss, np.log(np.exp(exact).sum(1)), rtol=1e-6)


def test_the_gradient_is_that_of_the_loss(engine: Engine) -> None:
    """Against differences of a float64 evaluation."""
    x, target = (3 * normal(2, 3, 2, 2)).astype(np.float64), targets((2, 3, 2, 2), 1)
    g = normal(2, 2, 2)

    def weighted(x: np.ndarray) -> float:
        picked = np.take_along_axis(x, target[:, None], 1)[:, 0]
        return float((g * (np.log(np.exp(x).sum(1)) - picked)).sum())

    lse = np.log(np.exp(x).sum(1)).astype(np.float32)
    (dx,) = engine.run(CrossEntropyGrad(1), [x.astype(np.float32), target, lse, g])
    np.testing.assert_allclose(dx, differences(weighted, x), rtol=1e-4, atol=1e-6)

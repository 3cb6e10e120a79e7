"""Softmax, cross-entropy and their gradients by compiled loops, against the NumPy kernels and float64."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.graph import Op, Window
from foreplan.graph.layouts import channels_last
from foreplan.ops.loss import CrossEntropy, CrossEntropyGrad
from foreplan.ops.softmax import LogSoftmax, LogSoftmaxGrad, RowOp, Softmax, SoftmaxGrad
from foreplan.runtime.cpu.table import family_of
from tests.cpu.check import check, expected, needs_onednn, run, type_of

pytestmark = needs_onednn()
# Shape and axis: rows of one, odd rows, rows of more than one block, images along their channels and their columns.
CASES = [((1, 1), 1), ((5,), 0), ((7, 3), 1), ((2, 3, 65), 2), ((3, 2501), 1), ((2, 5, 3, 4), 1), ((2, 3, 4, 19), 3)]


def numbers(shape: tuple[int, ...], seed: int, scale: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def targets(shape: tuple[int, ...], axis: int, dtype: type = np.int64) -> np.ndarray:
    items = (*shape[:axis], *shape[axis + 1 :])
    return np.random.default_rng(9).integers(0, shape[axis], items).astype(dtype)


def best(array: np.ndarray, axis: int) -> Window:
    return channels_last(type_of(array)) if axis == 1 else Window.dense(type_of(array))


def checked(op: Op, given: list[np.ndarray], axis: int, over: tuple[int, int] | None = None) -> None:
    check(op, *given, windows=[best(x, axis) if x.ndim == given[0].ndim else Window.dense(type_of(x)) for x in given])
    if over is not None:
        windows = [best(x, axis) if x.ndim == given[0].ndim else Window.dense(type_of(x)) for x in given]
        check(op, *given, windows=windows, over=over)


@pytest.mark.parametrize(("shape", "axis"), CASES)
@pytest.mark.parametrize("of", [Softmax, LogSoftmax])
def test_softmax(of: type[RowOp], shape: tuple[int, ...], axis: int) -> None:
    checked(of(axis), [numbers(shape, 1)], axis, (0, 0))
    check(of(axis), numbers(shape, 1, 50.0))


@pytest.mark.parametrize(("shape", "axis"), CASES)
@pytest.mark.parametrize(("of", "forward"), [(SoftmaxGrad, Softmax), (LogSoftmaxGrad, LogSoftmax)])
@pytest.mark.parametrize("over", [(0, 0), (0, 1)])
def test_gradients_of_softmax(
    of: type[RowOp], forward: type[RowOp], shape: tuple[int, ...], axis: int, over: tuple[int, int]
) -> None:
    (y,) = expected(forward(axis), [numbers(shape, 2)])
    checked(of(axis), [y, numbers(shape, 3)], axis, over)


def test_rows_with_numbers_that_are_not_finite() -> None:
    lowest = np.finfo(np.float32).min
    x = numbers((6, 40), 4)
    x[0, 3], x[1, 39], x[2] = np.nan, np.inf, -np.inf
    x[3, 7] = -np.inf
    x[4] = lowest  # as masks write it
    with np.errstate(invalid="ignore"):
        for op in (Softmax(1), LogSoftmax(1)):
            check(op, x)
    (y,) = run(Softmax(1), [x])
    np.testing.assert_allclose(y[4], 1 / 40, rtol=1e-6)


@pytest.mark.parametrize(("shape", "axis"), CASES)
@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8])
def test_cross_entropy(shape: tuple[int, ...], axis: int, dtype: type) -> None:
    x = numbers(shape, 5)
    target = targets(shape, axis, dtype)
    checked(CrossEntropy(axis), [x, target], axis)


@pytest.mark.parametrize(("shape", "axis"), CASES)
def test_gradient_of_cross_entropy(shape: tuple[int, ...], axis: int) -> None:
    x, target = numbers(shape, 6), targets(shape, axis)
    _, lse = expected(CrossEntropy(axis), [x, target])
    given = [x, target, lse, numbers(lse.shape, 7)]
    checked(CrossEntropyGrad(axis), given, axis, (0, 0))
    spread = Window(type_of(lse), (0,) * lse.ndim)  # one number for all items
    given[3] = np.full(lse.shape, 0.25, np.float32)
    check(CrossEntropyGrad(axis), *given, windows=[best(x, axis), *map(Window.dense, map(type_of, given[1:3])), spread])


def test_ignored_items_and_wrong_targets() -> None:
    x = numbers((5, 9), 8)
    target = np.array([3, -100, 9, -1, 0])
    check(CrossEntropy(1), x, target)
    _, lse = expected(CrossEntropy(1), [x, target])
    given = [x, target, lse, np.ones(5, np.float32)]
    (dx,) = run(CrossEntropyGrad(1), given)
    assert not dx[1].any() and np.isnan(dx[2:4]).all() and np.isfinite(dx[[0, 4]]).all()
    check(CrossEntropyGrad(1, 3), *given[:1], np.array([3, 0, 1, 2, 8]), *given[2:])


def test_logits_far_from_zero_cost_a_loss_no_digits() -> None:
    x = np.round(numbers((3, 50), 12)) + np.float32(1e6)
    loss, _ = run(CrossEntropy(1), [x, x.argmax(1)])
    exact = x.astype(np.float64) - x.max(1, keepdims=True)
    np.testing.assert_allclose(loss, np.log(np.exp(exact).sum(1)), rtol=1e-6)


def test_probabilities_that_are_next_to_nothing_are_nothing() -> None:
    x = np.zeros((1, 40), np.float32)
    x[0, ::2] = -95.0  # whose exponentials are denormal
    _, lse = expected(CrossEntropy(1), [x, np.array([1])])
    (dx,) = run(CrossEntropyGrad(1), [x, np.array([1]), lse, np.ones(1, np.float32)])
    assert not dx[0, ::2].any()


def test_other_axes_of_other_tensors_have_no_kernel() -> None:
    x = type_of(numbers((2, 3, 4), 1))
    assert family_of(Softmax(1), [x], [x], 1) is None


def test_the_gradient_is_that_of_the_loss() -> None:
    """Against differences of a float64 evaluation."""
    x, target = numbers((2, 3, 2, 2), 10).astype(np.float64), targets((2, 3, 2, 2), 1)
    g = np.random.default_rng(11).standard_normal((2, 2, 2))

    def weighted(x: np.ndarray) -> float:
        picked = np.take_along_axis(x, target[:, None], 1)[:, 0]
        return float((g * (np.log(np.exp(x).sum(1)) - picked)).sum())

    wanted = np.zeros_like(x)
    for at in np.ndindex(x.shape):
        step = np.zeros_like(x)
        step[at] = 1e-6
        wanted[at] = (weighted(x + step) - weighted(x - step)) / 2e-6
    lse = np.log(np.exp(x).sum(1)).astype(np.float32)
    (dx,) = run(CrossEntropyGrad(1), [x.astype(np.float32), target, lse, g.astype(np.float32)])
    np.testing.assert_allclose(dx, wanted, rtol=1e-4, atol=1e-6)

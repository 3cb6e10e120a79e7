"""Softmax, cross-entropy and their gradients, row by row."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.graph import Op, Window
from foreplan.graph.layouts import channels_last
from foreplan.graph.types import DTYPES
from foreplan.ops.loss import CrossEntropy, CrossEntropyGrad
from foreplan.ops.softmax import LogSoftmax, LogSoftmaxGrad, Softmax, SoftmaxGrad
from tests.gpu.check import check, run, type_of
from tests.gpu.compiled import needs_gcc

pytestmark = needs_gcc
RNG = np.random.default_rng(0)
SHAPES = [
    ((3, 4101), 1),
    ((5, 10), 1),
    ((3, 1), 1),
    ((1, 1000), 1),
    ((4, 257), 1),
    ((2, 37, 3, 5), 1),
    ((33, 6), 0),
    ((2, 3, 70), 2),
]


def f32(*shape: int) -> np.ndarray:
    return (3 * RNG.standard_normal(shape)).astype(np.float32)


def layouts(*arrays: np.ndarray) -> list[list[Window]]:
    """In C order; and images with their channels last."""
    return [[lie(type_of(x)) for x in arrays] for lie in (Window.dense, channels_last)]


@pytest.mark.parametrize(("shape", "axis"), SHAPES)
@pytest.mark.parametrize("op", [Softmax, LogSoftmax])
def test_rows(op: type[Op], shape: tuple[int, ...], axis: int) -> None:
    x = f32(*shape)
    for windows in layouts(x):
        check(op(axis), x, windows=windows, atol=1e-6)
    check(op(axis), x, over=(0, 0), atol=1e-6)


@pytest.mark.parametrize(("shape", "axis"), SHAPES)
@pytest.mark.parametrize(("op", "forward"), [(SoftmaxGrad, Softmax), (LogSoftmaxGrad, LogSoftmax)])
def test_gradients(op: type[Op], forward: type[Op], shape: tuple[int, ...], axis: int) -> None:
    (y,), g = run(forward(axis), [f32(*shape)]), f32(*shape)
    for windows in layouts(y, g):
        check(op(axis), y, g, windows=windows, rtol=1e-4, atol=2e-6)
    for over in ((0, 0), (0, 1)):
        check(op(axis), y, g, over=over, rtol=1e-4, atol=2e-6)


def test_rows_with_infinities() -> None:
    x = f32(4, 300)
    x[0, 5], x[1, ::2], x[3, 7] = np.inf, -np.inf, np.nan
    check(Softmax(1), x, atol=1e-6)
    check(LogSoftmax(1), x, atol=1e-5)


@pytest.mark.parametrize("count", [90, 1023])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_other_types(dtype: str, count: int) -> None:
    x, g = (f32(6, count).astype(DTYPES[dtype].numpy) for _ in range(2))
    narrow = {"float16": 1e-3, "bfloat16": 8e-3, "float64": 1e-12}[dtype]
    check(Softmax(1), x, rtol=narrow, atol=narrow)
    check(LogSoftmaxGrad(1), run(LogSoftmax(1), [x])[0], g, rtol=narrow, atol=20 * narrow)
    target = RNG.integers(0, count, 6)
    check(CrossEntropy(1), x, target, rtol=1e-5, atol=1e-5)
    log_sum = run(CrossEntropy(1), [x, target])[1]
    check(CrossEntropyGrad(1), x, target, log_sum, np.ones_like(log_sum), over=(0, 0), rtol=narrow, atol=narrow)


@pytest.mark.parametrize("step", [716, 717, 718])
def test_rows_with_gaps(step: int) -> None:
    x = f32(5, 700)
    for op in (Softmax(1), LogSoftmax(1)):
        check(op, x, windows=[Window(type_of(x), (4 * step, 4))], atol=1e-5)


def entropy_case(shape: tuple[int, ...], axis: int) -> tuple[np.ndarray, np.ndarray]:
    items = (*shape[:axis], *shape[axis + 1 :])
    target = RNG.integers(0, shape[axis], items)
    target.reshape(-1)[::5] = -100
    return f32(*shape), target


@pytest.mark.parametrize(("shape", "axis"), SHAPES)
def test_cross_entropy(shape: tuple[int, ...], axis: int) -> None:
    logits, target = entropy_case(shape, axis)
    for windows in layouts(logits, target):
        check(CrossEntropy(axis), logits, target, windows=windows)
    loss, log_sum = run(CrossEntropy(axis), [logits, target])
    g = f32(*loss.shape)
    given = (logits, target.astype(np.int32), log_sum, g)
    for windows in layouts(*given):
        check(CrossEntropyGrad(axis), *given, windows=windows)
    check(CrossEntropyGrad(axis), *given, over=(0, 0))
    one = np.broadcast_to(np.float32(0.25), loss.shape)
    repeated = Window(type_of(loss), (0,) * loss.ndim)
    windows = [*(Window.dense(type_of(x)) for x in given[:3]), repeated]
    check(CrossEntropyGrad(axis), *given[:3], np.ascontiguousarray(one), windows=windows)


def test_targets_that_are_no_class() -> None:
    logits, target = f32(4, 7), np.array([0, 7, -1, -100])
    check(CrossEntropy(1), logits, target)
    loss, log_sum = run(CrossEntropy(1), [logits, target])
    assert np.isnan(loss[1:3]).all() and loss[3] == 0
    # Of such an item the reference gives NaN where it picks an element of another one as well.
    (gradient,) = run(CrossEntropyGrad(1), [logits, target, log_sum, f32(4)])
    assert np.isnan(gradient[1:3]).all() and not gradient[3].any() and np.isfinite(gradient[0]).all()

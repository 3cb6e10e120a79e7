"""Softmax and its logarithm against SciPy, gradients against differences."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.special

from foreplan.base.errors import ShapeError
from foreplan.graph import GraphBuilder
from foreplan.ops.softmax import LogSoftmax, LogSoftmaxGrad, Softmax, SoftmaxGrad, log_softmax, softmax
from tests.ops.check import check_vjp, decomposed, run_op, type_of

RNG = np.random.default_rng(0)
SHAPES = [((5,), 0), ((3, 7), 1), ((3, 7), 0), ((2, 4, 3), 1), ((2, 0, 3), 1), ((0, 3), 1), ((300, 301), 0)]
BOTH = [(Softmax, softmax, scipy.special.softmax), (LogSoftmax, log_softmax, scipy.special.log_softmax)]


@pytest.mark.parametrize("op,helper,expected", BOTH)
@pytest.mark.parametrize("shape,axis", SHAPES)
def test_against_scipy(op: type, helper: object, expected: object, shape: tuple[int, ...], axis: int) -> None:
    x = RNG.standard_normal(shape) * 5
    if not x.size:
        assert run_op(op(axis), x)[0].shape == shape
        return
    np.testing.assert_allclose(run_op(op(axis), x)[0], expected(x, axis), rtol=1e-12, atol=1e-14)
    single = x.astype(np.float32)
    np.testing.assert_allclose(run_op(op(axis), single)[0], expected(single.astype(np.float64), axis), 2e-5, 5e-6)


@pytest.mark.parametrize("op,helper,expected", BOTH)
def test_extreme_logits(op: type, helper: object, expected: object) -> None:
    x = np.array([[1000.0, 999.0, -np.inf], [-1000.0, -1001.0, -3000.0], [0.0, -np.inf, -np.inf]])
    np.testing.assert_allclose(run_op(op(1), x)[0], expected(x, 1), rtol=1e-12, atol=1e-300)


@pytest.mark.parametrize("op,helper,expected", BOTH)
@pytest.mark.parametrize("shape,axis", [((5,), 0), ((3, 4), -1), ((2, 3, 4), 1)])
def test_gradients_and_decompositions(op: type, helper, expected, shape, axis) -> None:
    x = RNG.standard_normal(shape)
    check_vjp(lambda b, x: helper(b, x, axis), x)
    axis %= len(shape)
    grad = SoftmaxGrad if op is Softmax else LogSoftmaxGrad
    for one, arrays in ((op(axis), [x]), (grad(axis), [expected(x, axis), RNG.standard_normal(shape)])):
        np.testing.assert_allclose(decomposed(one, *arrays), run_op(one, *arrays), rtol=1e-10, atol=1e-12)


def test_refusals() -> None:
    b = GraphBuilder()
    with pytest.raises(ShapeError, match="floating-point"):
        softmax(b, b.input("i", type_of(np.zeros(3, np.int64))))
    with pytest.raises(ShapeError, match="not distinct axes"):
        log_softmax(b, b.input("x", type_of(np.zeros(3))), 1)

"""Cumulative sums against NumPy and ONNX's definition."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.base.errors import ShapeError
from foreplan.graph import GraphBuilder
from foreplan.ops.scan import CumSum, cumsum
from tests.ops.check import check_vjp, run_op, type_of

RNG = np.random.default_rng(0)


def expected(x: np.ndarray, axis: int, exclusive: bool, reverse: bool) -> np.ndarray:
    """By definition: a triangular matrix of ones times x."""
    n = x.shape[axis]
    ones = np.tril(np.ones((n, n), x.dtype), -1 if exclusive else 0)
    return np.moveaxis(np.tensordot(ones.T if reverse else ones, x, (1, axis)), 0, axis)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_against_triangular_matrices(axis: int, exclusive: bool, reverse: bool) -> None:
    for x in (RNG.standard_normal((3, 4, 5)), RNG.integers(-9, 9, (3, 1, 5)).astype(np.int32)):
        (y,) = run_op(CumSum(axis, exclusive, reverse), x)
        np.testing.assert_allclose(y, expected(x, axis, exclusive, reverse), rtol=1e-12, atol=1e-12)
    check_vjp(lambda b, x: cumsum(b, x, axis, exclusive, reverse), RNG.standard_normal((3, 4, 2)))


def test_refuses_what_has_no_sum() -> None:
    b = GraphBuilder()
    x = b.input("x", type_of(np.zeros((2, 3), np.bool_)))
    with pytest.raises(ShapeError, match="needs numbers"):
        cumsum(b, x, 0)

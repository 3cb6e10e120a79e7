"""Softmax and its logarithm of extreme logits, and what they refuse; tests/sweep has the rest."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.special

from foreplan.base.errors import ShapeError
from foreplan.graph import GraphBuilder
from foreplan.ops.softmax import LogSoftmax, Softmax, log_softmax, softmax
from tests.ops.check import run_op, type_of

BOTH = [(Softmax, softmax, scipy.special.softmax), (LogSoftmax, log_softmax, scipy.special.log_softmax)]


@pytest.mark.parametrize("op,helper,expected", BOTH)
def test_extreme_logits(op: type, helper: object, expected: object) -> None:
    x = np.array([[1000.0, 999.0, -np.inf], [-1000.0, -1001.0, -3000.0], [0.0, -np.inf, -np.inf]])
    np.testing.assert_allclose(run_op(op(1), x)[0], expected(x, 1), rtol=1e-12, atol=1e-300)


def test_refusals() -> None:
    b = GraphBuilder()
    with pytest.raises(ShapeError, match="floating-point"):
        softmax(b, b.input("i", type_of(np.zeros(3, np.int64))))
    with pytest.raises(ShapeError, match="not distinct axes"):
        log_softmax(b, b.input("x", type_of(np.zeros(3))), 1)

"""An operand that is given twice is read as it was, whatever its op may overwrite."""

from __future__ import annotations

import numpy as np
import pytest

import foreplan as fp
from foreplan.graph import GraphBuilder, Op, TensorType
from foreplan.graph.types import FLOAT32
from foreplan.ops.attention.ops import Attention
from foreplan.ops.map import elementwise
from foreplan.ops.matmul import MatMul
from foreplan.runtime.session import Session

CASES = {
    "a product added to its own factors": (MatMul(), (600, 600)),
    "attention of one tensor": (Attention(0.3, False, False), (1, 2, 256, 8)),
}


def exactly(op: Op, h: np.ndarray) -> np.ndarray:
    """In float64."""
    if isinstance(op, MatMul):
        return h @ h + h
    scores = 0.3 * h @ h.swapaxes(-1, -2)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights @ h / weights.sum(-1, keepdims=True)


@pytest.mark.parametrize("target", ["numpy", "cpu"])
@pytest.mark.parametrize("case", CASES)
def test_an_operand_that_is_given_three_times(case: str, target: str) -> None:
    op, shape = CASES[case]
    b = GraphBuilder("repeated")
    x = b.input("x", TensorType(FLOAT32, shape))
    h = elementwise(b, lambda x: x * 2.0, x)
    y = elementwise(b, lambda y: y + 1.0, b.node(op, h, h, h)[0])
    program = fp.lower(b.finish({"y": y}), target)
    session = Session(program, fp.plan(program))
    data = np.random.default_rng(0).standard_normal(shape).astype(np.float32) * 0.3
    found = session.step({"x": data}).outputs["y"]
    np.testing.assert_allclose(found, exactly(op, 2.0 * data.astype(np.float64)) + 1, rtol=1e-4, atol=1e-3)

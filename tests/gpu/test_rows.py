"""Softmax and cross-entropy of a card alone: other axes, other types."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.graph.types import DTYPES
from foreplan.ops.loss import CrossEntropy, CrossEntropyGrad
from foreplan.ops.softmax import LogSoftmax, LogSoftmaxGrad, Softmax, SoftmaxGrad
from tests.engines.engine import ENGINES
from tests.engines.test_softmax import check_cross_entropy, check_softmax, targets
from tests.gpu.check import check, run
from tests.gpu.compiled import needs_gcc
from tests.kernels import normal

pytestmark = needs_gcc


def test_columns() -> None:
    for of, gradient in ((Softmax, SoftmaxGrad), (LogSoftmax, LogSoftmaxGrad)):
        check_softmax(ENGINES["cuda"], of, gradient, (33, 6), 0)
    check_cross_entropy(ENGINES["cuda"], (33, 6), 0)


@pytest.mark.parametrize("count", [90, 1023])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_other_types(dtype: str, count: int) -> None:
    x, g = (3 * normal(2, 6, count)).astype(DTYPES[dtype].numpy)
    narrow = {"float16": 1e-3, "bfloat16": 8e-3, "float64": 1e-12}[dtype]
    check(Softmax(1), x, rtol=narrow, atol=narrow)
    check(LogSoftmaxGrad(1), run(LogSoftmax(1), [x])[0], g, rtol=narrow, atol=20 * narrow)
    target = targets((6, count), 1)
    check(CrossEntropy(1), x, target, rtol=1e-5, atol=1e-5)
    log_sum = run(CrossEntropy(1), [x, target])[1]
    check(CrossEntropyGrad(1), x, target, log_sum, np.ones_like(log_sum), over=(0, 0), rtol=narrow, atol=narrow)

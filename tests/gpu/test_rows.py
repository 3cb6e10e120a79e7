"""Softmax, cross-entropy and normalisation of rows on a card: other axes and types, sums in parts, alignment."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.graph.types import DTYPES
from foreplan.ops.loss import CrossEntropy, CrossEntropyGrad
from foreplan.ops.norm.rows import LayerNorm, LayerNormGrad
from foreplan.ops.softmax import LogSoftmax, LogSoftmaxGrad, Softmax, SoftmaxGrad
from tests.engines.engine import ENGINES
from tests.engines.test_row_norm import of_gradient
from tests.engines.test_softmax import check_cross_entropy, check_softmax, targets
from tests.gpu.check import check, made, run, type_of
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


def test_sums_over_many_rows_are_taken_in_parts() -> None:
    given = of_gradient(LayerNormGrad, (3, 400, 40), 2, True)
    kernel, _, _ = made(LayerNormGrad(2), [type_of(x) for x in given])
    assert kernel.workspace >= 9 * 2 * 40 * 4
    check(LayerNormGrad(2), *given, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("begins", ["x", "scale", "g", "added"])
def test_what_begins_between_vectors_gives_the_same_numbers(begins: str) -> None:
    given = [*of_gradient(LayerNormGrad, (5, 96), 1, True), normal(5, 96)]
    at = {"x": 0, "scale": 1, "g": 4, "added": 5}[begins]
    found = run(LayerNormGrad(1), given, behind=[int(i == at) for i in range(len(given))])
    whole = run(LayerNormGrad(1), given)
    for one, other in zip(whole, found):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", [50, 64])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_other_types_are_normalised(dtype: str, width: int) -> None:
    x, g = normal(2, 6, width).astype(DTYPES[dtype].numpy)
    scale = normal(width).astype(np.float64 if dtype == "float64" else np.float32)
    narrow = {"bfloat16": 2e-2, "float16": 2e-3, "float64": 1e-10}[dtype]
    check(LayerNorm(1, 1e-5), x, scale, scale, rtol=narrow, atol=narrow)
    _, *statistics = run(LayerNorm(1, 1e-5), [x])
    check(LayerNormGrad(1), x, scale, *statistics, g, rtol=narrow, atol=3 * narrow)
    check(LayerNormGrad(1), x, scale, *statistics, g, x, over=(0, 5), rtol=narrow, atol=3 * narrow)
    check(LayerNormGrad(1), x, scale, *statistics, g, x, over=(0, 4), rtol=narrow, atol=3 * narrow)

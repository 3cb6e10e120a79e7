"""Softmax, cross-entropy and normalisation of rows on a card: other axes and types, sums in parts, alignment."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.ops.norm.rows import LayerNormGrad
from foreplan.ops.softmax import LogSoftmax, LogSoftmaxGrad, Softmax, SoftmaxGrad
from tests.engines.engine import ENGINES
from tests.engines.test_row_norm import of_gradient
from tests.engines.test_softmax import check_cross_entropy, check_softmax
from tests.gpu.check import check, made, run, type_of
from tests.gpu.compiled import needs_gcc
from tests.kernels import normal

pytestmark = [needs_gcc, pytest.mark.usefixtures("compiled_ahead")]


def test_columns() -> None:
    for of, gradient in ((Softmax, SoftmaxGrad), (LogSoftmax, LogSoftmaxGrad)):
        check_softmax(ENGINES["cuda"], of, gradient, (33, 6), 0)
    check_cross_entropy(ENGINES["cuda"], (33, 6), 0)


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
